"""Traces and page figures made of nothing but a seed, for tests that need no model."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvtier.policies.base import DISK, HOST, PageStats
from kvtier.trace import Trace, TraceHeader, TraceWriter, read_trace


def write_synthetic(path: Path, *, n_steps: int = 200, n_layers: int = 3, n_prefix: int = 640, seed: int = 0) -> Path:
    """A trace in which the first page, the newest pages and a few heavy pages per layer get most of the mass."""
    rng = np.random.default_rng(seed)
    header = TraceHeader("synthetic", n_layers + 1, tuple(range(n_layers)), 32, 1000, n_prefix, n_steps, "none")
    n_all = -(-(n_prefix + n_steps) // 32)
    heavy = rng.exponential(1.0, (n_layers, n_all)) ** 3
    heavy[:, 0] = 40.0
    with TraceWriter(path, header, rng.integers(0, 1000, n_prefix).tolist()) as writer:
        writer.feature("prefill_mean", np.full((n_layers, n_prefix // 32), 32 / n_prefix, np.float32))
        for step in range(n_steps):
            n_pages = -(-(n_prefix + step + 1) // 32)
            age = np.arange(n_pages)[::-1]
            mass = heavy[:, :n_pages] * rng.uniform(0.5, 1.5, (n_layers, n_pages)) + 20.0 / (1 + age)
            writer.add(step % 100, (mass / mass.sum(axis=1, keepdims=True)).astype(np.float32))
    return path


def synthetic(path: Path, **options: int) -> Trace:
    return read_trace(write_synthetic(path, **options))


def random_stats(
    rng: np.random.Generator, n_layers: int, n_pages: int, on_disk: float = 0.0, zero_mass: bool = False
) -> PageStats:
    """Pages of `n_layers` layers, `n_pages` each, a share of them on disk; the first and the last two are protected."""
    n = n_layers * n_pages
    layer = np.repeat(np.arange(n_layers, dtype=np.int32), n_pages)
    position = np.tile(np.arange(n_pages, dtype=np.int32), n_layers)
    protected = (position < 1) | (position >= n_pages - 2)
    age = ((n_pages - 1 - position) * 32).astype(np.float32)
    mean = np.zeros(n, np.float32) if zero_mass else rng.exponential(1 / max(1, n_pages), n).astype(np.float32)
    return PageStats(
        array=layer.astype(np.uint32),
        page=position.astype(np.uint32),
        layer=layer,
        layer_depth=(layer / max(1, n_layers - 1)).astype(np.float32),
        position=position,
        tier=np.where((rng.random(n) < on_disk) & ~protected, DISK, HOST).astype(np.uint8),
        bytes=np.full(n, 1000, np.int64),
        age=age,
        idle=np.minimum(rng.integers(0, 2000, n), age).astype(np.float32),
        mass_mean=mean,
        mass_max=np.minimum(1, mean * 3),
        mass_long=mean,
        mass_sharp=mean * rng.uniform(0.2, 1, n).astype(np.float32),
        uses=rng.random(n, dtype=np.float32),
        key_norm=rng.random(n, dtype=np.float32),
        value_norm=rng.random(n, dtype=np.float32),
        key_novelty=rng.random(n, dtype=np.float32),
        protected=protected,
        clock=n_pages * 32,
        n_tokens=n_pages * 32,
        page_tokens=32,
    )
