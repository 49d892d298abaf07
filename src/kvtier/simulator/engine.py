"""An engine made of a trace: pages that fill, tiers with budgets, and the attention mass that was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import BudgetError
from ..figures import TIERS, UNLIMITED
from ..policies.base import DISK, GONE, HOST, Budgets, Floats, Indices, PageStats
from ..policies.looks import LayerLook, Shape, Tracker
from ..settings import MASS_DECAY
from ..trace import Trace

FEATURES: Final = ("key_norm", "value_norm", "key_novelty")


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What one step met, mean over layers: share of the exact mass on pages that had left the host, and on pages that
    were gone."""

    evicted: float
    gone: float


class TraceEngine:
    """Replays a trace step by step. Arrays have the recorded layers' positions in the trace as ids.

    What is observed of the mass is what an engine would see that no longer has the gone pages: the rest, summing to 1.
    """

    def __init__(self, trace: Trace, budgets: Budgets, protect_first: int = 1, protect_last: int = 2) -> None:
        n_layers, n_pages = trace.codes.shape[1:]
        self._trace: Final = trace
        self._budgets = budgets
        self._page_bytes: Final = max(1, trace.header.page_bytes)
        self._shape: Final = Shape(trace.header.n_layers, trace.header.page_tokens, protect_first, protect_last)
        self._tracker: Final = Tracker(self._shape)
        self._begun = -(-trace.header.n_prefix // trace.header.page_tokens)
        self.tier: Final = np.full((n_layers, n_pages), GONE, np.uint8)
        self.tier[:, : self._begun] = HOST
        self._keep: Final = np.full((n_layers, n_pages), np.inf, np.float32)
        self._mean: Final = trace.feature("prefill_mean")
        self._max: Final = trace.feature("prefill_max")
        self._features: Final = [
            trace.feature(name) if name in trace.features else np.zeros((n_layers, 0), np.float32) for name in FEATURES
        ]
        self._n_steps = 0

    @property
    def n_steps(self) -> int:
        """Steps replayed so far."""
        return self._n_steps

    @property
    def n_tokens(self) -> int:
        return self._trace.header.n_prefix + self._n_steps

    def set_budgets(self, budgets: Budgets) -> None:
        """From now on; what is too much leaves with the next step, lowest keep first."""
        self._budgets = budgets

    def step(self) -> StepFigures:
        """One token: its page is begun if need be, the budget enforced, its mass met. IndexError after the last."""
        exact = self._trace.mass(self._n_steps)
        n_pages = int(self._trace.n_pages[self._n_steps])
        self.tier[:, self._begun : n_pages] = HOST
        self._begun = max(self._begun, n_pages)
        self._n_steps += 1
        self._enforce()
        total = np.maximum(exact.sum(axis=1), 1e-12)
        gone = np.where(self.tier == GONE, exact, 0.0)
        disk = np.where(self.tier == DISK, exact, 0.0).sum(axis=1) / total
        lost = gone.sum(axis=1) / total
        observed = (exact - gone) / np.maximum(total - gone.sum(axis=1), 1e-12)[:, None]
        self._mean[...] = MASS_DECAY * self._mean + (1 - MASS_DECAY) * observed
        np.maximum(self._max, observed, out=self._max)
        return StepFigures(float((lost + disk).mean()), float(lost.mean()))

    def host_bytes(self) -> int:
        return int(np.count_nonzero(self.tier == HOST)) * self._page_bytes

    # what placement needs

    def stats(self) -> PageStats:
        per_page = np.full(self.tier.shape[1], self._page_bytes, np.int64)
        looks = [
            LayerLook(
                i,
                layer,
                self.tier.shape[1],
                self.tier[i].copy(),
                per_page,
                self._mean[i].copy(),
                self._max[i].copy(),
                *(f[i] for f in self._features),
            )
            for i, layer in enumerate(self._trace.header.layers)
        ]
        return self._tracker.stats(looks, self.n_tokens, self.n_tokens)

    def budgets(self) -> Budgets:
        return self._budgets

    def move(self, array: int, pages: Sequence[int], to_tier: str) -> int:
        """Raises BudgetError if the pages do not fit where they should go; none is moved then."""
        tier = TIERS.index(to_tier)
        budget = {HOST: self._budgets.host_bytes, DISK: self._budgets.disk_bytes}.get(tier, UNLIMITED)
        arriving = np.count_nonzero(self.tier[array, pages] != tier)
        if int(np.count_nonzero(self.tier == tier) + arriving) * self._page_bytes > budget and tier != GONE:
            raise BudgetError(f"{len(pages)} pages do not fit on the {to_tier} tier")
        self.tier[array, pages] = tier
        return len(pages)

    def set_keep(self, array: int, pages: Indices, keep: Floats) -> None:
        self._keep[array] = np.inf
        self._keep[array, pages] = keep

    def _enforce(self) -> None:
        """Bring the host below its budget: the pages with the lowest keep leave, to the disk while there is room."""
        n_excess = int(np.count_nonzero(self.tier == HOST)) - self._budgets.host_bytes // self._page_bytes
        if n_excess <= 0:
            return
        movable = np.flatnonzero((self.tier == HOST) & ~self._protected())
        order = movable[np.argsort(self._keep.ravel()[movable], kind="stable")][:n_excess]
        room = self._budgets.disk_bytes // self._page_bytes - int(np.count_nonzero(self.tier == DISK))
        n_disk = min(len(order), max(0, room))
        flat = self.tier.reshape(-1)
        flat[order[: len(order) - n_disk]] = GONE
        flat[order[len(order) - n_disk :]] = DISK

    def _protected(self) -> npt.NDArray[np.bool_]:
        position = np.arange(self.tier.shape[1])
        kept = (position < self._shape.protect_first) | (position >= self._begun - self._shape.protect_last)
        return np.broadcast_to(kept, self.tier.shape)
