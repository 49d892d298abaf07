"""Groups of dropped tokens in few dimensions: truncated SVD of their keys and of their values."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..native.summary import SummaryGroup

Floats = npt.NDArray[np.float32]


def compress(
    keys: Floats, values: Floats, rank: int, fmt_coord: str = "q8_0", fmt_basis: str = "q8_0", mass: float = 0.0
) -> SummaryGroup:
    """The best approximation of `rank` dimensions, per KV head and around the mean.

    Args:
        keys, values: float32 [n, n_head_kv, d].
        rank: at most d; in multiples of 32 for quantized coordinates.
    """
    k_mean, k_basis, k_coord = _truncated(keys.transpose(1, 0, 2), rank)
    v_mean, v_basis, v_coord = _truncated(values.transpose(1, 0, 2), rank)
    return SummaryGroup(k_mean, k_basis, k_coord, v_mean, v_basis, v_coord, fmt_coord, fmt_basis, mass)


def _truncated(rows: Floats, rank: int) -> tuple[Floats, Floats, Floats]:
    """Mean [h, d], basis [h, rank, d] and coordinates [h, n, rank] of rows [h, n, d].

    Eigenvectors of the small side's products.
    """
    mean = rows.mean(1)
    centred = rows - mean[:, None]
    _, vectors = np.linalg.eigh(centred.transpose(0, 2, 1) @ centred)  # ascending
    basis = np.ascontiguousarray(vectors[:, :, ::-1][:, :, :rank].transpose(0, 2, 1))
    return mean, basis, centred @ basis.transpose(0, 2, 1)
