"""How well a score ranks pages by the mass they then get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..policies.scorer import Scorer
from ..trace import Trace
from .samples import Sample, require_length, samples

KEPT: Final = (0.1, 0.2, 0.5)

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Quality:
    """Of one way to rank, mean over samples of held-out text.

    Attributes:
        spearman: rank correlation with the future mass.
        recall: share of the future mass on the best 10, 20 and 50 % of the pages.
    """

    name: str
    spearman: float
    recall: tuple[float, ...]


def rankings(scorer: Scorer | None) -> dict[str, Callable[[Sample], Floats]]:
    """The ways to rank that are compared: the scorer, what it must beat, and the future itself."""

    def free(values: Floats, sample: Sample) -> Floats:
        chosen: Floats = values[~sample.stats.protected]
        return chosen

    ways: dict[str, Callable[[Sample], Floats]] = {} if scorer is None else {"scorer": lambda s: scorer.predict(s.x)}
    return {
        **ways,
        "present mass": lambda s: free(s.stats.mass_mean, s),
        "h2o": lambda s: free(s.stats.mass_long, s),
        "lru": lambda s: -free(s.stats.idle, s),
        "recency": lambda s: -free(s.stats.age, s),
        "perfect": lambda s: s.future,
    }


def quality(traces: Sequence[Trace], scorer: Scorer | None) -> list[Quality]:
    """Every ranking over all samples of `traces`. Raises UsageError if there are none."""
    found = [sample for trace in traces for sample in samples(trace)]
    require_length(max((trace.n_steps for trace in traces), default=0), "no trace has enough steps to judge by")
    table = []
    for name, rank in rankings(scorer).items():
        rows = [
            (spearman(score, s.future), *(mass_recall(score, s.future, kept) for kept in KEPT))
            for s in found
            for score in (rank(s),)
        ]
        spearmans, *recalls = np.mean(rows, axis=0).tolist()
        table.append(Quality(name, spearmans, tuple(recalls)))
    return table


def spearman(score: Floats, truth: Floats) -> float:
    """Rank correlation, ties with their mean rank; 0 where either has no order."""
    a, b = _ranks(score), _ranks(truth)
    a, b = a - a.mean(), b - b.mean()
    spread = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / spread if spread > 0 else 0.0


def mass_recall(score: Floats, truth: Floats, kept: float) -> float:
    """Share of `truth` on the `kept` share with the highest scores; of equal scores the first ones are taken."""
    n = max(1, round(kept * len(score)))
    best = np.argsort(-score, kind="stable")[:n]
    return float(truth[best].sum() / max(float(truth.sum()), 1e-12))


def _ranks(values: Floats) -> npt.NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: npt.NDArray[np.float64] = (last - (counts - 1) / 2)[inverse]
    return ranks
