"""How many tokens may be computed together where the cache has a budget that forgets.

Room for a whole batch has to be made before its attention has said what matters, and at most half of the budget is
cleared for that: a larger batch drops pages that fewer bits would have kept. Very small ones are no better: each is
one look at what attention wants.
"""

from __future__ import annotations

from typing import Final

from ..formats import row_bytes
from ..model.shape import AttentionLayer, ModelShape
from ..settings import KVSettings

LEAST: Final = 64  # tokens
BUDGET_SHARE: Final = 2  # a batch takes at most one part in so many of the budget


def fitting_batch(shape: ModelShape, settings: KVSettings, n_batch: int) -> int:
    """`n_batch` tokens, or as many as go well with the budget of a lossy cache: halved until they do, at least 64."""
    if settings.fidelity != "lossy" or settings.host is None:
        return n_batch
    growing = sum(_token_bytes(layer) for layer in shape.attention if not layer.slides)
    windows = sum(_token_bytes(layer) for layer in shape.attention if layer.slides)
    while n_batch > LEAST and n_batch * growing * BUDGET_SHARE > settings.host - windows * (shape.n_swa + n_batch):
        n_batch = max(LEAST, n_batch // 2)
    return n_batch


def _token_bytes(layer: AttentionLayer) -> int:
    return layer.n_head_kv * (row_bytes("f16", layer.d_k + layer.d_v) or 0)
