"""What the scorer looks at, in one place.

A change of meaning or order here is a new FEATURES_VERSION: old weights are refused.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from .base import PageStats

FEATURES_VERSION: Final = 1

# Masses are relative to the fair share of a page, 1 / pages of the stream; logarithms are to base 2.
FEATURES: Final = (
    "mass_mean",  # log of the decayed mean
    "mass_max",  # log of the largest
    "mass_long",  # log of the mean over all looks
    "age",  # log of steps since the page was filled
    "idle",  # log of steps since it was used
    "uses",  # share of the looks that found more than the fair share
    "length",  # log of the context in pages
    "layer_depth",
    "key_norm",  # as in PageStats: relative to the layer
    "value_norm",
    "key_novelty",
)
PRESENT: Final = FEATURES.index("mass_mean")
LN2: Final = np.float32(np.log(2))
FLOOR: Final = 1e-4  # masses below this many fair shares are all alike

Floats = npt.NDArray[np.float32]


def features(stats: PageStats) -> Floats:
    """float32 [features + 1, pages]: rows are contiguous, one per feature, and one of ones for the network's bias."""
    out = np.empty((len(FEATURES) + 1, len(stats)), np.float32)
    n_pages = np.float32(max(1.0, stats.n_tokens / stats.page_tokens))
    for i, mass in enumerate((stats.mass_mean, stats.mass_max, stats.mass_long)):
        np.multiply(mass, n_pages, out=out[i])
    out[:3] += np.float32(FLOOR)
    np.add(stats.age, np.float32(1), out=out[3])
    np.add(stats.idle, np.float32(1), out=out[4])
    np.log2(out[:5], out=out[:5])
    rest = (
        stats.uses,
        np.log2(n_pages),
        stats.layer_depth,
        stats.key_norm,
        stats.value_norm,
        stats.key_novelty,
        np.float32(1),
    )
    for i, values in enumerate(rest):
        out[5 + i] = values
    return out
