"""Least recently used.

An exact step reads every page, so a page counts as used when it got more than its fair share of mass.
"""

from __future__ import annotations

from dataclasses import dataclass

from .base import Budgets, PageStats, Plan, place


@dataclass(slots=True)
class Lru:
    """The page that has been idle longest leaves first."""

    seed: int = 0
    name: str = "lru"

    def plan(self, stats: PageStats, budgets: Budgets) -> Plan:
        return place(stats, budgets, 1.0 / (1.0 + stats.idle))
