"""The controller of threads, by simulated machines: its answers to others' work, to quiet, and to any sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.engine import threads as control
from kvtier.engine.threads import Step, Threads
from kvtier.machine.processors import Load

QUIET = Load(2.0)


@dataclass
class Machine:
    """`n_cpus` processors on which `loops` programs of others compute without pause, and `low` more where nobody does.

    A step of one thread takes `work_s` undisturbed. Every thread that has to share its processor holds all of them up:
    with `spin` each wait for a processor costs that much more, in units of the step.
    """

    n_cpus: int
    work_s: float
    loops: int = 0
    low: int = 0
    spin: float = 3.0

    def share(self, n: int) -> float:
        """Of a processor, for each of `n` threads."""
        return min(1.0, self.n_cpus / (n + self.loops))

    def rate(self, n: int) -> float:
        """Tokens per second with n threads."""
        share = self.share(n)
        return n * share / self.work_s / (1 + self.spin * (1 - share) * (n > 1))

    def step(self, n: int) -> Step:
        wall_s = 1 / self.rate(n)
        return Step(1, wall_s, wall_s * n * self.share(n))

    def load(self, n: int) -> Load:
        ours = n * self.share(n)
        others = min(float(self.loops + self.low), self.n_cpus - ours)
        return Load(self.n_cpus - others, others)

    def run(self, threads: Threads, seconds: float) -> tuple[float, list[int]]:
        """Tokens per second over so many seconds, and the threads of each step."""
        spent, used = 0.0, []
        while spent < seconds:
            step = self.step(threads.n)
            used.append(threads.n)
            spent += step.wall_s
            threads.step(step, self.load(threads.n))
        return len(used) / spent, used


def best(machine: Machine) -> float:
    return max(machine.rate(n) for n in range(1, machine.n_cpus + 1))


@pytest.mark.parametrize("n_cpus", [2, 4, 16])
@pytest.mark.parametrize("work_s", [0.01, 0.2, 2.0])
def test_quiet_takes_all_and_stays(n_cpus: int, work_s: float) -> None:
    machine = Machine(n_cpus, work_s)
    threads = Threads(n_cpus, Load(float(n_cpus)))
    assert set(machine.run(threads, 60 * work_s + 20)[1]) == {n_cpus}
    assert threads.n_changes == 0


@pytest.mark.parametrize("from_the_start", [True, False])
@pytest.mark.parametrize("loops", [1, 2, 4])
@pytest.mark.parametrize("n_cpus", [2, 4, 8])
def test_beside_others_close_to_the_best_number(n_cpus: int, loops: int, from_the_start: bool) -> None:
    machine = Machine(n_cpus, 0.02)
    threads = Threads(n_cpus, QUIET if n_cpus == 2 else None)
    if from_the_start:
        threads = Threads(n_cpus, Load(max(0.0, n_cpus - loops), min(n_cpus, loops)))
    else:
        machine.run(threads, 5)
    machine.loops = loops
    machine.run(threads, 8)  # within seconds of the change
    rate, _ = machine.run(threads, 40)
    assert rate >= 0.8 * best(machine)


def test_threads_that_wait_for_each_other_come_down_after_one_step_that_hangs() -> None:
    threads = Threads(2)
    for _ in range(20):
        threads.step(Step(1, 0.01, 0.02), QUIET)
    threads.step(Step(1, 5.8, 5.9), Load(1.0, 1.0))
    assert threads.n == 1


def test_slow_steps_alone_change_nothing() -> None:
    """A disk, a longer context: others use nothing, so fewer threads would not help."""
    threads = Threads(2, QUIET)
    for _ in range(50):
        threads.step(Step(1, 0.01, 0.02), QUIET)
    for _ in range(50):
        threads.step(Step(1, 1.0, 0.2), Load(1.95, 0.05))
    assert threads.n == 2 and threads.n_changes == 0


def test_busy_processors_alone_change_nothing() -> None:
    """Others compute, but only where we leave room: work of lower priority."""
    threads = Threads(2, QUIET)
    for _ in range(500):
        threads.step(Step(1, 0.01, 0.0195), Load(1.9, 0.1))
    assert threads.n == 2 and threads.n_changes == 0


def test_work_of_lower_priority_is_found_to_give_way() -> None:
    machine = Machine(2, 0.02, low=2)
    threads = Threads(2, Load(0.0, 2.0))
    assert threads.n == 1
    machine.run(threads, 4)
    assert threads.n == 2


def test_a_limit_of_a_container_that_holds_threads_back() -> None:
    """Two threads in a container whose neighbours use up its quota: less than was there at the start."""
    threads = Threads(2)
    for _ in range(10):
        threads.step(Step(1, 0.5, 0.4), Load(0.8, 0.0, 0.6))
    assert threads.n == 1


@pytest.mark.parametrize("work_s", [0.005, 0.05, 0.5, 3.0])
@pytest.mark.parametrize("n_cpus", [2, 3, 16])
def test_quiet_leads_back_to_all_within_a_bounded_number_of_steps(n_cpus: int, work_s: float) -> None:
    machine = Machine(n_cpus, work_s, loops=2 * n_cpus)
    threads = Threads(n_cpus, Load(0.0, float(n_cpus)))
    machine.run(threads, 100 * work_s + 100)
    machine.loops = 0
    n_steps = 0
    while threads.n < n_cpus:
        threads.step(machine.step(threads.n), machine.load(threads.n))
        n_steps += 1
        assert n_steps <= 2 * control.QUIET_STEPS + 2 * control.WINDOW_STEPS + 2 * control.QUIET_S / work_s * n_cpus
    changes = threads.n_changes
    machine.run(threads, 20 * work_s + 20)
    assert threads.n == n_cpus and threads.n_changes <= changes + 1


def test_tries_that_fail_become_rare() -> None:
    machine = Machine(2, 0.02, loops=1, spin=10.0)
    threads = Threads(2, Load(1.0, 1.0))
    machine.run(threads, 60)
    rate, used = machine.run(threads, 300)
    assert rate >= 0.93 * machine.rate(1) and 2 in used


def test_two_that_adapt_side_by_side_both_come_to_one_thread() -> None:
    """Each is the other's load. With two threads each, every step takes a hundred times as long."""
    pair = [Threads(2), Threads(2)]
    now = [0.0, 0.0]
    tokens = [0, 0]
    while min(now) < 60:
        i = now.index(min(now))
        mine, other = pair[i].n, pair[1 - i].n
        crowded = mine + other
        share = min(1.0, 2 / crowded)
        wall_s = {2: 0.02, 3: 0.06, 4: 2.0}[crowded] if mine == 2 or crowded > 2 else 0.02
        others = min(float(other), other * share)
        pair[i].step(Step(1, wall_s, wall_s * mine * share), Load(2 - others, others))
        now[i] += wall_s
        tokens[i] += now[i] > 10
    assert min(tokens) / 50 >= 0.8 * 50  # tokens per second, of the 50 that one thread alone makes


