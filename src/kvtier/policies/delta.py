"""Protect, then keep by predicted future mass: the policy of the online memory (docs/scorer.md)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np

from ..errors import ScorerError
from ..scorer.model import Scorer, shipped
from .base import Budgets, Floats, PageStats, Plan, place

_log = logging.getLogger(__name__)


def _shipped_or_none() -> Scorer | None:
    try:
        return shipped()
    except ScorerError as err:
        _log.warning("%s; pages are kept by their present attention mass instead", err.message)
        return None


@dataclass(slots=True)
class Delta:
    """Keeps the pages that the scorer expects the most mass for. Without weights: those with the most mass of late.

    `scorer` is by default what the package ships; give one that was trained or tuned on other text (`scorer.model.load`).
    """

    seed: int = 0
    scorer: Scorer | None = field(default_factory=_shipped_or_none)
    name: str = "delta"

    def plan(self, stats: PageStats, budgets: Budgets) -> Plan:
        return place(stats, budgets, self.keep(stats))

    def keep(self, stats: PageStats) -> Floats:
        """Mass per step that each page is expected to get: float32 [n], in fair shares."""
        if self.scorer is not None:
            return self.scorer.score(stats)
        return stats.mass_mean * np.float32(max(1.0, stats.n_tokens / stats.page_tokens))
