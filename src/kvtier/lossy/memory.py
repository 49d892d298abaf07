"""The δ-Mem engine: beside generation, gives the pages that are wanted least fewer bits, then only a share of a summary."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from .. import hardware
from ..errors import BudgetError, NativeError, SettingsError
from ..figures import FORMATS, LayerFigures
from ..kv import KVCache
from ..placement import KVEngine, Placement
from ..policies.base import HOST, PLAN_STEPS, Floats, Indices, PageStats, Plan
from ..summary import Summary, SummaryGroup
from .budget import ShareKeeper
from .compress import compress
from .levels import SUB, Level, assign, ladder
from .online import OnlineState
from .streaming import BASIS, COORDINATES, GROUP_PAGES, StreamingCache, group_bytes, whole_groups

LEAST_SLACK: Final = 384 << 10  # a slab of each format that is only begun
SLAB_WASTE: Final = 1.035  # bytes held per byte of pages: frames do not fill slabs to the last byte
MEMORY_POLICIES: Final = ("delta", "adaptive")
LEAST_NEWEST: Final = 3  # pages: those that are protected by default
MOST_SHARE: Final = 0.5  # of the budget, for anything but pages
MOST_GROUPS: Final = 1024  # of the streaming cache, in each layer
SETTLE_S: Final = 60.0  # for room before a batch
TRIM_REFRESHES: Final = 64  # about 1,000 tokens
BATCH: Final = 16  # pages that change their format before memory is put together again
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """What the online memory does with a page before it is gone.

    Attributes:
        compress: pages are kept in fewer bits before they are dropped.
        online_share: share of the host budget for the online state, for example 0.01; 0: none, since with it distributions lie further from
            the exact ones than without (docs/lossy.md).
        low_rank: dimensions of the streaming cache: pages that leave go there in groups, as far as its share of the budget reaches; a multiple of
            32, 0: none, since pages of four bits are worth as much (docs/lossy.md).
        low_rank_share: share of the host budget for it.
        spread: the online state keeps the spread of its cells' keys.
        slack: share of the host budget that stays free for frames of other formats.
    """

    compress: bool = True
    online_share: float = 0.0
    spread: bool = False
    slack: float = 0.03
    low_rank: int = 0
    low_rank_share: float = 0.12

    def __post_init__(self) -> None:
        if self.low_rank < 0 or self.low_rank % SUB:
            raise SettingsError(f"low_rank is {self.low_rank}, which is not a multiple of {SUB}", f"Take {SUB}, or 0 for none.")
        for name, value in (("online_share", self.online_share), ("slack", self.slack), ("low_rank_share", self.low_rank_share)):
            if not 0.0 <= value <= MOST_SHARE:
                raise SettingsError(f"{name} is {value}, which is not between 0 and {MOST_SHARE}", "Take a small share of the budget, such as 0.01.")


def memory_for(policy: str) -> MemorySettings:
    """What goes with a policy: the simple ones drop pages as they are, which is their baseline."""
    return MemorySettings() if policy in MEMORY_POLICIES else MemorySettings(compress=False)


@dataclass(slots=True)
class MemoryFigures:
    """Counts since the model was loaded."""

    n_refreshes: int = 0
    n_reencoded: int = 0
    n_dropped: int = 0
    n_summed_tokens: int = 0
    n_compressed: int = 0  # pages that went to the streaming cache


class LossyEngine(KVEngine):
    """A KV cache whose pages are given up step by step. Plans only say what is wanted; this carries it out within the budget."""

    def __init__(self, kv: KVCache, memory: MemorySettings, to_text: Callable[[Sequence[int]], str] = lambda _t: "") -> None:
        super().__init__(kv, to_text)
        self._cache: Final = kv
        self._settings: Final = memory
        self._states: dict[int, OnlineState] = {}  # by array
        self._streams: dict[int, StreamingCache] = {}  # by array
        self._ahead = 2 * PLAN_STEPS
        self._n_reserved = -1
        self._is_checked = False
        self._n_growing = 0  # layers whose cache grows with the text
        share, budget = kv.settings.host_share, kv.settings.host
        self._keeper = ShareKeeper(share, budget) if share is not None and budget is not None else None
        self.counts: Final = MemoryFigures()

    def check_budget(self) -> None:
        """Raises BudgetError where the budget cannot hold what never goes: sliding windows, and the first and newest pages of each layer."""
        budget, layers = self._cache.settings.host, {layer.figures.array: layer.figures for layer in self._cache.layers()}
        if self._is_checked or budget is None or not layers:  # none before the first batch
            return
        self._is_checked = True
        longest, own = max(layer.cells_per_stream for layer in layers.values()), Level(*self._own_formats())
        least = LEAST_SLACK
        for layer in layers.values():
            levels = ladder(own.fmt_k, own.fmt_v, layer) if self._settings.compress else (own,)
            n_newest = min(LEAST_NEWEST, layer.n_pages)
            n_older = layer.n_pages - n_newest if layer.cells_per_stream < longest else 0
            least += int(SLAB_WASTE * (n_newest * own.page_bytes(layer) + n_older * levels[min(1, len(levels) - 1)].page_bytes(layer)))
        if least > budget:
            raise BudgetError(
                f"the lossy budget is {budget:,} bytes, but sliding windows and the newest pages of {len(layers)} layers alone take {least:,}",
                f"Give it more (--kv-host {-(-least // (1 << 20))}MiB is the least), or take a shorter context.",
            )

    def expect(self, n_tokens: int) -> None:
        """So many tokens come next: the next `follow` makes room for them."""
        self._ahead = n_tokens

    def follow(self, stats: PageStats, plan: Plan) -> None:
        """Make room for what comes, giving up first what `plan.keep` wants least. Runs in the thread that plans."""
        layers = {layer.figures.array: layer.figures for layer in self._cache.layers()}
        self._reserve(layers)
        budget = self._cache.settings.host
        if budget is None or not len(stats):
            return
        self._follow_free_memory()
        tiers = self._cache.figures.tiers["host"]
        budget = tiers.budget_bytes or budget
        growing = [layer for layer in layers.values() if layer.cells_per_stream == max(x.cells_per_stream for x in layers.values())]
        own = Level(*self._own_formats())
        page_bytes = sum(own.page_bytes(layer) for layer in growing)
        headroom = int(SLAB_WASTE * page_bytes) * -(-self._ahead // stats.page_tokens)  # so many tokens begin at most so many pages
        headroom = min(headroom, budget // 2)
        self._ahead = 2 * PLAN_STEPS
        slack = max(int(self._settings.slack * budget), LEAST_SLACK)
        self.counts.n_refreshes += 1
        if self.counts.n_refreshes % TRIM_REFRESHES == 0:  # arrays of lengths that grow leave holes behind
            hardware.give_back_free_memory()
        if budget - tiers.held_bytes < headroom + slack:
            room = int((budget - self._cache.figures.reserved_bytes - headroom - slack) / SLAB_WASTE)
            self._give_up(stats, plan.keep, layers, own, room)
            self._drop_shortfall(stats, plan.keep, layers, headroom)

    def _follow_free_memory(self) -> None:
        if self._keeper is None:
            return
        held = self._cache.figures.tiers["host"].held_bytes
        before = self._keeper.budget
        wanted = self._keeper.look(hardware.memory().available_bytes, held)
        if wanted != before:
            try:
                self._cache.set_host_budget(wanted)
                _log.info("the cache's budget is %s bytes now, of %s before: free memory has changed", f"{wanted:,}", f"{before:,}")
            except NativeError as err:  # less than the protected pages take
                self._keeper.budget = before
                _log.debug("the budget stays: %s", err.message)

    def _own_formats(self) -> tuple[str, str]:
        settings = self._cache.settings
        return settings.host_type_k or "f16", settings.host_type_v or "f16"

    def _give_up(self, stats: PageStats, keep: Floats, layers: dict[int, LayerFigures], own: Level, room: int) -> None:
        """Every page that is not protected gets its level."""
        on_host = stats.tier == HOST
        formats = self._formats(stats)
        first = next(iter(layers.values()))  # heads of all layers that grow are alike
        levels = ladder(own.fmt_k, own.fmt_v, first) if self._settings.compress else (own,)
        sizes = np.array([level.page_bytes(first) for level in levels], np.int64)
        # what is protected is never gone, but only the newest pages are still written to
        sinks = np.flatnonzero(on_host & stats.protected & (stats.age > 2 * stats.page_tokens))
        n_newest = int(np.count_nonzero(on_host & stats.protected)) - len(sinks)
        sink_level = min(1, len(levels) - 1)
        room -= int(sizes[0]) * n_newest + int(sizes[sink_level]) * len(sinks)
        free = np.flatnonzero(on_host & ~stats.protected)
        wanted = assign(keep[free], sizes, max(0, room))
        current = _level_of(levels, formats[free])
        gone = free[wanted == len(levels)]
        if self._settings.low_rank:
            gone = self._in_groups(stats, gone, free, keep)
            wanted[np.isin(free, gone)] = len(levels)
        self._drop(stats, gone[np.argsort(keep[gone], kind="stable")], layers)
        if sink_level:
            self._reencode(stats, sinks[_level_of(levels, formats[sinks]) < sink_level], levels[sink_level])
        for index in range(len(levels) - 1, 0, -1):
            going = free[(wanted == index) & (current < index)]
            self._reencode(stats, going, levels[index])
        self._cache.compact()

    @staticmethod
    def _in_groups(stats: PageStats, gone: Indices, free: Indices, keep: Floats) -> Indices:
        """More pages of each array that has some to give up, so that they make whole groups: the room lasts for longer then."""
        arrays = np.unique(stats.array[gone]).tolist()
        order = free[np.argsort(keep[free], kind="stable")]
        mine = [(gone[stats.array[gone] == array], order[stats.array[order] == array]) for array in arrays]
        return np.concatenate([whole_groups(going, candidates) for going, candidates in mine]) if mine else gone

    def _drop_shortfall(self, stats: PageStats, keep: Floats, layers: dict[int, LayerFigures], headroom: int) -> None:
        """What is wanted least goes where fewer bits have not given enough room: else the library would take what is largest."""
        tiers = self._cache.figures.tiers["host"]
        short = headroom - ((tiers.budget_bytes or 0) - tiers.held_bytes)
        if short <= 0 or tiers.n_pages == 0:
            return
        n = 1 + int(short / max(1, tiers.used_bytes // tiers.n_pages))
        order = np.argsort(np.where(stats.protected | (stats.tier != HOST), np.float32(np.inf), keep), kind="stable")
        candidates = order[: int(np.count_nonzero((stats.tier == HOST) & ~stats.protected))]
        self._drop(stats, candidates[:n], layers)
        self._cache.compact()

    def _formats(self, stats: PageStats) -> npt.NDArray[np.uint8]:
        """The formats of each page's keys and values, index into FORMATS: uint8 [n, 2]."""
        out = np.zeros((len(stats), 2), np.uint8)
        for i in range(self._cache.n_layers):
            of_array = stats.array == self._cache.layer(i).figures.array
            pages = self._cache.pages(i)
            out[of_array] = np.stack([pages.format_k, pages.format_v], 1)[stats.page[of_array]]
        return out

    def _reencode(self, stats: PageStats, going: npt.NDArray[np.int64], level: Level) -> None:
        for start in range(0, len(going), BATCH):
            part = going[start : start + BATCH]
            for array in np.unique(stats.array[part]).tolist():
                pages = stats.page[part[stats.array[part] == array]].tolist()
                try:
                    self.counts.n_reencoded += self._cache.reencode(array, pages, level.fmt_k, level.fmt_v)
                except NativeError as err:  # attention has some of them just now: the next refresh takes them
                    _log.debug("pages keep their format for now: %s", err.message)
            self._cache.compact()

    def _drop(self, stats: PageStats, gone: npt.NDArray[np.int64], layers: dict[int, LayerFigures]) -> None:
        """Pages become a group of the streaming cache or a share of the online state; the summary is seen before its pages go."""
        for array in np.unique(stats.array[gone]).tolist():
            pages = stats.page[gone[stats.array[gone] == array]].tolist()
            self._sum_up(layers[array], pages)
            try:
                self.counts.n_dropped += self._cache.move(array, pages, "gone")
            except NativeError as err:
                _log.debug("pages stay for now: %s", err.message)

    def _sum_up(self, layer: LayerFigures, pages: list[int]) -> None:
        """Let attention see the pages in another form, if it is to see them at all."""
        if self._settings.low_rank == 0 and self._settings.online_share == 0.0:
            return
        mass = self._cache.summary_mass(layer, 1 + MOST_GROUPS)
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
            self.counts.n_compressed += n_whole
            pages = pages[n_whole:]
        if state is not None:
            self._merge(layer, pages, state)
        self.counts.n_summed_tokens = sum(s.n_tokens for s in self._states.values())
        self._cache.set_summary(layer, Summary(state.cells() if state is not None else None, groups))

    def _merge(self, layer: LayerFigures, pages: list[int], state: OnlineState) -> None:
        for page in pages:
            try:
                state.add(*self._cache.read_page(layer, page))
            except NativeError as err:  # the library has dropped it just now
                _log.debug("a page is not summed up: %s", err.message)

    def _group(self, layer: LayerFigures, pages: list[int]) -> SummaryGroup | None:
        try:
            keys, values = (np.concatenate(rows) for rows in zip(*(self._cache.read_page(layer, page) for page in pages), strict=True))
        except NativeError as err:  # the library has dropped one just now
            _log.debug("pages are not compressed: %s", err.message)
            return None
        mass = float(self._mass_of(layer.array)[pages].sum())
        return compress(keys, values, self._settings.low_rank, COORDINATES, BASIS, mass)

    def _mass_of(self, array: int) -> Floats:
        return next(layer.page_mean for layer in self._cache.layers() if layer.figures.array == array)

    def _stream(self, layer: LayerFigures) -> StreamingCache | None:
        rank = self._settings.low_rank
        if rank == 0 or layer.d_v == 0 or rank > min(layer.d_k, layer.d_v) or layer.d_k % SUB or layer.d_v % SUB:
            return None
        if layer.array not in self._streams:
            room = self._settings.low_rank_share * (self._cache.settings.host or 0) / max(1, self._n_growing)
            self._streams[layer.array] = StreamingCache(min(MOST_GROUPS, int(room / group_bytes(layer, rank))))
        stream = self._streams[layer.array]
        return stream if stream.n_max else None

    def _state(self, layer: LayerFigures) -> OnlineState | None:
        n_cells = self._n_cells(layer)
        if n_cells == 0 or layer.d_v == 0:
            return None
        state = self._states.get(layer.array)
        if state is None:
            state = self._states[layer.array] = OnlineState(layer.n_head_kv, layer.d_k, layer.d_v, n_cells, self._settings.spread)
        return state

    def _n_cells(self, layer: LayerFigures) -> int:
        budget = self._cache.settings.host or 0
        n_heads = self._cache.n_layers * layer.n_head_kv
        each = OnlineState.bytes_per_cell(layer.d_k, layer.d_v, self._settings.spread)
        return min(256, int(self._settings.online_share * budget) // max(1, n_heads * each))

    def _reserve(self, layers: dict[int, LayerFigures]) -> None:
        """The bytes of the online state and the streaming cache leave the pages' budget once, so that they cannot push out pages later."""
        self._n_growing = sum(layer.cells_per_stream == max(x.cells_per_stream for x in layers.values()) for layer in layers.values())
        share = self._settings.online_share + (self._settings.low_rank_share if self._settings.low_rank else 0.0)
        wanted = int(share * (self._cache.settings.host or 0))
        if self._n_reserved != wanted and layers:
            self._cache.reserve(wanted)
            self._n_reserved = wanted


def make_room(engine: LossyEngine, placement: Placement, n_tokens: int) -> bool:
    """Before a batch, which may need more room than single tokens leave. False if the plan was not made in time: the library then makes room in its own way.

    Raises BudgetError, from the second batch on, where the budget cannot hold what never goes.
    """
    engine.check_budget()
    engine.expect(n_tokens)
    placement.advance(PLAN_STEPS)
    return placement.settle(SETTLE_S)


def _level_of(levels: tuple[Level, ...], formats: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """The level of each page, from its formats [n, 2]; 0 for one of other formats: int64 [n]."""
    out = np.zeros(len(formats), np.int64)
    for i, level in enumerate(levels):
        out[(formats == [FORMATS.index(level.fmt_k), FORMATS.index(level.fmt_v)]).all(1)] = i
    return out