def test_steps_without_tokens_or_time_are_no_steps() -> None:
    threads = Threads(2)
    assert threads.step(Step(0, 1.0, 1.0), QUIET) == threads.step(Step(1, 0.0, 0.0), QUIET) == 2


def test_after_a_pause_rates_are_not_compared() -> None:
    threads = Threads(2, Load(0.0, 2.0))
    for _ in range(200):  # until it tries two
        if threads.step(Step(1, 0.02, 0.02), Load(1.0, 1.0)) == 2:
            break
    assert threads.n == 2
    threads.resume(Load(0.5, 1.5), paused=False)
    assert threads.n == 1
    threads.resume(QUIET, paused=True)
    assert threads.n == 2
    threads.resume(Load(0.5, 1.5), paused=False)
    assert threads.n == 2
    threads.resume(Load(0.5, 1.5), paused=True)
    assert threads.n == 1


STEPS = st.builds(
    lambda n_tokens, wall_s, share: Step(n_tokens, wall_s, wall_s * share),
    st.integers(1, 512),
    st.floats(1e-4, 20.0),
    st.floats(0.0, 16.0),
)
LOADS = st.builds(lambda free, throttled: Load(free, 16.0 - free, throttled), st.floats(0.0, 16.0), st.floats(0.0, 1.0))


@given(st.integers(1, 16), st.lists(st.tuples(STEPS, LOADS), max_size=120))
def test_any_sequence_stays_within_the_limit_and_below_the_rate_of_its_hysteresis(
    limit: int, sequence: list[tuple[Step, Load]]
) -> None:
    threads = Threads(limit, sequence[0][1] if sequence else None)
    changed_s, now_s = [], 0.0
    for step, load in sequence:
        before = threads.n
        now_s += step.wall_s
        after = threads.step(step, load)
        assert 1 <= after <= limit and after == threads.n
        if after != before:
            changed_s.append(now_s)
    # Each change was preceded by a window's time with the number before it.
    for first, second in zip([0.0, *changed_s], changed_s, strict=False):
        assert second - first >= control.WINDOW_S * 0.999
    assert len(changed_s) == threads.n_changes


@given(st.integers(2, 16), st.lists(st.tuples(STEPS, LOADS), max_size=60), st.floats(0.002, 1.0))
def test_from_any_state_quiet_leads_back_to_all(limit: int, sequence: list[tuple[Step, Load]], work_s: float) -> None:
    threads = Threads(limit)
    for step, load in sequence:
        threads.step(step, load)
    # a try that is under way when the quiet begins is judged first, and one that had failed may delay one at most
    for step in _quiet_steps(threads, work_s, 4 * control.LONGEST_WAIT_S):
        threads.step(step, Load(float(limit)))
        if threads.n == limit and threads._try is None:
            return
    raise AssertionError(f"still {threads.n} of {limit} threads")


def _quiet_steps(threads: Threads, work_s: float, seconds: float) -> Iterator[Step]:
    spent = 0.0
    while spent < seconds:
        wall_s = work_s / threads.n
        spent += wall_s
        yield Step(1, wall_s, wall_s * threads.n)


def test_a_simulated_machine_is_what_it_says() -> None:
    rates: Callable[[Machine], list[float]] = lambda machine: [machine.rate(n) for n in (1, 2)]  # noqa: E731
    alone, beside = rates(Machine(2, 0.02)), rates(Machine(2, 0.02, loops=2))
    assert alone[1] == 2 * alone[0] and beside[0] > beside[1]
