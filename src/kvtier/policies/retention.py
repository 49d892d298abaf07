"""A retention score that decays: mass, fading with the time since the last use, slower for what is used often.

The form is that of learned retention gates (for example TRIM-KV, arXiv:2512.03324): a score at writing time times
beta^idle. Here score and beta are simple functions of what the engine measures, not gates inside the model;
docs/policies.md says how the constants were found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from .base import Budgets, PageStats, Plan, place

HALF_LIFE_STEPS: Final = 2048.0  # of a page that is never used
HALF_LIFE_USED: Final = 8192.0  # of a page that was used at every look


@dataclass(slots=True)
class Retention:
    """Keeps by the decayed mean of the mass times 2^(-idle / half-life); the half-life grows with `uses`."""

    seed: int = 0
    name: str = "retention"

    def plan(self, stats: PageStats, budgets: Budgets) -> Plan:
        half_life = np.float32(HALF_LIFE_STEPS) + np.float32(HALF_LIFE_USED - HALF_LIFE_STEPS) * stats.uses
        return place(stats, budgets, stats.mass_mean * np.exp2(-stats.idle / half_life))
