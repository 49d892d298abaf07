"""llama.cpp's way, as a baseline: the host is filled in the order of writing, and what comes later overflows."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Budgets, PageStats, Plan, place


@dataclass(slots=True)
class Static:
    """Pages stay where they were put first. The newest unprotected page leaves first, none comes back."""

    seed: int = 0
    name: str = "static"

    def plan(self, stats: PageStats, budgets: Budgets) -> Plan:
        return place(stats, budgets, stats.age, swaps=0.0)
