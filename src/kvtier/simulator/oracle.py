"""A bound for every policy: keeps by the mass that the trace says a page will get. Exists only in the simulator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..policies.base import Budgets, PageStats, Plan, place
from ..trace import Trace

HORIZON_STEPS = 512


@dataclass(slots=True)
class Oracle:
    """Knows the exact mass of the next `horizon` steps."""

    trace: Trace
    horizon: int = HORIZON_STEPS
    name: str = "oracle"

    def plan(self, stats: PageStats, budgets: Budgets) -> Plan:
        step = stats.clock - self.trace.header.n_prefix
        future = self.trace.mass(step, step + self.horizon).sum(axis=0, dtype=np.float32)
        return place(stats, budgets, future[stats.array, stats.page])
