"""A budget that is a share of free memory, kept up as free memory changes: downwards at once, upwards slowly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GIB: Final = 1 << 30
STEP_SHARE: Final = 0.05
WAIT_UP: Final = 32  # looks in a row that find more room before the budget grows by one step


@dataclass(slots=True)
class ShareKeeper:
    """Says what the budget should be. Knows nothing of where the figures come from.

    Attributes:
        share: of the memory that is free for the cache, from 0 to 1; the rest is left to others.
        budget: bytes at present.
        least: bytes that the budget never falls below.
    """

    share: float
    budget: int
    least: int = 1 << 20
    _n_more: int = 0

    def look(self, available: int, held: int) -> int:
        """The budget from now on, in bytes.

        Args:
            available: bytes that the system could give; held: bytes that the cache has taken already.

        Changes in steps of 5 % of the budget, at most 1 GiB. Shrinks by as many steps as it takes, at once; grows by
        one step when `WAIT_UP` looks in a row found room for it.
        """
        target = int(self.share * (available + held))
        step = max(1, min(GIB, int(STEP_SHARE * self.budget)))
        if target < self.budget - step:
            n_steps = -(-(self.budget - target) // step)
            self.budget = max(self.least, self.budget - n_steps * step)
            self._n_more = 0
        elif target >= self.budget + step:
            self._n_more += 1
            if self._n_more >= WAIT_UP:
                self.budget += step
                self._n_more = 0
        else:
            self._n_more = 0
        return self.budget
