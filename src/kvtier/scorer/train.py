"""Training in numpy: two hidden layers, Adam, a loss whose best answer is the expected mass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..policies.features import FLOOR, LN2, PRESENT
from ..policies.scorer import HIDDEN, Scorer, shapes

Floats = npt.NDArray[np.float32]
Weights = dict[str, Floats]

EPOCH_STEPS: Final = 200  # between reports


@dataclass(frozen=True, slots=True)
class Training:
    """How to train.

    `log_share` is the part of the loss that asks for the logarithm of the mass, for the order of light pages.

    `decay` draws all weights to 0 (decoupled, times `rate`), that is, the prediction to the present mass.
    """

    steps: int = 6000
    batch: int = 1024
    rate: float = 1e-3
    log_share: float = 3.0
    decay: float = 3.0
    seed: int = 0


def train(
    x: Floats,
    future: Floats,
    weights: Floats,
    how: Training,
    start: Scorer | None = None,
    progress: Callable[[int, int, float], None] = lambda _step, _steps, _loss: None,
) -> Scorer:
    """Fit a scorer to examples, or refine `start`.

    Args:
        x: float32 [features + 1, n]; future: float32 [n], mass in fair shares; weights: float32
            [n], how often each is drawn.
    """
    rng = np.random.default_rng(how.seed)
    mean, std = x[:-1].mean(axis=1, keepdims=True), x[:-1].std(axis=1, keepdims=True)
    # of a feature that never changes nothing can be learnt: it counts for nothing, whatever it is when it does change
    varies = np.append(std[:, 0] > 1e-6, True)
    std = np.where(std > 1e-6, std, 1).astype(np.float32)
    normal = np.concatenate([(x[:-1] - mean) / std, x[-1:]])
    params = _fresh(rng) if start is None else _unfolded(start, mean, std)
    if start is None:
        params["w1"] *= varies.astype(np.float32)
    present = x[PRESENT] * LN2
    chances = np.cumsum(weights / weights.sum(), dtype=np.float64)
    adam = _Adam(params)
    for step in range(how.steps):
        picked = np.searchsorted(chances, rng.random(how.batch) * chances[-1])
        loss, gradients = _gradients(params, normal[:, picked], present[picked], future[picked], how.log_share)
        adam.update(params, gradients, how.rate * _schedule(step, how.steps, warm=start is None), how.decay)
        if step % EPOCH_STEPS == 0 or step == how.steps - 1:
            progress(step + 1, how.steps, loss)
    return _folded(params, mean, std)


def _schedule(step: int, n_steps: int, warm: bool) -> float:
    """Linear warm-up over 5 %, then a cosine to a twentieth."""
    ramp = min(1.0, (step + 1) / max(1, n_steps // 20)) if warm else 1.0
    return ramp * (0.05 + 0.95 * 0.5 * (1 + float(np.cos(np.pi * step / max(1, n_steps)))))


def _fresh(rng: np.random.Generator) -> Weights:
    out: Weights = {}
    for name, shape in shapes(HIDDEN).items():
        w = rng.standard_normal(shape) / np.sqrt(shape[1] - 1)
        w[:, -1] *= 0.5  # biases too: the bends of the absolute values should not all lie at 0
        if name == "w3":
            w *= 0.05  # begin near the present mass
        out[name] = w.astype(np.float32)
    return out


def _gradients(p: Weights, x: Floats, present: Floats, future: Floats, log_share: float) -> tuple[float, Weights]:
    """Loss of a batch and its gradients.

    x: [features + 1, batch], normalised; present: [batch], logarithm of the present mass.
    """
    one = np.ones((1, x.shape[1]), np.float32)
    a1 = p["w1"] @ x
    h1 = np.concatenate([np.abs(a1), one])
    a2 = p["w2"] @ h1
    h2 = np.concatenate([np.abs(a2), one])
    out = np.clip((p["w3"] @ h2)[0] + present, -15, 10)
    rate = np.exp(out)
    log_future = np.log(future + np.float32(FLOOR))
    # Poisson: rate - future * log(rate) is least at the expected mass, heavy tails included
    loss = float((rate - future * out).mean() + log_share * 0.5 * ((out - log_future) ** 2).mean())
    d_out = np.clip(rate - future, -20, 20) + np.float32(log_share) * (out - log_future)
    d_out = (d_out / np.float32(len(future)))[None, :].astype(np.float32)
    d_a2 = (p["w3"].T @ d_out)[:-1] * np.sign(a2)
    d_a1 = (p["w2"].T @ d_a2)[:-1] * np.sign(a1)
    return loss, {"w1": d_a1 @ x.T, "w2": d_a2 @ h1.T, "w3": d_out @ h2.T}


class _Adam:
    """Kingma and Ba 2015, arXiv:1412.6980, with gradients cut to norm 1 and decoupled weight decay
    (arXiv:1711.05101)."""

    def __init__(self, params: Weights) -> None:
        self._m = {name: np.zeros_like(value) for name, value in params.items()}
        self._v = {name: np.zeros_like(value) for name, value in params.items()}
        self._n = 0

    def update(self, params: Weights, gradients: Weights, rate: float, decay: float) -> None:
        self._n += 1
        norm = float(np.sqrt(sum(float((g * g).sum()) for g in gradients.values())))
        scale = np.float32(min(1.0, 1.0 / max(norm, 1e-12)))
        for name, g in gradients.items():
            g = g * scale
            self._m[name] += np.float32(0.1) * (g - self._m[name])
            self._v[name] += np.float32(0.001) * (g * g - self._v[name])
            m = self._m[name] / np.float32(1 - 0.9**self._n)
            v = self._v[name] / np.float32(1 - 0.999**self._n)
            params[name] -= np.float32(rate) * (m / (np.sqrt(v) + np.float32(1e-8)) + np.float32(decay) * params[name])


def _folded(p: Weights, mean: Floats, std: Floats) -> Scorer:
    """The network for features as they are: the normalisation goes into the first layer."""
    w1 = p["w1"].copy()
    w1[:, :-1] /= std.T
    w1[:, -1:] -= w1[:, :-1] @ mean
    return Scorer(w1, p["w2"].copy(), p["w3"].copy())


def _unfolded(scorer: Scorer, mean: Floats, std: Floats) -> Weights:
    """The inverse of `_folded`, for another normalisation."""
    w1 = scorer.w1.copy()
    w1[:, -1:] += w1[:, :-1] @ mean
    w1[:, :-1] *= std.T
    return {"w1": w1, "w2": scorer.w2.copy(), "w3": scorer.w3.copy()}
