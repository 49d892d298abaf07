"""From traces to examples: what was known of every page at some step, and how much mass it then got."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ..policies.base import PLAN_STEPS, Budgets, PageStats
from ..policies.features import features
from ..simulator.engine import TraceEngine
from ..trace import Trace

EVERY_STEPS: Final = 64  # from one sample to the next
FIRST_STEP: Final = 64
HORIZON: Final = (128, 512)  # steps of the future: at least, at most
LEAST_STEPS: Final = FIRST_STEP + HORIZON[0]  # of a trace that has a sample

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sample:
    """All pages at one step that a policy may choose among.

    Attributes:
        stats: their figures; x: float32 [features + 1, pages].
        future: float32 [pages], mean mass per step over the horizon, in fair shares.
    """

    stats: PageStats
    x: Floats
    future: Floats


def require_length(n_steps: int, what: str) -> None:
    """Raises UsageError if a recording of so many steps has no sample; `what` names it and says what it is too short
    for."""
    if n_steps < LEAST_STEPS:
        raise UsageError(what, f"Take at least {LEAST_STEPS}.")


def samples(trace: Trace, every: int = EVERY_STEPS) -> Iterator[Sample]:
    """Samples of a trace, with all pages held. None if it is shorter than LEAST_STEPS."""
    engine = TraceEngine(trace, Budgets())
    for step in range(trace.n_steps - HORIZON[0] + 1):
        if step % PLAN_STEPS == 0:
            stats = engine.stats()
            if step >= FIRST_STEP and (step - FIRST_STEP) % every == 0:
                yield _sample(trace, stats, step)
        if step < trace.n_steps:
            engine.step()


def _sample(trace: Trace, stats: PageStats, step: int) -> Sample:
    mass = trace.mass(step, min(trace.n_steps, step + HORIZON[1])).mean(axis=0, dtype=np.float32)
    fair = np.float32(stats.n_tokens / stats.page_tokens)
    future = mass[stats.array, stats.page] * fair
    free = np.flatnonzero(~stats.protected)
    return Sample(stats, features(stats)[:, free], future[free])


def pooled(traces: Sequence[Trace]) -> tuple[Floats, Floats, Floats]:
    """Examples of many traces: x [features + 1, n], future [n] and weights [n].

    Weights sum to 1 within each sample, however many pages it has, so that long contexts do not drown short ones.
    """
    found = [sample for trace in traces for sample in samples(trace)]
    weights = [np.full(len(s.future), 1 / max(1, len(s.future)), np.float32) for s in found]
    return (
        np.concatenate([s.x for s in found], axis=1),
        np.concatenate([s.future for s in found]),
        np.concatenate(weights),
    )
