"""What `Llama.kv` gives: figures of the tiers, and the attention mass of pages and tokens as arrays without copies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import NativeError
from ..figures import Figures, LayerFigures
from ..settings import KVSettings
from .binding import Domain, OffloadHook
from .summary import Summary


class _Borrowed:
    """The base of an array over native memory: numpy keeps it alive as long as the array or any slice of it."""

    __slots__ = ("__array_interface__", "_lease")

    def __init__(self, lease: CacheLease, address: int, shape: tuple[int, ...]) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (address, True),
            "shape": shape,
            "typestr": np.dtype(np.float32).str,
        }
        self._lease = lease

    def __del__(self) -> None:
        self._lease.give_back()


class CacheLease:
    """Frees a model with its cache, but never while an array still points into the cache's memory."""

    def __init__(self, free: Callable[[], None]) -> None:
        self._free: Callable[[], None] | None = free
        self._n_borrowed = 0
        self._closing = False
        self._lock = threading.RLock()  # an array may die inside any of these functions

    def borrow(self, address: int, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """A read-only float32 array of `shape` at `address`; empty if there is nothing at it."""
        if address == 0:
            return np.zeros((0,) * len(shape), np.float32)
        with self._lock:
            self._n_borrowed += 1
            return np.asarray(_Borrowed(self, address, shape))

    def give_back(self) -> None:
        with self._lock:
            self._n_borrowed -= 1
            self._free_if_due()

    def close(self) -> None:
        """Free now, or when the last array dies."""
        with self._lock:
            self._closing = True
            self._free_if_due()

    @property
    def is_freed(self) -> bool:
        return self._free is None

    def _free_if_due(self) -> None:
        if self._closing and self._n_borrowed == 0 and self._free is not None:
            free, self._free = self._free, None
            free()


@dataclass(frozen=True, slots=True)
class LayerMass:
    """Attention mass of one layer: the share of softmax probability that a token or page received, per query head.

    The arrays are read-only views of memory that the next decode step updates; copy them to keep a moment. While one of
    them lives, closing the model waits for it.

    Attributes:
        token_mean, token_max: float32 [n_pages, page_tokens], decayed mean and maximum per cell.
        page_mean, page_max: float32 [n_pages].
    """

    figures: LayerFigures
    token_mean: npt.NDArray[np.float32]
    token_max: npt.NDArray[np.float32]
    page_mean: npt.NDArray[np.float32]
    page_max: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Where the pages of one layer are: arrays of [n_pages].

    Attributes:
        tier: uint8, index into kvtier.figures.TIERS.
        format_k, format_v: uint8, index into kvtier.figures.FORMATS.
        last_use: uint64, step of the last use.
    """

    tier: npt.NDArray[np.uint8]
    format_k: npt.NDArray[np.uint8]
    format_v: npt.NDArray[np.uint8]
    last_use: npt.NDArray[np.uint64]


class _Losses:
    """The mass of pages that were dropped and still are: the library only adds, also when a context has been
    forgotten."""

    def __init__(self, before: Figures) -> None:
        self._lock: Final = threading.Lock()
        self._total = before.mass_lost
        self._mass, self._n_gone = 0.0, 0

    def look(self, figures: Figures) -> float:
        n_gone = figures.tiers["none"].n_pages
        with self._lock:
            if n_gone < self._n_gone:  # which of them came back is not known: each counts alike
                self._mass *= n_gone / self._n_gone
            self._mass = self._mass + figures.mass_lost - self._total if n_gone else 0.0
            self._total, self._n_gone = figures.mass_lost, n_gone
            return self._mass


class KVCache:
    """The KV cache of one model. Everything here raises NativeError once the model is closed."""

    def __init__(self, domain: Domain, lease: CacheLease, settings: KVSettings) -> None:
        self._domain: Final = domain
        self._lease: Final = lease
        self.settings: Final = settings
        self._losses: Final = _Losses(domain.figures())

    @property
    def figures(self) -> Figures:
        """Counts since the model was loaded, and the tiers as they are now."""
        return self._domain.figures()

    def lost_mass(self) -> float:
        """What the decayed mean attention mass of dropped pages came to when they were dropped, of those whose tokens
        have not been taken back since."""
        return self._losses.look(self._domain.figures())

    @property
    def n_layers(self) -> int:
        """Layers with a paged cache, once something was decoded. 0 after that: the model has no attention layer."""
        return self._domain.n_layers()

    @property
    def last_error(self) -> NativeError | None:
        """What went wrong in the last step, or since; None if nothing did. What `move` raises is not repeated here."""
        return self._domain.last_error()

    def layer(self, index: int) -> LayerMass:
        """The attention mass of the index-th layer that has a cache."""
        raw = self._domain.layer(index)
        cells = (raw.n_pages, raw.page_tokens)
        return LayerMass(
            raw,
            self._lease.borrow(raw.token_mean_address, cells),
            self._lease.borrow(raw.token_max_address, cells),
            self._lease.borrow(raw.page_mean_address, cells[:1]),
            self._lease.borrow(raw.page_max_address, cells[:1]),
        )

    def layers(self) -> tuple[LayerMass, ...]:
        """The attention mass of all layers, by layer number."""
        return tuple(sorted((self.layer(i) for i in range(self.n_layers)), key=lambda mass: mass.figures.layer))

    def pages(self, index: int) -> LayerPages:
        """Where the pages of the index-th layer are; copies."""
        return LayerPages(*self._domain.pages(index))

    def on_offload(self, on_leave: OffloadHook | None = None, on_return: OffloadHook | None = None) -> None:
        """Be told when a page is about to leave RAM and when one came back; None ends it.

        The hooks get array, page, layer, tier, the page's bytes (valid only during the call) and its formats of K and
        V. They run on the library's threads and must not decode or change the hooks; read_page, set_keep, set_summary
        and summary_mass raise NativeError there. An exception in one is printed and otherwise ignored.
        """
        self._domain.set_offload(on_leave, on_return)

    def move(self, array: int, pages: Sequence[int], to_tier: str) -> int:
        """Move pages of an array (see LayerFigures.array) to "host" or "disk"; returns how many were moved.

        "gone" drops their content for good, where the settings are lossy; attention no longer sees their tokens.
        """
        return self._domain.move(array, pages, to_tier)

    def reencode(self, array: int, pages: Sequence[int], fmt_k: str, fmt_v: str) -> int:
        """Let pages in RAM change the formats of their keys and values; returns how many did.

        A page that attention is reading just now cannot: NativeError, after the others were tried.
        """
        return self._domain.reencode(array, pages, fmt_k, fmt_v)

    def set_keep(self, array: int, scores: npt.NDArray[np.float32]) -> None:
        """Say how much each page of an array is wanted, [n_pages]: those with the lowest scores leave first.

        Pages without content now, and those written later, count as infinitely wanted until the next call. Raises
        NativeError if the scores are not those of all pages, or one is not a number.
        """
        self._domain.set_keep(array, scores)

    def read_page(self, figures: LayerFigures, page: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Keys [page_tokens, n_head_kv, d_k] and values [page_tokens, n_head_kv, d_v] of a page, as float32 copies.

        Raises NativeError if the page has no content.
        """
        parts = []
        for part, d in enumerate((figures.d_k, figures.d_v)):
            parts.append(np.empty((figures.page_tokens, figures.n_head_kv, d), np.float32))
            if d > 0:
                self._domain.read_page(figures.array, page, part, parts[-1])
        return parts[0], parts[1]

    def set_summary(self, layer: LayerFigures, summary: Summary | None) -> None:
        """Let a summary stand in for what was dropped of a layer, from the next step on; None: nothing does.

        Its bytes count against the budget in RAM: pages leave if they must. It is seen by every query: use it for
        tokens that come before all that is still asked. Raises NativeError, BudgetError if it does not fit.
        """
        self._domain.set_summary(layer, summary)

    def summary_mass(self, layer: LayerFigures, n_max: int = 256) -> npt.NDArray[np.float32]:
        """Decayed mean attention mass of a layer's summary: its cells, if there are any, then each group.

        At most [n_max].
        """
        return self._domain.summary_mass(layer.array, n_max)

    def reserve(self, n_bytes: int) -> None:
        """Set a part of the budget in RAM aside for summaries, so that they do not push out pages one by one."""
        self._domain.reserve(n_bytes)

    def set_host_budget(self, n_bytes: int) -> None:
        """Change the budget in RAM. If it shrinks, pages leave at once.

        Raises BudgetError if too little would be left.
        """
        self._domain.set_host_budget(n_bytes)

    def compact(self) -> None:
        """Move pages together in RAM, so that memory that is only sparsely filled goes back to the system."""
        self._domain.compact()

    def evict_every_step(self, on: bool = True) -> None:
        """For tests: let every page that may leave RAM do so after each step."""
        self._domain.evict_every_step(on)
