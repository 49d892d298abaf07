"""What stands in for dropped pages, where it is asked for: groups of the streaming cache, then cells of the online
state."""

from __future__ import annotations

import logging
from typing import Final

import numpy as np

from ..errors import NativeError
from ..figures import LayerFigures
from ..native.kv import KVCache
from ..native.summary import Summary, SummaryGroup
from .compress import compress
from .levels import SUB, growing
from .online import OnlineState
from .settings import MemorySettings
from .streaming import BASIS, COORDINATES, GROUP_PAGES, StreamingCache, group_bytes

MOST_GROUPS: Final = 1024  # of the streaming cache, in each layer
MOST_CELLS: Final = 256  # of the online state, for each KV head
_log = logging.getLogger(__name__)


class StandIns:
    """The summaries of all layers.

    Their bytes are set aside from the pages' budget once, so that they cannot push out pages later.
    """

    def __init__(self, kv: KVCache, settings: MemorySettings) -> None:
        self._kv: Final = kv
        self._settings: Final = settings
        self._states: dict[int, OnlineState] = {}  # by array
        self._streams: dict[int, StreamingCache] = {}  # by array
        self._n_growing = 0  # layers whose cache grows with the text
        self._reserved = -1

    @property
    def n_groups(self) -> int:
        return sum(stream.n_groups for stream in self._streams.values())

    def reserve(self, layers: dict[int, LayerFigures]) -> None:
        self._n_growing = len(growing(layers.values()))
        share = self._settings.online_share + (self._settings.low_rank_share if self._settings.low_rank else 0.0)
        wanted = int(share * (self._kv.settings.host or 0))
        if self._reserved != wanted and layers:
            self._kv.reserve(wanted)
            self._reserved = wanted

    def take(self, layer: LayerFigures, pages: list[int]) -> None:
        """Let attention see pages that are about to go in another form, if it is to see them at all."""
        if self._settings.low_rank == 0 and self._settings.online_share == 0.0:
            return
        mass = self._kv.summary_mass(layer, 1 + MOST_GROUPS)
        if not len(mass):  # nothing yet, or the library forgot it with the text that it stood for
            self._streams.pop(layer.array, None)
            self._states.pop(layer.array, None)
        stream, state = self._stream(layer), self._state(layer)
        if stream is None and state is None:
            return
        groups: tuple[SummaryGroup | int, ...] = ()
        if stream is not None:
            n_whole = len(pages) // GROUP_PAGES * GROUP_PAGES
            new = [self._group(layer, sorted(pages[i : i + GROUP_PAGES])) for i in range(0, n_whole, GROUP_PAGES)]
            groups = stream.with_new([group for group in new if group is not None], mass[len(mass) - stream.n_groups :])
            pages = pages[n_whole:]
        if state is not None:
            self._merge(layer, pages, state)
        self._kv.set_summary(layer, Summary(state.cells() if state is not None else None, groups))
        if stream is not None:
            stream.n_groups = len(groups)

    def _merge(self, layer: LayerFigures, pages: list[int], state: OnlineState) -> None:
        for page in pages:
            try:
                state.add(*self._kv.read_page(layer, page))
            except NativeError as err:  # the library has dropped it just now
                _log.debug("a page is not summed up: %s", err.message)

    def _group(self, layer: LayerFigures, pages: list[int]) -> SummaryGroup | None:
        try:
            keys, values = (
                np.concatenate(rows) for rows in zip(*(self._kv.read_page(layer, page) for page in pages), strict=True)
            )
        except NativeError as err:  # the library has dropped one just now
            _log.debug("pages are not compressed: %s", err.message)
            return None
        page_mean = next(one.page_mean for one in self._kv.layers() if one.figures.array == layer.array)
        return compress(keys, values, self._settings.low_rank, COORDINATES, BASIS, float(page_mean[pages].sum()))

    def _stream(self, layer: LayerFigures) -> StreamingCache | None:
        rank = self._settings.low_rank
        if rank == 0 or layer.d_v == 0 or rank > min(layer.d_k, layer.d_v) or layer.d_k % SUB or layer.d_v % SUB:
            return None
        if layer.array not in self._streams:
            room = self._settings.low_rank_share * (self._kv.settings.host or 0) / max(1, self._n_growing)
            self._streams[layer.array] = StreamingCache(min(MOST_GROUPS, int(room / group_bytes(layer, rank))))
        stream = self._streams[layer.array]
        return stream if stream.n_max else None

    def _state(self, layer: LayerFigures) -> OnlineState | None:
        n_heads = self._kv.n_layers * layer.n_head_kv
        each = OnlineState.bytes_per_cell(layer.d_k, layer.d_v, self._settings.spread)
        n_cells = min(
            MOST_CELLS, int(self._settings.online_share * (self._kv.settings.host or 0)) // max(1, n_heads * each)
        )
        if n_cells == 0 or layer.d_v == 0:
            return None
        if layer.array not in self._states:
            self._states[layer.array] = OnlineState(
                layer.n_head_kv, layer.d_k, layer.d_v, n_cells, self._settings.spread
            )
        return self._states[layer.array]
