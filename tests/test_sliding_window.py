"""Gemma 3: one layer in six attends to everything, the others to a sliding window in a smaller cache of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from .contexts import open_context
from .test_sequences import kl
from .texts import source_text

N_TOKENS = 1100  # the window of 512 tokens slides, and its cache of 768 cells is used over again
CHUNK = 256
N_FILLED = 3 * CHUNK  # without logits, a row of which is a megabyte
N_DECODED = 20

Logits = npt.NDArray[np.float32]


def logits_of(path: Path, *, ours: bool, flash_attn: bool = True) -> tuple[Logits, set[int]]:
    """Logits of the tokens after N_FILLED, the last 20 decoded one by one; and the sizes of our caches."""
    with open_context(path, ours=ours, flash_attn=flash_attn, n_ctx=1280) as c:
        tokens = c.tokenize(source_text(), N_TOKENS)
        n_prefill = N_TOKENS - N_DECODED
        for first in range(0, N_FILLED, CHUNK):
            c.fill(tokens[first : first + CHUNK], first=first)
        rows = [
            c.feed(tokens[first : min(first + CHUNK, n_prefill)], first=first)
            for first in range(N_FILLED, n_prefill, CHUNK)
        ]
        rows += [c.feed([tokens[pos]], first=pos) for pos in range(n_prefill, N_TOKENS)]
        cells = set()
        if c.domain is not None:
            assert c.domain.figures().n_fallback == 0
            cells = {c.domain.layer(i).cells_per_stream for i in range(c.domain.n_layers())}
        return np.concatenate(rows), cells


def mean_kl(a: Logits, b: Logits) -> float:
    """Mean over the rows, in nats."""
    return float(np.mean([kl(x[None], y[None]) for x, y in zip(a, b, strict=True)]))


def test_same_logits_as_stock_on_real_text(gemma3_path: Path) -> None:
    """As near to stock as stock's two ways to compute attention are to each other (the weights' inputs are rounded to 8
    bits)."""
    stock, _ = logits_of(gemma3_path, ours=False)
    other, _ = logits_of(gemma3_path, ours=False, flash_attn=False)
    ours, cells = logits_of(gemma3_path, ours=True)
    assert len(ours) == N_TOKENS - N_FILLED
    assert len(cells) == 2  # both kinds of cache are ours
    noise = mean_kl(stock, other)
    assert noise < 0.02
    assert mean_kl(stock, ours) < 1.2 * noise
    assert mean_kl(other, ours) < 1.2 * noise
    tops = [logits.argmax(axis=1) for logits in (stock, other, ours)]
    assert np.mean(tops[0] == tops[2]) > np.mean(tops[0] == tops[1]) - 0.03
