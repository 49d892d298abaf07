"""A controller: picks a preset from what the run looks like, and a conservative one when too much is lost."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np

from .base import HOST, Budgets, Floats, Observation, PageStats, Plan, place
from .delta import Delta
from .guard import Guard
from .parameters import Parse
from .presets import BALANCED, CONSERVATIVE, Preset, pick
from .signals import Signals, signals

PATIENCE: Final = 3  # plans in a row that must ask for another preset before it is taken
MAX_SWITCHES: Final = 1000  # kept in memory

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Switch:
    """One change of preset and why."""

    clock: int
    before: str
    after: str
    reason: str


@dataclass(slots=True)
class Adaptive:
    """Scores pages as `delta` does and places them by the present preset.

    `switches` holds every change and is logged, `preset` what is in charge.
    """

    seed: int = 0
    name: str = "adaptive"
    preset: Preset = BALANCED
    switches: list[Switch] = field(default_factory=list)
    guard: Guard = field(default_factory=Guard)
    delta: Delta = field(default_factory=Delta)
    parameters: ClassVar[Mapping[str, Parse]] = Delta.parameters
    _seen: Observation = field(default_factory=Observation)
    _wanted: str = BALANCED.name
    _n_wanted: int = 0

    @classmethod
    def from_parameters(cls, seed: int, **parameters: Any) -> Adaptive:
        return cls(seed=seed, delta=Delta.from_parameters(seed, **parameters))

    @property
    def state(self) -> str:
        return self.preset.name

    def observe(self, seen: Observation) -> None:
        """What only the engine knows; used by the next plan."""
        self._seen = seen

    def plan(self, stats: PageStats, budgets: Budgets) -> Plan:
        self._choose(stats, signals(stats, budgets, self._seen))
        preset = self.preset
        keep = self.delta.keep(stats)
        limited = Budgets(
            int(budgets.host_bytes * preset.fill) if budgets.host_bytes < 1 << 60 else budgets.host_bytes,
            budgets.disk_bytes,
        )
        return place(stats, limited, _with_window(keep, stats, limited, preset), swaps=preset.swaps)

    def _choose(self, stats: PageStats, now: Signals) -> None:
        before = self.guard.is_tripped
        self._guard(stats)
        if self.guard.is_tripped:
            self._switch(CONSERVATIVE, stats.clock, self.guard.reason)
            return
        wanted = pick(now)
        if before:
            self._switch(wanted, stats.clock, f"{self.guard.reason}; {wanted.when}")
            return
        self._n_wanted = self._n_wanted + 1 if wanted.name == self._wanted else 1
        self._wanted = wanted.name
        if self._n_wanted >= PATIENCE:
            self._switch(wanted, stats.clock, f"{wanted.when} ({_in_words(now)})")

    def _guard(self, stats: PageStats) -> None:
        """The engine's own figures where it gives some; else the share of the mass on pages off the host."""
        hit, recall = self._seen.hit_rate, self._seen.recall
        if hit is None or recall is None:
            total = float(stats.mass_mean.sum())
            if total <= 0:
                return
            hit = float(stats.mass_mean[stats.tier != HOST].sum()) / total
            recall = 1.0  # what the stats list is held
        self.guard.update(hit, recall)

    def _switch(self, preset: Preset, clock: int, reason: str) -> None:
        if preset.name == self.preset.name:
            return
        switch = Switch(clock, self.preset.name, preset.name, reason)
        _log.info("token %d: preset %s after %s: %s", clock, switch.after, switch.before, reason)
        self.switches.append(switch)
        del self.switches[:-MAX_SWITCHES]
        self.preset = preset


def _with_window(keep: Floats, stats: PageStats, budgets: Budgets, preset: Preset) -> Floats:
    """`keep`, with the start of each stream and the newest pages, as many as the window holds, above all others."""
    if not len(stats):
        return keep
    top = float(keep.max()) + 1.0
    top_pages = stats.position < -(-preset.sink_tokens // max(1, stats.page_tokens))
    n_bytes = float(stats.bytes.sum())
    if preset.window > 0 and budgets.host_bytes < n_bytes:
        reach = preset.window * budgets.host_bytes / n_bytes * stats.n_tokens  # tokens back, the same for every layer
        top_pages |= stats.age < reach
    return np.where(top_pages, np.float32(top), keep)


def _in_words(s: Signals) -> str:
    return (
        f"budget {s.memory_use:.0%} used, {s.n_tokens:,} tokens, {s.decode_per_s:.0f} tokens/s, code "
        f"{s.code_share:.0%}, "
        f"{s.turns_per_1000:.0f} turns per 1,000 words, locality {s.locality:.2f}, entropy {s.entropy:.2f}"
    )
