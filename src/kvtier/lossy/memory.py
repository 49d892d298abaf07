"""The δ-Mem engine: beside generation, gives the pages that are wanted least fewer bits, then only a share of a
summary."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import BudgetError, NativeError
from ..figures import LayerFigures
from ..formats import FORMATS
from ..machine import hardware
from ..native.kv import KVCache
from ..placement.kvengine import KVEngine
from ..placement.placement import Placement
from ..policies.base import HOST, PLAN_STEPS, Floats, Indices, PageStats, Plan
from .budget import ShareKeeper
from .levels import Level, assign, growing, ladder
from .settings import MemorySettings
from .stand_ins import StandIns
from .streaming import whole_groups

LEAST_SLACK: Final = 384 << 10  # a slab of each format that is only begun
SLAB_WASTE: Final = 1.035  # bytes held per byte of pages: frames do not fill slabs to the last byte
SETTLE_S: Final = 60.0  # for room before a batch
TRIM_REFRESHES: Final = 64  # about 1,000 tokens
BATCH: Final = 16  # pages that change their format before memory is put together again
_log = logging.getLogger(__name__)


class LossyEngine(KVEngine):
    """A KV cache whose pages are given up step by step.

    Plans only say what is wanted; this carries it out within the budget.
    """

    def __init__(
        self, kv: KVCache, memory: MemorySettings, to_text: Callable[[Sequence[int]], str] = lambda _t: ""
    ) -> None:
        super().__init__(kv, to_text)
        self._cache: Final = kv
        self._settings: Final = memory
        self._stand_ins = StandIns(kv, memory)
        self._ahead = 2 * PLAN_STEPS
        self._is_checked = False
        share, budget = kv.settings.host_share, kv.settings.host
        self._keeper = ShareKeeper(share, budget) if share is not None and budget is not None else None
        self._n_refreshes = 0

    def check_budget(self) -> None:
        """Raises BudgetError where the budget cannot hold what never goes: sliding windows, and the first and newest
        pages of each layer."""
        settings = self._cache.settings
        budget = settings.host
        if self._is_checked or budget is None:
            return
        layers = [layer.figures for layer in self._cache.layers()]  # none before the first batch
        self._is_checked = bool(layers)
        arrays = {layer.array for layer in growing(layers)}
        own, least = Level(*self._own_formats()), LEAST_SLACK
        for layer in layers:
            levels = ladder(own.fmt_k, own.fmt_v, layer) if self._settings.compress else (own,)
            n_newest = min(sum(settings.protected_pages), layer.n_pages)
            n_older = 0 if layer.array in arrays else layer.n_pages - n_newest
            least += int(
                SLAB_WASTE
                * (n_newest * own.page_bytes(layer) + n_older * levels[min(1, len(levels) - 1)].page_bytes(layer))
            )
        if layers and least > budget:
            raise BudgetError(
                f"the lossy budget is {budget:,} bytes, but sliding windows and the newest pages of {len(layers)} "
                f"layers alone take {least:,}",
                f"Give it more (--kv-host {-(-least // (1 << 20))}MiB is the least), or take a shorter context.",
            )

    def expect(self, n_tokens: int) -> None:
        """So many tokens come next: the next `follow` makes room for them."""
        self._ahead = n_tokens

    def follow(self, stats: PageStats, plan: Plan) -> None:
        """Make room for what comes, giving up first what `plan.keep` wants least. Runs in the thread that plans."""
        layers = {layer.figures.array: layer.figures for layer in self._cache.layers()}
        self._stand_ins.reserve(layers)
        budget = self._cache.settings.host
        if budget is None or not len(stats):
            return
        self._follow_free_memory()
        tiers = self._cache.figures.tiers["host"]
        budget = tiers.budget_bytes or budget
        own = Level(*self._own_formats())
        page_bytes = sum(own.page_bytes(layer) for layer in growing(layers.values()))
        headroom = int(SLAB_WASTE * page_bytes) * -(
            -self._ahead // stats.page_tokens
        )  # so many tokens begin at most so many pages
        headroom = min(headroom, budget // 2)
        self._ahead = 2 * PLAN_STEPS
        slack = max(int(self._settings.slack * budget), LEAST_SLACK)
        self._n_refreshes += 1
        if self._n_refreshes % TRIM_REFRESHES == 0:  # arrays of lengths that grow leave holes behind
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
                _log.info(
                    "the cache's budget is %s bytes now, of %s before: free memory has changed",
                    f"{wanted:,}",
                    f"{before:,}",
                )
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
        first = growing(layers.values())[0]  # heads of all layers that grow are alike
        levels = ladder(own.fmt_k, own.fmt_v, first) if self._settings.compress else (own,)
        sizes = np.array([level.page_bytes(first) for level in levels], np.int64)
        # what is protected is never gone, but only the newest pages are still written to
        sinks = np.flatnonzero(on_host & stats.protected & (stats.age > 2 * stats.page_tokens))
        newest = np.setdiff1d(np.flatnonzero(on_host & stats.protected), sinks, assume_unique=True)
        sink_level = min(1, len(levels) - 1)
        room -= _bytes_of(stats.array[newest], layers, levels[0]) + _bytes_of(
            stats.array[sinks], layers, levels[sink_level]
        )
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
        """More pages of each array that has some to give up, so that they make whole groups: the room lasts for longer
        then."""
        arrays = np.unique(stats.array[gone]).tolist()
        order = free[np.argsort(keep[free], kind="stable")]
        mine = [(gone[stats.array[gone] == array], order[stats.array[order] == array]) for array in arrays]
        return np.concatenate([whole_groups(going, candidates) for going, candidates in mine]) if mine else gone

    def _drop_shortfall(self, stats: PageStats, keep: Floats, layers: dict[int, LayerFigures], headroom: int) -> None:
        """What is wanted least goes where fewer bits have not given enough room: else the library would take what is
        largest."""
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
                    self._cache.reencode(array, pages, level.fmt_k, level.fmt_v)
                except NativeError as err:  # attention has some of them just now: the next refresh takes them
                    _log.debug("pages keep their format for now: %s", err.message)
            self._cache.compact()

    def _drop(self, stats: PageStats, gone: npt.NDArray[np.int64], layers: dict[int, LayerFigures]) -> None:
        """What stands in for the pages is seen before they go."""
        for array in np.unique(stats.array[gone]).tolist():
            pages = stats.page[gone[stats.array[gone] == array]].tolist()
            self._stand_ins.take(layers[array], pages)
            try:
                self._cache.move(array, pages, "gone")
            except NativeError as err:
                _log.debug("pages stay for now: %s", err.message)


def make_room(engine: LossyEngine, placement: Placement, n_tokens: int) -> bool:
    """Before a batch, which may need more room than single tokens leave.

    False if the plan was not made in time: the library then makes room in its own way.

    Raises BudgetError, from the second batch on, where the budget cannot hold what never goes.
    """
    engine.check_budget()
    engine.expect(n_tokens)
    placement.advance(PLAN_STEPS)
    return placement.settle(SETTLE_S)


def _bytes_of(arrays: npt.NDArray[np.uint32], layers: dict[int, LayerFigures], level: Level) -> int:
    """Bytes of one page for each entry of `arrays`, all in the formats of `level`."""
    ids, counts = np.unique(arrays, return_counts=True)
    return sum(n * level.page_bytes(layers[array]) for array, n in zip(ids.tolist(), counts.tolist(), strict=True))


def _level_of(levels: tuple[Level, ...], formats: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """The level of each page, from its formats [n, 2]; 0 for one of other formats: int64 [n]."""
    out = np.zeros(len(formats), np.int64)
    for i, level in enumerate(levels):
        out[(formats == [FORMATS.index(level.fmt_k), FORMATS.index(level.fmt_v)]).all(1)] = i
    return out
