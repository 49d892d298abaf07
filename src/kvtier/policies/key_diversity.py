"""Pages whose keys are unlike the others stay (after KeyDiff, Park et al. 2025, arXiv:2504.15364).

Needs no attention mass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .base import Budgets, PageStats, Plan, place


@dataclass(slots=True)
class KeyDiversity:
    """Keeps by novelty of the page's mean key; where the engine gives none, an even sample over positions stays.

    Without novelty, a page's rank is the bit-reversed position, so that every prefix of the ranking covers the text
    evenly: what is far apart in the text is what is known to differ.
    """

    seed: int = 0
    name: str = "key_diversity"

    def plan(self, stats: PageStats, budgets: Budgets) -> Plan:
        if len(stats) and stats.key_novelty.any():
            return place(stats, budgets, stats.key_novelty)
        return place(stats, budgets, 1.0 / (1.0 + _bit_reversed(stats.position + self.seed)))


def _bit_reversed(position: np.ndarray[tuple[int], np.dtype[np.int32]]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """van der Corput order of the positions below 2^16, in [0, 1)."""
    bits = position.astype(np.uint32) & np.uint32(0xFFFF)
    for shift, mask in ((8, 0x00FF), (4, 0x0F0F), (2, 0x3333), (1, 0x5555)):
        bits = ((bits & np.uint32(mask)) << np.uint32(shift)) | ((bits >> np.uint32(shift)) & np.uint32(mask))
    return (bits / np.float32(65536.0)).astype(np.float32)
