"""Times the steps of a context, sets its number of threads between them, and says once why a run crawls."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from ..machine.processors import Load, Processors
from .threads import Step, Threads

Kind = Literal["decode", "prefill"]
CRAWL_S: Final = 4.0  # seconds of steps before a run is said to crawl
CRAWL_LOST: Final = 0.4  # share of the processor time asked for that others took, with threads that wait for each other
CRAWL_LOST_ONE: Final = 0.6  # and with one thread, which only shares
PIECE_S: Final = 4.0  # how long a piece of a prompt may take
LEAST_PIECE: Final = 128  # tokens; pieces are multiples of it. In smaller ones threads wait for each other more often
_PAUSE_S: Final = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ThreadFigures:
    """Threads of one context.

    Attributes:
        decode, prefill: threads of the next step of each kind.
        limit: the most that are taken by themselves: physical cores that this process may use.
        automatic: whether they change while it runs; False where both numbers were given.
        n_changes: changes so far.
        crawl: why the run crawled, if it did; else empty.
    """

    decode: int
    prefill: int
    limit: int
    automatic: bool
    n_changes: int
    crawl: str


class Crawl:
    """Notices that most of the processor time that a run asks for goes to others. Says so once."""

    def __init__(self, given: bool) -> None:
        self._given = given
        self._wall_s = self._lost_s = self._throttled_s = self._others_s = 0.0
        self.text = ""

    def step(self, step: Step, n: int, load: Load, allowed: float) -> bool:
        """Take note of a step with `n` threads; True if this one made the text."""
        if self.text:
            return False
        asked = min(float(n), allowed)
        others = load.others + load.throttled * asked
        lost = min(max(0.0, asked - step.cpu_s / max(step.wall_s, 1e-9)), others) / asked
        keep = 1.0 if self._wall_s < CRAWL_S else 1 - CRAWL_S / (2 * self._wall_s)  # older steps count less and less
        self._wall_s = self._wall_s * keep + step.wall_s
        self._lost_s = self._lost_s * keep + lost * step.wall_s
        self._throttled_s = self._throttled_s * keep + load.throttled * step.wall_s
        self._others_s = self._others_s * keep + load.others * step.wall_s
        if self._wall_s < CRAWL_S or self._lost_s < (CRAWL_LOST_ONE if n == 1 else CRAWL_LOST) * self._wall_s:
            return False
        self.text = self._say(n, 1 - self._lost_s / self._wall_s)
        return True

    def _say(self, n: int, got: float) -> str:
        threads, they_ask = ("1 thread gets", "it asks") if n == 1 else (f"{n} threads get", "they ask")
        if self._throttled_s > 0.2 * self._wall_s:
            why = "the container's limit on processor time holds them back"
        else:
            why = f"other programs use {self._others_s / self._wall_s:.1f} processors"
        text = f"this run crawls: {threads} {got:.0%} of the processor time that {they_ask} for, because {why}"
        if self._given and n > 1:
            text += (
                ", and threads wait for each other; without a given number of threads (-t) kvtier takes fewer meanwhile"
            )
        return text


class Pace:
    """One context's threads. `before` and `after` are called around every computation of it.

    Args:
        apply: sets the threads for decode and for prefill.
        processors: what is read of the machine.
        decode, prefill: given numbers, which stay; None: chosen and changed.
    """

    def __init__(
        self,
        apply: Callable[[int, int], None],
        processors: Processors,
        decode: int | None = None,
        prefill: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        own: Callable[[], float] = time.process_time,
    ) -> None:
        self._apply, self._processors = apply, processors
        self._given: dict[Kind, int | None] = {"decode": decode, "prefill": prefill}
        self._threads: dict[Kind, Threads] = {}
        self._clock, self._own = clock, own
        self._applied = (0, 0)
        self._start = (0.0, 0.0)
        self._last: tuple[Kind, float] = ("decode", clock())  # kind and end of the last step
        self._token_s = 0.0  # seconds of a prompt's token, of late
        self._crawl = Crawl(decode is not None)

    def before(self, n_tokens: int) -> None:
        """A computation of `n_tokens` follows: set the threads for it."""
        kind = _kind(n_tokens)
        if self._given[kind] is None:
            self._prepare(kind)
        wanted = self._number("decode"), self._number("prefill")
        if wanted != self._applied:
            self._apply(*wanted)
            self._applied = wanted
        self._start = self._clock(), self._own()

    def _prepare(self, kind: Kind) -> None:
        load = self._processors.load()
        if kind not in self._threads:
            self._threads[kind] = Threads(self._processors.limit, load, coarse=kind == "prefill")
            return
        paused = self._clock() - self._last[1] > _PAUSE_S
        if paused or self._last[0] != kind:
            self._threads[kind].resume(load, paused)

    def after(self, n_tokens: int) -> None:
        """The computation has ended well."""
        kind, now = _kind(n_tokens), self._clock()
        step = Step(n_tokens, now - self._start[0], self._own() - self._start[1])
        self._last = kind, now
        load = self._processors.load()
        if self._crawl.step(step, self._number(kind), load, self._processors.allowed):
            _log.warning("%s", self._crawl.text)
        if kind == "prefill":
            self._token_s = step.wall_s / n_tokens
        if kind in self._threads:
            self._threads[kind].step(step, load)

    def piece(self, n_batch: int, n_ubatch: int) -> int:
        """How many tokens of a prompt to compute at once, at most `n_batch`: fewer where that would take long.

        Threads can change only between computations. All pieces are multiples of LEAST_PIECE tokens, so that the tokens
        after them stand in the same places of llama.cpp's tiles and the numbers are the same. Batches and micro-batches
        that do not begin at such places are not cut.
        """
        if self._given["prefill"] is not None or self._processors.limit == 1 or self._token_s <= 0:
            return n_batch
        n_ubatch = min(n_batch, n_ubatch)
        if n_batch % LEAST_PIECE or (n_ubatch % LEAST_PIECE and LEAST_PIECE % n_ubatch):
            return n_batch
        n = int(PIECE_S / self._token_s) // LEAST_PIECE * LEAST_PIECE
        return min(n_batch, max(LEAST_PIECE, n))

    def _number(self, kind: Kind) -> int:
        given = self._given[kind]
        if given is not None:
            return given
        return self._threads[kind].n if kind in self._threads else self._processors.limit

    @property
    def figures(self) -> ThreadFigures:
        """The numbers of now."""
        return ThreadFigures(
            self._number("decode"),
            self._number("prefill"),
            self._processors.limit,
            None in self._given.values(),
            sum(threads.n_changes for threads in self._threads.values()),
            self._crawl.text,
        )


def _kind(n_tokens: int) -> Kind:
    """llama.cpp takes the threads for prefill for every computation of more than one token."""
    return "decode" if n_tokens == 1 else "prefill"
