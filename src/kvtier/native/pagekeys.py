"""Norms of keys and values per page and how unlike the others a page's keys are: read once from each page when it is
full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import NativeError
from ..figures import TIERS, LayerFigures
from .kv import KVCache

Floats = npt.NDArray[np.float32]

READS_PER_LOOK: Final = 512  # pages at a time, so that a long prompt does not keep the lock of the layers for long
_HOST: Final = TIERS.index("host")


@dataclass(slots=True)
class _Known:
    """What was read of one array; zeros where nothing was yet."""

    key_norm: Floats  # [n_pages]
    value_norm: Floats
    mean_key: Floats  # [n_pages, n_head_kv * d_k], of length 1


class PageKeys:
    """Figures of pages that llama.cpp has filled. Only pages in RAM are read."""

    def __init__(self, kv: KVCache, reads_per_look: int = READS_PER_LOOK) -> None:
        self._kv: Final = kv
        self._reads_per_look: Final = reads_per_look
        self._known: dict[int, _Known] = {}
        self._n_reads = 0

    def begin_look(self) -> None:
        """A new look at all layers: pages may be read again, as many as one look may."""
        self._n_reads = 0

    def look(self, layer: LayerFigures, tier: npt.NDArray[np.uint8]) -> tuple[Floats, Floats, Floats]:
        """Key norm, value norm and key novelty of the pages of a layer: float32 [n_pages], 0 where not known (yet).

        Norms are means over tokens and heads. Novelty is 1 - cosine of a page's mean key to the mean of all pages,
        0..2.
        """
        known = self._known.get(layer.array)
        if known is None or len(known.key_norm) != layer.n_pages:
            n = layer.n_pages
            known = _Known(
                np.zeros(n, np.float32), np.zeros(n, np.float32), np.zeros((n, layer.n_head_kv * layer.d_k), np.float32)
            )
            self._known[layer.array] = known
        full = self._full(layer, tier)
        known.key_norm[~full] = 0.0  # given up, or begun anew
        for page in np.flatnonzero(full & (tier == _HOST) & (known.key_norm == 0.0)).tolist():
            if self._n_reads >= self._reads_per_look:
                break
            self._read(layer, page, known)
        return known.key_norm.copy(), np.where(known.key_norm > 0, known.value_norm, 0), _novelty(known)

    @staticmethod
    def _full(layer: LayerFigures, tier: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Pages with content that are not the newest of their stream, which may still be being filled."""
        full = (tier != TIERS.index("none")).reshape(layer.n_streams, -1)
        newest = full.shape[1] - 1 - np.argmax(full[:, ::-1], axis=1)
        full[np.arange(len(full)), newest] = False
        flat: npt.NDArray[np.bool_] = full.reshape(-1)
        return flat

    def _read(self, layer: LayerFigures, page: int, known: _Known) -> None:
        self._n_reads += 1
        try:
            keys, values = self._kv.read_page(layer, page)
        except NativeError:
            return  # it has just left
        known.key_norm[page] = max(1e-9, float(np.sqrt(np.einsum("thd,thd->th", keys, keys)).mean()))
        known.value_norm[page] = float(np.sqrt(np.einsum("thd,thd->th", values, values)).mean()) if values.size else 0.0
        mean = keys.mean(axis=0).reshape(-1)
        known.mean_key[page] = mean / max(float(np.linalg.norm(mean)), 1e-9)


def _novelty(known: _Known) -> Floats:
    there = np.flatnonzero(known.key_norm > 0)
    out = np.zeros(len(known.key_norm), np.float32)
    if len(there) > 1:
        centre = known.mean_key[there].mean(axis=0)
        out[there] = 1 - known.mean_key[there] @ (centre / max(float(np.linalg.norm(centre)), 1e-9))
    return out
