"""Medians, percentiles and ratios of paired rounds. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .errors import MeasuringError


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the smallest and largest of the `n` values it comes from."""

    median: float
    low: float
    high: float
    n: int

    @property
    def noise(self) -> float:
        """Half the range over the median: 0.03 reads as "within 3 %"."""
        return (self.high - self.low) / (2 * abs(self.median)) if self.median else 0.0


def spread(values: Sequence[float]) -> Spread:
    """Median and range of finite numbers. Raises MeasuringError if there are none, or if one is not finite."""
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0 or not np.isfinite(array).all():
        raise MeasuringError("a median needs at least one value, all of them finite")
    return Spread(float(np.median(array)), float(array.min()), float(array.max()), int(array.size))


def rates(seconds: Sequence[float], n_tokens: int) -> Spread:
    """Tokens per second of rounds that processed `n_tokens` each."""
    return spread([n_tokens / s for s in seconds])


def paired_ratio(baseline_s: Sequence[float], candidate_s: Sequence[float]) -> Spread:
    """How many times faster the candidate was, round by round: baseline time over candidate time.

    Both hold one time per round, in the same order: the two times of a round were taken next to each other, so what
    slowed the machine for a while slowed both.
    """
    if len(baseline_s) != len(candidate_s):
        raise MeasuringError("paired ratios need as many rounds of one as of the other")
    return spread([b / c for b, c in zip(baseline_s, candidate_s, strict=True)])


def total_ratio(baseline_s: Sequence[float], candidate_s: Sequence[float]) -> Spread:
    """Ratio of sums, with the range of the parts' ratios: for the chunks of one prefill, which differ in cost."""
    parts = paired_ratio(baseline_s, candidate_s)
    return Spread(sum(baseline_s) / sum(candidate_s), parts.low, parts.high, parts.n)


def percentile(values: Sequence[float] | np.ndarray, q: float) -> float:
    """The `q`-th percentile (0..100), interpolated linearly as numpy does it."""
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        raise MeasuringError("a percentile needs at least one value")
    return float(np.percentile(array, q))
