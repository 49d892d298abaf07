"""How many threads to compute with: a controller that sees steps and the machine's load, but no clock and no files.

Threads of one step wait for each other at every operation. Where another program has taken the processor of one, all
wait for it, and one thread fewer is faster than all. Which number is best is tried, not computed: a change is kept if
tokens come faster after it.

- Fewer: the threads get less processor time than they ask for while others use processors, and steps take longer than
  the best of late.
- All: the processors have been free for a while.
- One more, to see: the threads get all that they ask for although others are busy (with work of lower priority, for
  example), or it is prefill, whose operations are long.

A try that failed is followed by twenty times what it lost before the next, so that tries cost little.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from ..machine.processors import Load

WINDOW_STEPS: Final = 3  # a rate is one of at least so many steps, or of two long ones
WINDOW_S: Final = 0.3  # and of so many seconds
LONG_S: Final = 1.0
KEPT_S: Final = 1.0  # seconds of steps that a rate is taken over, at most
QUIET_S: Final = 1.0  # the processors must have been free for so long before more threads take them
QUIET_STEPS: Final = 4
SLOW: Final = 1.25  # times the best of late
LACKING: Final = 0.25  # processors that the threads asked for and did not get
HOPELESS: Final = 3.0  # a try that takes so many times longer is ended at once
FIRST_WAIT_S: Final = 1.0  # until the first try; doubled by each that fails
LONGEST_WAIT_S: Final = 60.0
TRY_SHARE: Final = 20.0  # after a try that lost a second, none for so many seconds
GAIN: Final = 0.95  # a try must take at most so much of the time before
_FORGET: Final = 1.002  # the best of late grows by so much with every undisturbed step


@dataclass(frozen=True, slots=True)
class Step:
    """One computation: tokens, seconds by the wall, seconds of processor time of all threads together."""

    n_tokens: int
    wall_s: float
    cpu_s: float


class _Window:
    """The last steps with one number of threads."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()
        self.wall_s = self.cpu_s = 0.0
        self.n_tokens = 0

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: Step) -> None:
        self._steps.append(step)
        self._count(step, 1)
        while len(self._steps) > WINDOW_STEPS and self.wall_s - self._steps[0].wall_s >= KEPT_S:
            self._count(self._steps.popleft(), -1)

    def _count(self, step: Step, sign: int) -> None:
        self.wall_s += sign * step.wall_s
        self.cpu_s += sign * step.cpu_s
        self.n_tokens += sign * step.n_tokens

    @property
    def per_token_s(self) -> float:
        return self.wall_s / max(1, self.n_tokens)

    @property
    def is_whole(self) -> bool:
        n = len(self._steps)
        return self.wall_s >= WINDOW_S and (n >= WINDOW_STEPS or (n > 1 and self.wall_s >= LONG_S))


def lacking(n: int, wall_s: float, cpu_s: float, load: Load) -> float:
    """Processors that `n` threads asked for and did not get, where others or a control group can be why."""
    return min(max(0.0, n - cpu_s / max(wall_s, 1e-9)), load.others + load.throttled * n)


@dataclass(frozen=True, slots=True)
class _Try:
    """A change on trial: the threads before it, what a token took then, and whether quiet was the reason."""

    before: int
    per_token_s: float
    gain: float
    for_quiet: bool


