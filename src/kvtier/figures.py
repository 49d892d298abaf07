"""What the native library counts, as plain values. Crosses every layer; knows nothing of how it is obtained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

TIERS: Final = ("none", "device", "host", "disk", "remote")  # in the order of the native library
GONE: Final = "gone"  # what a move to the tier "none" makes of a page
UNLIMITED: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class TierFigures:
    """One tier.

    `budget_bytes` is None without a limit; `held_bytes` were taken from the system for `used_bytes` of pages.
    """

    budget_bytes: int | None
    used_bytes: int
    held_bytes: int
    n_pages: int
    bytes_by_format: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Figures:
    """Counts since the domain was opened; the tiers as they are now."""

    tiers: Mapping[str, TierFigures]
    n_hits: int  # page reads that found the page in RAM
    n_misses: int  # page reads that found it on disk; read-ahead may have fetched it by then
    n_prefetched: int  # pages read ahead
    n_prefetch_used: int  # of these, pages that were then needed
    n_evicted: int  # pages that went from RAM to disk
    n_recalled: int  # pages that came back to stay
    disk_read_bytes: int
    disk_write_bytes: int
    disk_reads: int
    disk_writes: int
    stall_us: int  # time that attention waited for the disk
    peak_host_bytes: int
    n_attention: int  # attention operations computed over pages
    k_bytes_read: int
    v_bytes_read: int
    pages_read: int
    pages_skipped: int  # pages that the mask hides as a whole
    n_fallback: int  # operations on cache tensors that the CPU backend computed
    n_gone: int  # pages dropped for good so far; tiers["none"].n_pages are gone now
    reserved_bytes: int  # of what RAM holds: summaries of dropped pages
    mass_lost: float  # what the mean attention mass of the dropped pages came to when they were dropped
    # bounded fidelity; a row is one query of one query head of one layer
    recall_rows: int = 0
    tokens_seen: int = 0  # keys scored, per KV head
    tokens_read: int = 0  # values read
    pages_wanted: int = 0  # pages of which a value was read
    pages_missing: int = 0  # of those: not in RAM
    omitted_sum: float = 0.0  # softmax probability of the values that were not read, summed over rows
    max_omitted: float = 0.0  # of one row
    bound_sum: float = 0.0  # the same with what rounding of the stored keys can hide
    max_bound: float = 0.0

    @property
    def omitted(self) -> float | None:
        """Mean omitted mass of a row; None if every step was exact."""
        return self.omitted_sum / self.recall_rows if self.recall_rows else None

    @property
    def omitted_bound(self) -> float | None:
        """The mean of the rows' bounds on it; None if every step was exact."""
        return self.bound_sum / self.recall_rows if self.recall_rows else None


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """One layer's cache. The addresses are of float32 arrays that the native library owns and keeps up to date."""

    array: int
    layer: int
    n_head_kv: int
    d_k: int
    d_v: int
    page_tokens: int
    n_streams: int
    cells_per_stream: int
    n_pages: int
    n_mass_steps: int
    token_mean_address: int  # [n_pages * page_tokens]; 0: not kept
    token_max_address: int
    page_mean_address: int  # [n_pages]
    page_max_address: int
    last_seen: int = 0  # bounded fidelity, the last step: keys scored and values read, per KV head
    last_read: int = 0
    last_omitted: float = 0.0  # mean over rows
