"""The streaming cache of one layer: groups of dropped pages in few dimensions, the lightest of which leave when there
are too many."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..figures import LayerFigures
from ..formats import row_bytes
from ..native.summary import SummaryGroup

GROUP_PAGES = 8
COORDINATES = "q4_0"  # half of the bytes of Q8_0; what is lost is lost with the dimensions that are gone
BASIS = "q8_0"


def group_bytes(layer: LayerFigures, rank: int) -> int:
    """What a group takes in the native library, up to alignment."""
    n = GROUP_PAGES * layer.page_tokens
    width = -(-rank // 32) * 32
    coordinates = 2 * n * (row_bytes(COORDINATES, width) or 0)
    basis = (layer.d_k + layer.d_v) * (row_bytes(BASIS, width) or 0)
    return layer.n_head_kv * (coordinates + basis + 4 * (layer.d_k + layer.d_v) + 4 * n)


@dataclass(slots=True)
class StreamingCache:
    """Which groups of a layer there are; the groups themselves are the library's.

    Attributes:
        n_max: groups that the layer's share of the budget holds.
        n_groups: groups that the library has of it.
    """

    n_max: int
    n_groups: int = 0

    def with_new(self, new: list[SummaryGroup], mass: npt.NDArray[np.float32]) -> tuple[SummaryGroup | int, ...]:
        """The groups from now on: the present ones that stay, by their places, and new ones.

        `mass` is of the present ones, float32 [n_groups].
        """
        masses = np.concatenate([mass[: self.n_groups], np.array([group.mass for group in new], np.float32)])
        heaviest = np.sort(np.argsort(-masses, kind="stable")[: self.n_max]).tolist()
        return tuple(i if i < self.n_groups else new[i - self.n_groups] for i in heaviest)


def whole_groups(going: npt.NDArray[np.int64], candidates: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`going`, and as many of the next `candidates` that make it whole groups of pages.

    Both in the order in which they leave, `going` first.
    """
    n = -(-len(going) // GROUP_PAGES) * GROUP_PAGES
    return candidates[: n if n <= len(candidates) else len(going)]
