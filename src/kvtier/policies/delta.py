"""Protect, then keep by predicted future mass: the policy of the online memory (docs/scorer.md)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

import numpy as np

from ..errors import ScorerError
from ..scorer.model import Scorer, load, shipped
from .base import Budgets, Floats, PageStats, Plan, place
from .parameters import Parse, share

LEAST: Final = np.float32(1e-6)  # fair shares of mass
_log = logging.getLogger(__name__)


def _shipped_or_none() -> Scorer | None:
    try:
        return shipped()
    except ScorerError as err:
        _log.warning("%s; pages are kept by their present attention mass instead", err.message)
        return None


def _scorer_of(text: str) -> Scorer | None:
    """A file of weights, or off. Raises ScorerError."""
    return None if text.lower() == "off" else load(Path(text))


@dataclass(slots=True)
class Delta:
    """Keeps the pages that attention is expected to need most. Without weights, what it needed of late stands for what it will.

    `scorer` is by default what the package ships; give one that was trained or tuned on other text (`scorer.model.load`).
    `forecast_share` is what its forecast counts for, of the logarithm; the rest is the present mass (docs/lossy.md compares 0, a half and 1).
    """

    seed: int = 0
    scorer: Scorer | None = field(default_factory=_shipped_or_none)
    forecast_share: float = 0.5
    name: str = "delta"
    parameters: ClassVar[Mapping[str, Parse]] = {"scorer": _scorer_of, "forecast_share": share}

    def plan(self, stats: PageStats, budgets: Budgets) -> Plan:
        return place(stats, budgets, self.keep(stats))

    def keep(self, stats: PageStats) -> Floats:
        """What attention would lose with each page, in fair shares of mass: float32 [n].

        The mass per step that the page is expected to get (between what it gets now and what the scorer says), times how few of its
        tokens have it (1 for one token, down to 1 / sqrt(page_tokens) for all alike): what is spread over many values averages out,
        and the rest of the cache has it too.
        """
        fair_shares = np.float32(max(1.0, stats.n_tokens / stats.page_tokens))
        expected = stats.mass_mean * fair_shares
        if self.scorer is not None:
            forecast, share = self.scorer.score(stats), np.float32(self.forecast_share)
            expected = np.maximum(expected, LEAST) ** (1 - share) * np.maximum(forecast, LEAST) ** share
        if not stats.mass_sharp.any():
            return expected
        sharpness: Floats = np.minimum(stats.mass_sharp / np.maximum(stats.mass_mean, np.float32(1e-12)), 1)
        return expected * sharpness