class Threads:
    """The number of threads of one kind of step (decode or prefill), between 1 and `limit`.

    `load` is what others did before the first step; a machine that is busy from the start is met with fewer threads.
    With `coarse` operations, those of prefill, threads seldom wait for each other, and more of them get more of
    processors that are shared: then all are taken at first, and one more is tried even where threads do not get all
    that they ask for.
    """

    def __init__(self, limit: int, load: Load | None = None, coarse: bool = False) -> None:
        self.limit: Final = max(1, limit)
        self._coarse: Final = coarse
        self.n = self.limit if load is None or coarse else self._room(load)
        self.n_changes = 0
        self._window = _Window()
        self._try: _Try | None = None
        self._best: dict[int, float] = {}  # threads: the least that a token took of late, undisturbed
        self._now_s = 0.0
        self._wait_s = FIRST_WAIT_S
        self._next_try_s = FIRST_WAIT_S
        self._quiet_s = 0.0
        self._n_quiet = 0
        self._quiet_failed = False  # more threads were slower although processors were free: no hurry to try again

    def _room(self, load: Load) -> int:
        return max(1, min(self.limit, int(load.free + 0.5)))

    def step(self, step: Step, load: Load) -> int:
        """Take note of a step with `n` threads; returns the number for the next one."""
        if self.limit == 1 or step.n_tokens < 1 or step.wall_s <= 0:
            return self.n
        self._now_s += step.wall_s
        self._window.add(step)
        self._watch_quiet(step, load)
        if self._try is not None:
            self._judge(self._try)
        else:
            self._consider(step, load)
        return self.n

    def resume(self, load: Load, paused: bool) -> None:
        """Something else came between the steps, so rates before and after it are not compared.

        With `paused` nothing was computed meanwhile, and `load` says what others do with processors: as at the start.
        """
        n = self.n if self._try is None else min(self.n, self._try.before)
        self._try = None
        self._window = _Window()
        n = self._room(load) if paused and not self._coarse else n
        if n != self.n:
            self._change(n)

    def _watch_quiet(self, step: Step, load: Load) -> None:
        if load.free >= self.n + 0.75 and load.throttled < 0.05:
            self._quiet_s += step.wall_s
            self._n_quiet += 1
        else:
            self._quiet_s, self._n_quiet, self._quiet_failed = 0.0, 0, False

    def _consider(self, step: Step, load: Load) -> None:
        """Start a try, if there is a reason for one."""
        window, n = self._window, self.n
        lack = lacking(n, window.wall_s, window.cpu_s, load)
        if n > 1:
            per_token_s = step.wall_s / step.n_tokens
            best = self._best.get(n)
            if lacking(n, step.wall_s, step.cpu_s, load) < LACKING:
                self._best[n] = per_token_s if best is None else min(best * _FORGET, per_token_s)
            if lack >= LACKING and (best is None or window.per_token_s > SLOW * best) and self._may_go_down(step):
                self._start(min(n - 1, self._room(load)), 1.0)
                return
        if n == self.limit:
            return
        is_time = self._now_s >= self._next_try_s
        if self._quiet_s >= QUIET_S and self._n_quiet >= QUIET_STEPS and (is_time or not self._quiet_failed):
            self._start(self._room(load), 1.0, for_quiet=True)
        elif window.is_whole and is_time and (self._coarse or lack < 0.1 * n):
            self._start(n + 1, GAIN)

    def _may_go_down(self, step: Step) -> bool:
        """Whether enough was seen; one long step is enough. After a try that failed, only when it is time again."""
        enough = self._window.is_whole or step.wall_s >= 2 * WINDOW_S
        return enough and (self._wait_s == FIRST_WAIT_S or self._now_s >= self._next_try_s)

    def _start(self, n: int, gain: float, for_quiet: bool = False) -> None:
        self._try = _Try(self.n, self._window.per_token_s, gain, for_quiet)
        self._change(n)

    def _judge(self, this: _Try) -> None:
        """Keep a change under which a token takes less time, take back one that does not pay."""
        window = self._window
        before_s = this.per_token_s * window.n_tokens
        if window.wall_s >= WINDOW_S and window.wall_s > HOPELESS * before_s:
            self._take_back(this, before_s)
        elif window.is_whole:
            if window.wall_s <= this.gain * before_s:
                self._try = None
                self._wait(FIRST_WAIT_S)
            else:
                self._take_back(this, before_s)

    def _take_back(self, this: _Try, before_s: float) -> None:
        lost_s = max(0.0, self._window.wall_s - before_s)
        self._wait(max(min(2 * self._wait_s, LONGEST_WAIT_S), TRY_SHARE * lost_s))
        self._try = None
        self._quiet_failed = this.for_quiet
        self._change(this.before)

    def _wait(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._next_try_s = self._now_s + wait_s

    def _change(self, n: int) -> None:
        self.n = n
        self.n_changes += 1
        self._window = _Window()
        self._quiet_s, self._n_quiet = 0.0, 0
