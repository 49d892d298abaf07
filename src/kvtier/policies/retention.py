"""A retention score that decays: mass, its peak and how often a page is used, each fading with the time since its last use.

The form is that of learned retention gates (for example TRIM-KV, arXiv:2512.03324): a score at writing time times beta^idle.
Here score and beta are simple functions of what the engine measures, with constants fitted by a grid over traces of
SmolLM2-135M (docs/policies.md says how), not gates inside the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from .base import Budgets, PageStats, Plan, place

HALF_LIFE_STEPS: Final = 512.0  # of a page that is never used
HALF_LIFE_USED: Final = 8192.0  # of a page that was used at every look
PEAK_WEIGHT: Final = 0.1  # of the largest mass ever, against the present mean


@dataclass(slots=True)
class Retention:
    """Keeps by (mean + PEAK_WEIGHT * peak) * 2^(-idle / half-life), the half-life growing with `uses`."""

    seed: int = 0
    name: str = "retention"

    def plan(self, stats: PageStats, budgets: Budgets) -> Plan:
        half_life = np.float32(HALF_LIFE_STEPS) + np.float32(HALF_LIFE_USED - HALF_LIFE_STEPS) * stats.uses
        worth = stats.mass_mean + np.float32(PEAK_WEIGHT) * stats.mass_max
        return place(stats, budgets, worth * np.exp2(-stats.idle / half_life))
