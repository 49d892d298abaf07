"""Protect, then keep by attention mass, present or forecast (docs/scorer.md): the policy of the online memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np

from .base import Budgets, Floats, PageStats, Plan, place
from .parameters import Parse, share
from .scorer import Scorer, load, shipped

LEAST: Final = np.float32(1e-6)  # fair shares of mass


def _scorer_of(text: str) -> Scorer | None:
    """A file of weights, or those that the package ships, or none. Raises ScorerError."""
    return None if text == "off" else shipped() if text == "shipped" else load(Path(text))


@dataclass(slots=True)
class Delta:
    """Keeps the pages that attention is expected to need most: what it needed of late stands for what it will.

    `scorer` forecasts what it will need (`policies.scorer.shipped`, or one that was trained or tuned on other text);
    None by default, since the present mass alone costs less KL (docs/lossy.md). `forecast_share` is what the forecast
    counts for, of the logarithm; the rest is the present mass.
    """

    seed: int = 0
    scorer: Scorer | None = None
    forecast_share: float = 0.5
    name: str = "delta"
    parameters: ClassVar[Mapping[str, Parse]] = {"scorer": _scorer_of, "forecast_share": share}

    @classmethod
    def from_parameters(cls, seed: int, **parameters: Any) -> Delta:
        """A share of the forecast alone means that of the scorer that is shipped. Raises ScorerError."""
        if "forecast_share" in parameters and "scorer" not in parameters:
            parameters["scorer"] = shipped()
        return cls(seed=seed, **parameters)

    def plan(self, stats: PageStats, budgets: Budgets) -> Plan:
        return place(stats, budgets, self.keep(stats))

    def keep(self, stats: PageStats) -> Floats:
        """What attention would lose with each page, in fair shares of mass: float32 [n].

        The mass per step that the page is expected to get (what it gets now; with a scorer, between that and what the
        scorer says), times how few of its tokens have it (1 for one token, down to 1 / sqrt(page_tokens) for all
        alike): what is spread over many values averages out, and the rest of the cache has it too.
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
