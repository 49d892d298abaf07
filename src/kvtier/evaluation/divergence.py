"""How far one next-token distribution is from another. Pure functions, float64 throughout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..measuring.errors import MeasuringError
from ..measuring.figures import percentile

Floats = NDArray[np.float64]


def log_softmax(logits: ArrayLike) -> Floats:
    """Logarithms of probabilities along the last axis, float64, without overflow for any finite logits."""
    x = np.asarray(logits, dtype=np.float64)
    if x.size == 0 or not np.isfinite(x).all():
        raise MeasuringError("logits must be finite: the engine answered something else")
    shifted = x - x.max(axis=-1, keepdims=True)
    normal: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normal


def kl_divergence(reference_logits: ArrayLike, logits: ArrayLike) -> Floats:
    """KL(reference || other) in nats along the last axis; never negative.

    What rounding leaves below zero (1e-16 or so) is given as zero.
    """
    log_p, log_q = log_softmax(reference_logits), log_softmax(logits)
    if log_p.shape != log_q.shape:
        raise MeasuringError(f"distributions over {log_p.shape[-1]} and {log_q.shape[-1]} tokens cannot be compared")
    kl: Floats = np.maximum((np.exp(log_p) * (log_p - log_q)).sum(axis=-1), 0.0)
    return kl


def mean_interval(values: ArrayLike, n_resamples: int = 2000, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of the mean of a series, by bootstrap.

    Neighbouring tokens are alike, so it resamples blocks of neighbours (circular, about sqrt(n) long), not single
    values.
    Source: Politis and Romano, A circular block-resampling procedure for stationary data, 1992.
    """
    x = np.asarray(values, np.float64)
    block = max(1, round(float(np.sqrt(x.size))))
    sums = np.convolve(np.concatenate([x, x[: block - 1]]), np.ones(block), "valid")  # of the block at each start
    starts = np.random.default_rng(seed).integers(0, x.size, (n_resamples, -(-x.size // block)))
    means = sums[starts].mean(axis=1) / block
    low, high = np.percentile(means, [2.5, 97.5])
    return max(0.0, float(low)), float(high)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Summary over all tokens: KL in nats, `same_top` as a share 0..1, perplexity of the text itself.

    `kl_low` and `kl_high` are the 95 % interval of the mean.
    """

    n_tokens: int
    mean_kl: float
    p99_kl: float
    max_kl: float
    same_top: float
    perplexity: float
    kl_low: float
    kl_high: float


def summarise(kl: ArrayLike, same_top: ArrayLike, nll: ArrayLike) -> Divergence:
    """One row of the table from per-token arrays: KL (nats), agreement (bool), -log p of the text (nats)."""
    k, s, n = np.asarray(kl, np.float64), np.asarray(same_top, np.float64), np.asarray(nll, np.float64)
    if k.size == 0 or not k.shape == s.shape == n.shape:
        raise MeasuringError("a summary needs as many divergences as agreements and likelihoods, and at least one")
    low, high = mean_interval(k)
    return Divergence(
        n_tokens=int(k.size),
        mean_kl=float(k.mean()),
        p99_kl=percentile(k, 99.0),
        max_kl=float(k.max()),
        same_top=float(s.mean()),
        perplexity=float(np.exp(n.mean())),
        kl_low=low,
        kl_high=high,
    )
