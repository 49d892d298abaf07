"""What stands in for dropped cells in attention: plain arrays that the native library copies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SummaryCells:
    """Cells that each sum up several keys, per KV head.

    Attributes:
        key: float32 [n_head_kv, n, d_k], centres.
        value: float32 [n_head_kv, n, d_v], mean values.
        log_count: float32 [n_head_kv, n], natural logarithm of how many; -inf where a cell is not in use.
        key_var: float32 [n_head_kv, n, d_k], variance of the keys around the centre; None: they count as all alike.
        fmt: storage format.
    """

    key: Array
    value: Array
    log_count: Array
    key_var: Array | None = None
    fmt: str = "f16"


@dataclass(frozen=True, slots=True)
class SummaryGroup:
    """Cells whose keys and values are kept in few dimensions: key = mean + coord @ basis, per KV head.

    Attributes:
        k_mean, v_mean: float32 [n_head_kv, d].
        k_basis, v_basis: float32 [n_head_kv, r, d].
        k_coord, v_coord: float32 [n_head_kv, n, r].
        fmt_coord, fmt_basis: storage formats; quantized ones need r, or d, in multiples of 32.
        mass: decayed mean attention mass that the group begins with: what the pages of its cells had.
    """

    k_mean: Array
    k_basis: Array
    k_coord: Array
    v_mean: Array
    v_basis: Array
    v_coord: Array
    fmt_coord: str = "f16"
    fmt_basis: str = "f16"
    mass: float = 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything that stands in for the dropped cells of one layer.

    A group that was there before and stays as it is, is its place among the groups of the summary that this one
    replaces.
    """

    cells: SummaryCells | None = None
    groups: tuple[SummaryGroup | int, ...] = ()
