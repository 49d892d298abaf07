"""Heavy hitters: pages with the most accumulated attention stay (H2O, Zhang et al. 2023, arXiv:2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .base import Budgets, Floats, PageStats, Plan, place


@dataclass(slots=True)
class H2o:
    """Keeps by the sum of all mass that a page has received.

    The engine gives a decayed mean; its looks, one per plan, are added up here. Pages are known by array and page
    number.
    """

    seed: int = 0
    name: str = "h2o"
    _sums: dict[int, Floats] = field(default_factory=dict)
    _clock: int = -1
    _n_taken_back: int = 0

    def plan(self, stats: PageStats, budgets: Budgets) -> Plan:
        steps = max(1, stats.clock - self._clock) if self._clock >= 0 else 1
        self._clock = stats.clock
        if stats.n_taken_back != self._n_taken_back:
            self._n_taken_back = stats.n_taken_back
            self._sums.clear()
        return place(stats, budgets, self._accumulate(stats, float(steps)))

    def _accumulate(self, stats: PageStats, steps: float) -> Floats:
        score = np.empty(len(stats), np.float32)
        # pages come array by array; where they do not, each run of the same array is one part
        cuts = np.flatnonzero(np.diff(stats.array)) + 1
        for part in np.split(np.arange(len(stats)), cuts) if len(stats) else []:
            array, pages = int(stats.array[part[0]]), stats.page[part]
            sums = self._sums.get(array)
            n = int(pages.max()) + 1
            if sums is None or len(sums) < n:
                grown = np.zeros(n + n // 4, np.float32)
                if sums is not None:
                    grown[: len(sums)] = sums
                sums = self._sums[array] = grown
            sums[pages] += stats.mass_mean[part] * np.float32(steps)
            score[part] = sums[pages]
        return score
