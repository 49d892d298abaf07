"""What is read of processors and control groups, on folders of files that stand for machines, and on this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.machine.processors import LOOK_S, Processors, cores, quota, usable

ALL = frozenset(range(4))


class Machine:
    """A root folder, a clock and the processor time of this process, all of which the test moves."""

    def __init__(self, root: Path) -> None:
        self.root, self.now, self.own = root, 100.0, 5.0
        self.ticks = {cpu: [0] * 10 for cpu in ALL}
        self.write("proc/self/cgroup", "0::/\n")
        self.stat()

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def stat(self) -> None:
        lines = [f"cpu{cpu} {' '.join(map(str, ticks))}" for cpu, ticks in self.ticks.items()]
        self.write("proc/stat", "\n".join(["cpu  1 2 3 4 5 6 7 8 0 0", *lines, "intr 99 1", "ctxt 7"]) + "\n")

    def passes(self, seconds: float, own: float, **of_cpu: tuple[str, float]) -> None:
        """Time passes; `cpu2=("user", 0.5)` makes that processor busy for half a second."""
        self.now += seconds
        self.own += own
        fields = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
        for cpu, (field, busy_s) in of_cpu.items():
            self.ticks[int(cpu[3:])][fields.index(field)] += round(busy_s * os.sysconf("SC_CLK_TCK"))
        self.stat()

    def watch(self, usable_processors: frozenset[int] = ALL, nice: int = 0) -> Processors:
        return Processors(self.root, usable_processors, lambda: self.now, lambda: self.own, nice)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_machine_without_any_of_the_files(tmp_path: Path) -> None:
    watched = Processors(tmp_path, ALL)
    load = watched.load()
    assert watched.limit == 4 and watched.quota is None and (load.free, load.others, load.throttled) == (4, 0, 0)


def test_others_are_what_is_busy_and_not_ours(machine: Machine) -> None:
    watched = machine.watch()
    machine.passes(1.0, 1.5, cpu0=("user", 1.0), cpu1=("system", 1.0), cpu2=("steal", 0.5), cpu3=("idle", 1.0))
    load = watched.load()
    assert load.others == pytest.approx(1.0) and load.free == pytest.approx(3.0)


@pytest.mark.parametrize(("field", "others"), [("idle", 0), ("iowait", 0), ("nice", 0), ("irq", 0.5), ("softirq", 0.5)])
def test_which_times_count(machine: Machine, field: str, others: float) -> None:
    watched = machine.watch()
    machine.passes(1.0, 0.0, cpu1=(field, 0.5))
    assert watched.load().others == pytest.approx(others)


def test_nice_programs_count_for_one_that_is_nice_itself(machine: Machine) -> None:
    watched = machine.watch(nice=5)
    machine.passes(1.0, 0.0, cpu1=("nice", 0.5))
    assert watched.load().others == pytest.approx(0.5)


def test_only_processors_that_may_be_used_count(machine: Machine) -> None:
    watched = machine.watch(frozenset({0, 1}))
    machine.passes(1.0, 0.0, cpu0=("user", 0.5), cpu2=("user", 1.0), cpu3=("user", 1.0))
    assert watched.limit == 2 and watched.load().free == pytest.approx(1.5)


def test_read_again_only_after_a_while(machine: Machine) -> None:
    watched = machine.watch()
    machine.passes(LOOK_S / 2, 0.0, cpu0=("user", LOOK_S / 2))
    assert watched.load().others == 0
    machine.passes(LOOK_S, 0.0, cpu0=("user", LOOK_S))
    assert watched.load().others == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("limit", "n"),
    [("50000 100000", 1), ("200000 100000", 2), ("150000 100000", 2), ("140000 100000", 1), ("max 100000", 4)],
)
def test_quota_of_version_2(machine: Machine, limit: str, n: int) -> None:
    machine.write("sys/fs/cgroup/cpu.max", limit + "\n")
    assert machine.watch().limit == n


@pytest.mark.parametrize(("limit_us", "n"), [("50000", 1), ("200000", 2), ("-1", 4), ("0", 4), ("", 4), ("all", 4)])
@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_quota_of_version_1(machine: Machine, mount: str, limit_us: str, n: int) -> None:
    machine.write("proc/self/cgroup", "4:memory:/a\n2:cpu,cpuacct:/docker/x\n0::/\n")
    machine.write(f"sys/fs/cgroup/{mount}/cpu.cfs_quota_us", limit_us + "\n")
    machine.write(f"sys/fs/cgroup/{mount}/cpu.cfs_period_us", "100000\n")
    assert machine.watch().limit == n


def test_the_tightest_of_all_groups_above_counts(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/slice/service/job\n")
    for path, limit in (("slice", "300000"), ("slice/service", "100000"), ("slice/service/job", "max")):
        machine.write(f"sys/fs/cgroup/{path}/cpu.max", f"{limit} 100000\n")
    found = quota(machine.root)
    assert found is not None and found.processors == 1 and found.folder.name == "service"


def test_neighbours_in_the_same_container_use_up_its_quota(machine: Machine) -> None:
    machine.write("sys/fs/cgroup/cpu.max", "200000 100000\n")
    machine.write("sys/fs/cgroup/cpu.stat", "usage_usec 1000000\nnr_throttled 0\nthrottled_usec 0\n")
    watched = machine.watch()
    machine.write("sys/fs/cgroup/cpu.stat", "usage_usec 2500000\nnr_throttled 4\nthrottled_usec 500000\n")
    machine.passes(1.0, 0.5)
    load = watched.load()
    assert load.free == pytest.approx(1.0) and load.throttled == pytest.approx(0.25)


def test_throttling_of_version_1(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "2:cpuacct:/x\n1:cpu:/x\n")
    machine.write("sys/fs/cgroup/cpu/x/cpu.cfs_quota_us", "100000\n")
    machine.write("sys/fs/cgroup/cpu/x/cpu.stat", "nr_throttled 0\nthrottled_time 0\n")
    machine.write("sys/fs/cgroup/cpuacct/x/cpuacct.usage", "1000000000\n")
    watched = machine.watch()
    machine.write("sys/fs/cgroup/cpu/x/cpu.stat", "nr_throttled 3\nthrottled_time 300000000\n")
    machine.write("sys/fs/cgroup/cpuacct/x/cpuacct.usage", "1700000000\n")
    machine.passes(1.0, 0.5)
    load = watched.load()
    assert load.throttled == pytest.approx(0.3) and load.free == pytest.approx(0.8)


def test_two_threads_of_a_core_are_one_core(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert cores(ALL, tmp_path) == 2 and cores(frozenset({0, 2}), tmp_path) == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs the scheduler's calls of Linux")
def test_affinity_of_this_process() -> None:
    one = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, {{{one}}}); from kvtier.machine.processors import Processors as P; "
        "print(P().limit, len(P().usable))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"]


def test_this_machine() -> None:
    watched = Processors()
    assert 1 <= watched.limit <= len(usable())
    load = watched.load()
    assert 0 <= load.free <= len(usable()) and 0 <= load.throttled <= 1
