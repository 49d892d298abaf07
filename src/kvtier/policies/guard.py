"""Watches what is lost, and asks for the conservative preset when it is too much, until it has been fine for a
while."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

MOST_HIT_RATE: Final = 0.05  # of the mass, on pages that had been evicted
LEAST_RECALL: Final = 0.85  # of the mass, answered by what is held
BACK_HIT_RATE: Final = 0.03  # and the way back
BACK_RECALL: Final = 0.90
WINDOW: Final = 4  # looks that are averaged; one look per plan
CALM: Final = 8  # looks in a row that must be fine before it lets go


@dataclass(slots=True)
class Guard:
    """Trips when the mean over a full window is out of range; lets go after CALM windows well inside it."""

    is_tripped: bool = False
    reason: str = ""
    _hits: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _recalls: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _n_calm: int = 0

    def update(self, hit_rate: float, recall: float) -> bool:
        """Take one look's figures; whether the guard is tripped now."""
        self._hits.append(hit_rate)
        self._recalls.append(recall)
        if len(self._hits) < WINDOW:
            return self.is_tripped
        hits, recalls = sum(self._hits) / WINDOW, sum(self._recalls) / WINDOW
        if not self.is_tripped:
            if hits > MOST_HIT_RATE or recalls < LEAST_RECALL:
                self.is_tripped, self._n_calm = True, 0
                self.reason = f"hit rate {hits:.1%}, recall {recalls:.1%}"
            return self.is_tripped
        self._n_calm = self._n_calm + 1 if hits < BACK_HIT_RATE and recalls > BACK_RECALL else 0
        if self._n_calm >= CALM:
            self.is_tripped = False
            self.reason = f"hit rate {hits:.1%}, recall {recalls:.1%} for {CALM} plans"
        return self.is_tripped
