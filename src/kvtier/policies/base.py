"""What a policy sees and what it answers: arrays in, plan out. Knows nothing of an engine, a trace or a file."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ..figures import TIERS, UNLIMITED

HOST: Final = TIERS.index("host")
DISK: Final = TIERS.index("disk")
GONE: Final = TIERS.index("none")  # a page without content: absent, or dropped
PLAN_STEPS: Final = 16  # tokens from one plan to the next; a plan leaves room for the pages of that time

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PageStats:
    """All pages with content, of all layers: arrays of the same length [n].

    Mass is the share of the softmax probability of a step, over all query heads: the means of one layer's pages sum to
    1.

    Attributes:
        array: uint32, id of the page's array; page: uint32, its number there.
        layer: int32, number of the layer; layer_depth: float32, from 0 (first layer) to 1 (last).
        position: int32, the page's index within its stream.
        tier: uint8, index into kvtier.figures.TIERS.
        bytes: int64, what the page takes on its tier.
        age: float32, steps since the page was filled; 0 while it is being written.
        idle: float32, steps since the page was last seen with more mass than its fair share.
        mass_mean: float32, decayed mean of the page's mass; mass_max: float32, its largest.
        mass_long: float32, mean of mass_mean over all looks at the page, one look per plan.
        mass_sharp: float32, root of the sum of squares of the tokens' decayed means: large where few tokens have the
            mass. What attention loses with a page goes with this where values are as good as independent. Zeros where
            the engine gives none.
        uses: float32, share of the looks at the page that found more mass than its fair share, which is 1 / pages of
            the stream, those that are gone included.
        key_norm, value_norm: float32, mean norm of the page's keys and values over the mean of all pages of its layer,
            less 1 and at most 4; zeros where the engine gives none.
        key_novelty: float32, 0..2, 1 - cosine of the page's mean key to the layer's; zeros where the engine gives none.
        protected: bool, pages that may not leave the host tier.
        clock: steps since the engine started; n_tokens: the longest stream, in tokens; page_tokens: tokens of a page.
        n_taken_back: how often text was taken back so far. Pages of the same numbers then hold other text, and what a
            policy remembers of them is void.
    """

    array: npt.NDArray[np.uint32]
    page: npt.NDArray[np.uint32]
    layer: npt.NDArray[np.int32]
    layer_depth: Floats
    position: npt.NDArray[np.int32]
    tier: npt.NDArray[np.uint8]
    bytes: Indices
    age: Floats
    idle: Floats
    mass_mean: Floats
    mass_max: Floats
    mass_long: Floats
    mass_sharp: Floats
    uses: Floats
    key_norm: Floats
    value_norm: Floats
    key_novelty: Floats
    protected: npt.NDArray[np.bool_]
    clock: int
    n_tokens: int
    page_tokens: int
    n_taken_back: int = 0

    def __len__(self) -> int:
        return len(self.page)


NUMBERS: Final = ("clock", "n_tokens", "page_tokens", "n_taken_back")
ARRAYS: Final = tuple(f.name for f in fields(PageStats) if f.name not in NUMBERS)


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes for pages. `disk_bytes` 0: there is no disk, and what leaves the host is gone."""

    host_bytes: int = UNLIMITED
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A policy's answer.

    Attributes:
        keep: float32 [n], one per page of the stats. Until the next plan, pages that must make room leave lowest first.
        indices: int64 [m], pages (as indices into the stats) to move now; to_tier: uint8 [m], where: HOST, DISK or
            GONE.
    """

    keep: Floats
    indices: Indices
    to_tier: npt.NDArray[np.uint8]


@runtime_checkable
class Policy(Protocol):
    """Decides where pages are. Called every 16 to 32 tokens beside generation; under 1 ms for 30,000 pages."""

    name: str

    def plan(self, stats: PageStats, budgets: Budgets) -> Plan:
        """Deterministic for a given seed and sequence of calls. Must not change the arrays of `stats`."""
        ...


@dataclass(frozen=True, slots=True)
class Observation:
    """What an engine knows besides pages.

    Attributes:
        text: the newest text, some thousand characters at most; empty if not known.
        decode_per_s: tokens per second of late; 0 if not known.
        hit_rate, recall: shares of the mass on pages that had been evicted, and on what is held; None where not
            measured.
    """

    text: str = ""
    decode_per_s: float = 0.0
    hit_rate: float | None = None
    recall: float | None = None


@runtime_checkable
class Observer(Protocol):
    """A policy that also wants to know what an engine knows besides pages. Called before each plan."""

    def observe(self, seen: Observation) -> None: ...


@runtime_checkable
class Telling(Protocol):
    """A policy that says in a word how it works at present, for people to see."""

    @property
    def state(self) -> str: ...


def leave_last(score: Floats, stats: PageStats) -> Floats:
    """`score` as keep values: finite, and protected pages above all others.

    Of equal pages the older one leaves first.
    """
    keep = np.nan_to_num(score, nan=0.0, posinf=1e30, neginf=-1e30).astype(np.float32, copy=False)
    if len(keep):
        keep = np.where(stats.protected, keep.max() + np.float32(1.0), keep)
    return keep


def lowest_first(keep: Floats, among: Indices, n: int) -> Indices:
    """The `n` of `among` with the lowest keep, lowest first. Always the same for the same input."""
    values = keep[among]
    if n < len(among):
        among = among[np.argpartition(values, n)[:n]]
        values = keep[among]
    return among[np.argsort(values)]


def place(stats: PageStats, budgets: Budgets, keep: Floats, *, swaps: float = 0.02, margin: float = 1.25) -> Plan:
    """The plan that makes `keep` true: the host holds the highest, the disk what comes next, the rest is gone.

    With a disk, leaves room on the host for the pages that `PLAN_STEPS` tokens begin, so that none has to wait for a
    write; without one, what leaves early is lost early, and pages leave as others are begun, in the order of `keep`.
    Pages come back from the disk at most `swaps` (a share of all pages) per plan, and only for pages whose keep is
    `margin` times lower, so that nothing goes to and fro.
    """
    keep = leave_last(keep, stats)
    on_host = stats.tier == HOST
    used = int(stats.bytes[on_host].sum())
    free = budgets.host_bytes - used
    headroom = _headroom(stats) if budgets.disk_bytes else 0
    on_disk = np.flatnonzero(stats.tier == DISK)
    disk_free = budgets.disk_bytes - int(stats.bytes[on_disk].sum())
    out, back = _exchange(stats, keep, on_host, on_disk, free - headroom, int(np.ceil(swaps * len(stats))), margin)
    to_disk, gone = _split(stats, out, disk_free)
    return Plan(
        keep,
        np.concatenate([gone, to_disk, back]),
        np.repeat(np.array([GONE, DISK, HOST], np.uint8), [len(gone), len(to_disk), len(back)]),
    )


def _headroom(stats: PageStats) -> int:
    """Bytes that the pages take which are begun until the next plan: one of every layer per page_tokens tokens."""
    if not len(stats):
        return 0
    n_layers = len(np.unique(stats.array)) if len(stats) < 256 else int(np.count_nonzero(np.bincount(stats.layer)))
    return int(stats.bytes.max()) * n_layers * -(-PLAN_STEPS // max(1, stats.page_tokens))


def _exchange(
    stats: PageStats,
    keep: Floats,
    on_host: npt.NDArray[np.bool_],
    on_disk: Indices,
    free: int,
    n_swaps: int,
    margin: float,
) -> tuple[Indices, Indices]:
    """Pages to leave the host (lowest keep first) and pages of the disk to come back."""
    movable = np.flatnonzero(on_host & ~stats.protected)
    out = np.zeros(0, np.int64)
    if free < 0 and len(movable):
        n = min(len(movable), -free // max(1, int(stats.bytes[movable].min())) + 1)
        lowest = lowest_first(keep, movable, n)
        freed = np.cumsum(stats.bytes[lowest])
        out = lowest[: int(np.searchsorted(freed, -free)) + 1]
        return out, np.zeros(0, np.int64)
    if not len(on_disk):
        return out, out
    n = min(n_swaps, len(on_disk))
    best = lowest_first(-keep, on_disk, n)
    fits = np.cumsum(stats.bytes[best]) <= free
    n_free = int(fits.sum())  # those that simply fit
    rest = best[n_free:]
    worst = lowest_first(keep, movable, min(len(rest), len(movable)))
    rest = rest[: len(worst)]
    worth = (
        (keep[rest] > margin * keep[worst]) & (stats.bytes[rest] <= stats.bytes[worst])
        if len(rest)
        else np.zeros(0, bool)
    )
    n_swapped = int(np.argmin(worth)) if len(worth) and not worth.all() else len(worth)
    return worst[:n_swapped], np.concatenate([best[:n_free], rest[:n_swapped]])


def _split(stats: PageStats, out: Indices, disk_free: int) -> tuple[Indices, Indices]:
    """Of the pages that leave (lowest keep first): those that the disk takes, and those that are gone, the lowest of
    all."""
    if disk_free <= 0 or not len(out):
        return np.zeros(0, np.int64), out
    from_best = np.cumsum(stats.bytes[out[::-1]])
    n_disk = int(np.searchsorted(from_best, disk_free, side="right"))
    cut = len(out) - n_disk
    return out[cut:], out[:cut]
