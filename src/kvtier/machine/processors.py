"""How many processors this process may use, and how many others leave free: from /proc, /sys and control groups.

Everything is read below one root folder, so that a folder of files can stand in for a machine. What a system does not
have counts as no limit and no load.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LOOK_S: Final = 0.2  # seconds between two readings


@dataclass(frozen=True, slots=True)
class Load:
    """Use of the processors that this process may use, in processors: 1.5 is one and a half.

    Attributes:
        free: what others leave, this process's own use included; at most what the control groups allow.
        others: what other programs use. Programs of lower priority (nice) do not count.
        throttled: share of the time in which a control group held its programs back, 0 to 1.
    """

    free: float
    others: float = 0.0
    throttled: float = 0.0


@dataclass(frozen=True, slots=True)
class Quota:
    """The tightest limit of the control groups. `folder` has its figures; `processors` may be a fraction."""

    processors: float
    folder: Path
    version: int


@dataclass(frozen=True, slots=True)
class _Reading:
    """Counters at one moment, all in seconds."""

    at: float
    own: float
    busy: float | None
    group: float | None
    throttled: float


def usable() -> frozenset[int]:
    """Numbers of the processors that this process may run on: its affinity, which a cpuset also narrows."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return frozenset(range(os.cpu_count() or 1))


def cores(usable: frozenset[int], root: Path = Path("/")) -> int:
    """Physical cores among these processors: two threads of one core count once."""
    seen = set()
    for cpu in usable:
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        seen.add(_text(folder / "thread_siblings_list") or _text(folder / "core_cpus_list") or str(cpu))
    return max(1, len(seen))


def quota(root: Path = Path("/")) -> Quota | None:
    """The tightest limit on processor time among this process's control groups, of version 1 or 2; None without one."""
    found = [limit for folder, version in _groups(root) if (limit := _quota_of(folder, version)) is not None]
    return min(found, key=lambda limit: limit.processors, default=None)


def _quota_of(folder: Path, version: int) -> Quota | None:
    try:
        if version == 2:
            limit, _, period = (_text(folder / "cpu.max") or "max").partition(" ")
            if limit == "max":
                return None
            share = int(limit) / int(period or 100_000)
        else:
            limit_us = int(_text(folder / "cpu.cfs_quota_us") or -1)
            if limit_us <= 0:
                return None
            share = limit_us / int(_text(folder / "cpu.cfs_period_us") or 100_000)
    except (ValueError, ZeroDivisionError):
        return None
    return Quota(share, folder, version) if share > 0 else None


def _groups(root: Path) -> Iterator[tuple[Path, int]]:
    """Folders of this process's control groups and of those above them, with the version.

    A container may see its own group as the root, or its path as the host has it; so every ancestor is looked at, and
    those that are not there are passed over.
    """
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mounts, version = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"], 2
        elif "cpu" in controllers.split(","):
            mounts, version = [root / "sys/fs/cgroup" / name for name in ("cpu", "cpu,cpuacct", "cpuacct,cpu")], 1
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for mount in mounts:
            for n in range(len(parts), -1, -1):
                folder = mount.joinpath(*parts[:n])
                if folder.is_dir():
                    yield folder, version


class Processors:
    """Watches the processors that this process may use. `load` reads a few small files, at most every 0.2 s.

    `clock` and `own` give seconds: of the wall, and of processor time that this process has used.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        usable_processors: frozenset[int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        own: Callable[[], float] = time.process_time,
        nice: int | None = None,
    ) -> None:
        self._root, self._clock, self._own = root, clock, own
        self.usable: Final = usable() if usable_processors is None else usable_processors
        self.quota: Final = quota(root)
        n = cores(self.usable, root)
        # Half a processor more than a whole number is worth a thread more: 1.5 is 2, 1.4 is 1, and 0.5 is 1.
        self.limit: Final = n if self.quota is None else max(1, min(n, int(self.quota.processors + 0.5)))
        self._count_nice = (_own_nice() if nice is None else nice) > 0
        self._tick_s = 1 / _ticks_per_second()
        self._load = Load(self.allowed)
        self._last = self._read()

    @property
    def allowed(self) -> float:
        """Processors that this process could have if nobody else used any."""
        n = float(len(self.usable))
        return n if self.quota is None else min(n, self.quota.processors)

    def load(self) -> Load:
        """The use since the last reading; the one before if that was less than LOOK_S ago."""
        if self._clock() - self._last.at >= LOOK_S:
            now = self._read()
            self._load = self._between(self._last, now)
            self._last = now
        return self._load

    def _between(self, old: _Reading, new: _Reading) -> Load:
        wall_s = max(new.at - old.at, 1e-6)
        own = (new.own - old.own) / wall_s
        n = float(len(self.usable))
        others = 0.0
        if old.busy is not None and new.busy is not None:
            others = min(n, max(0.0, (new.busy - old.busy) / wall_s - own))
        free = n - others
        if self.quota is not None:
            neighbours = 0.0
            if old.group is not None and new.group is not None:
                neighbours = max(0.0, (new.group - old.group) / wall_s - own)
            free = min(free, self.quota.processors - neighbours)
        return Load(max(0.0, free), others, min(1.0, max(0.0, (new.throttled - old.throttled) / wall_s)))

    def _read(self) -> _Reading:
        group, throttled = self._read_group()
        return _Reading(self._clock(), self._own(), self._read_busy(), group, throttled)

    def _read_busy(self) -> float | None:
        """Seconds that the usable processors were busy, this process included; None if the system does not say."""
        ticks, found = 0, False
        for line in (_text(self._root / "proc/stat") or "").splitlines():
            name, *fields = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in self.usable:
                # user nice system idle iowait irq softirq steal; guest time is within user time
                values = [int(field) for field in fields[:8]] + [0] * max(0, 8 - len(fields))
                user, nice, system, _idle, _iowait, irq, softirq, steal = values
                ticks += user + system + irq + softirq + steal + (nice if self._count_nice else 0)
                found = True
        return ticks * self._tick_s if found else None

    def _read_group(self) -> tuple[float | None, float]:
        """Seconds of processor time that the group with the tightest limit has used, and for which it was held back."""
        if self.quota is None:
            return None, 0.0
        stat = dict(
            line.split()[:2] for line in (_text(self.quota.folder / "cpu.stat") or "").splitlines() if " " in line
        )
        n = max(1.0, self.quota.processors)  # a group is held back on each processor that it uses
        if self.quota.version == 2:
            return _number(stat.get("usage_usec"), 1e-6), (_number(stat.get("throttled_usec"), 1e-6) or 0.0) / n
        usage = _text(self.quota.folder / "cpuacct.usage")
        if usage is None:
            account = [part.replace("cpu", "cpuacct") if part == "cpu" else part for part in self.quota.folder.parts]
            usage = _text(Path(*account) / "cpuacct.usage")
        return _number(usage, 1e-9), (_number(stat.get("throttled_time"), 1e-9) or 0.0) / n


def _number(text: str | None, unit: float) -> float | None:
    try:
        return None if text is None else int(text) * unit
    except ValueError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text("ascii", "replace").strip() or None
    except OSError:
        return None


def _own_nice() -> int:
    try:
        return os.getpriority(os.PRIO_PROCESS, 0)
    except (AttributeError, OSError):
        return 0


def _ticks_per_second() -> int:
    try:
        return os.sysconf("SC_CLK_TCK")
    except (AttributeError, ValueError, OSError):
        return 100
