"""Carrying a plan out: what that needs of an engine, live or simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from ..errors import NativeError
from ..figures import TIERS
from .base import HOST, Budgets, Floats, Indices, Observation, PageStats, Plan


class Engine(Protocol):
    """What placement needs of an engine: figures of its pages, and to carry out a plan."""

    def stats(self) -> PageStats:
        """The pages as they are now."""
        ...

    def budgets(self) -> Budgets: ...

    def move(self, array: int, pages: Sequence[int], to_tier: str) -> int:
        """Move pages of an array to "host", "disk" or "none" (their content is gone).

        Returns how many; raises NativeError.
        """
        ...

    def set_keep(self, array: int, pages: Indices, keep: Floats) -> None:
        """Until the next call, pages of the array that must make room leave in the order of `keep`, lowest first."""
        ...


@runtime_checkable
class ObservingEngine(Protocol):
    """An engine that also knows what policies are told besides pages."""

    def observation(self) -> Observation: ...


@runtime_checkable
class FollowingEngine(Protocol):
    """An engine that does more with a plan than to keep order and move pages."""

    def follow(self, stats: PageStats, plan: Plan) -> None: ...


@runtime_checkable
class Compacting(Protocol):
    """An engine whose memory can be only sparsely filled after many moves."""

    def compact(self) -> None:
        """Give back to the system what few pages keep. Raises NativeError."""
        ...


def apply_plan(engine: Engine, stats: PageStats, plan: Plan) -> tuple[int, list[NativeError]]:
    """Carry out a checked plan: pages leave before others come. Returns pages moved and what the engine refused."""
    for array in np.unique(stats.array).tolist():
        of_array = np.flatnonzero(stats.array == array)
        engine.set_keep(array, stats.page[of_array].astype(np.int64), plan.keep[of_array])
    n_moved, refused = 0, []
    order = sorted(set(plan.to_tier.tolist()), key=lambda tier: tier == HOST)
    for tier in order:
        going = plan.indices[plan.to_tier == tier]
        arrays = stats.array[going]
        for array in dict.fromkeys(arrays.tolist()):
            pages = stats.page[going[arrays == array]].tolist()
            try:
                n_moved += engine.move(array, pages, TIERS[tier])
            except NativeError as err:
                refused.append(err)
    return n_moved, refused
