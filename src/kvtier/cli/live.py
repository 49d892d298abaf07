"""What a generation shows while it runs: one look at the tiers, the layers and what attention left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from ..engine.generation import Timing
from ..figures import TIERS, Figures
from ..native.kv import KVCache

SHARE_OF_MASS: Final = 0.9
_SHOWN_TIERS: Final = ("device", "host", "disk", "remote")
_HOST: Final = TIERS.index("host")


@dataclass(frozen=True, slots=True)
class TierLook:
    """One tier: bytes of pages, its budget (None: no limit), pages."""

    name: str
    used_bytes: int
    budget_bytes: int | None
    n_pages: int


@dataclass(frozen=True, slots=True)
class Look:
    """The state of a generation and its cache. Shares are 0..1; None where there is nothing to tell.

    Attributes:
        heat_of: what `heat` is: "read", the share of the values that the last step read, or "mass", the share of the
            pages that hold 90 % of the attention mass.
        heat: per layer.
        omitted, omitted_bound: attention mass that was left out, mean since the start, and what bounds it; None: exact.
        page_hits: page reads that found the page in RAM.
        evicted_mass: share of the attention mass that lies on pages outside RAM; of pages that are gone, what they had
            when they were dropped, as if they had it still.
        recall: share of the attention mass that is still answered, by the same count.
        n_gone: pages that were dropped for good.
        preset: what decides about pages now; empty if nothing but the order of use does.
    """

    n_tokens: int
    per_s: float | None
    tiers: tuple[TierLook, ...]
    heat_of: Literal["read", "mass"]
    heat: tuple[float, ...]
    omitted: float | None
    omitted_bound: float | None
    page_hits: float | None
    evicted_mass: float | None
    recall: float | None
    n_gone: int
    preset: str


def look(kv: KVCache, timing: Timing, preset: str = "") -> Look:
    """The present moment; call it between steps."""
    figures = kv.figures
    layers = _layers(kv)
    heat_of, heat = _heat(layers)
    outside = _mean([layer.evicted_mass for layer in layers])
    lost = min(1.0, _ratio(kv.lost_mass(), sum(layer.total_mass for layer in layers)) or 0.0)
    return Look(
        n_tokens=timing.n_generated,
        per_s=timing.decode_per_s,
        tiers=_tiers(figures),
        heat_of=heat_of,
        heat=heat,
        omitted=figures.omitted,
        omitted_bound=figures.omitted_bound,
        page_hits=_ratio(figures.n_hits, figures.n_hits + figures.n_misses),
        evicted_mass=None if outside is None else min(1.0, outside + lost),
        recall=None if not layers else max(0.0, 1.0 - lost - (figures.omitted or 0.0)),
        n_gone=figures.n_gone,
        preset=preset,
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    total_mass: float
    concentration: float | None
    evicted_mass: float | None
    read_share: float | None


def _layers(kv: KVCache) -> list[_Layer]:
    """Of every layer that has a cache, by layer number."""
    found = []
    for i in range(kv.n_layers):
        mass = kv.layer(i)
        pages = kv.pages(i)
        page_mean = np.array(mass.page_mean)
        found.append(
            (mass.figures.layer, page_mean, pages.tier, _ratio(mass.figures.last_read, mass.figures.last_seen))
        )
    return [_layer(page_mean, tier, share) for _, page_mean, tier, share in sorted(found, key=lambda entry: entry[0])]


def _layer(page_mean: npt.NDArray[np.float32], tier: npt.NDArray[np.uint8], read_share: float | None) -> _Layer:
    total = float(page_mean.sum())
    if total <= 0.0:
        return _Layer(0.0, None, None, read_share)
    evicted = float(page_mean[(tier != _HOST) & (page_mean > 0)].sum()) / total
    return _Layer(total, concentration(page_mean), evicted, read_share)


def concentration(page_mass: npt.NDArray[np.float32], share: float = SHARE_OF_MASS) -> float:
    """The share of the pages in use that together hold `share` of the mass, [n_pages] float32; small: attention is
    sparse."""
    used = np.sort(page_mass[page_mass > 0])[::-1]
    n = int(np.searchsorted(np.cumsum(used), share * float(used.sum()))) + 1
    return min(n, used.size) / used.size


def _heat(layers: Sequence[_Layer]) -> tuple[Literal["read", "mass"], tuple[float, ...]]:
    if any(layer.read_share is not None for layer in layers):
        return "read", tuple(1.0 if layer.read_share is None else layer.read_share for layer in layers)
    return "mass", tuple(layer.concentration for layer in layers if layer.concentration is not None)


def _tiers(figures: Figures) -> tuple[TierLook, ...]:
    return tuple(
        TierLook(name, tier.used_bytes, tier.budget_bytes, tier.n_pages)
        for name, tier in figures.tiers.items()
        if name in _SHOWN_TIERS and (tier.n_pages or tier.held_bytes)
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
