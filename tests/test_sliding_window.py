"""Gemma 3: one layer in six attends to everything, the others to a sliding window in a smaller cache of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .contexts import open_context
from .test_sequences import kl
from .texts import source_text

N_TOKENS = 1400   # the window of 512 tokens slides, and its cache is used over again
CHUNK = 256


def test_same_logits_as_stock_on_real_text(gemma3_path: Path) -> None:
    with open_context(gemma3_path, ours=False, n_ctx=2048) as stock, open_context(gemma3_path, ours=True, n_ctx=2048) as ours:
        tokens = stock.tokenize(source_text(), N_TOKENS)
        same_top, worst, n_rows = 0, 0.0, 0
        for first in range(0, N_TOKENS - 20, CHUNK):
            chunk = tokens[first : min(first + CHUNK, N_TOKENS - 20)]
            a, b = stock.feed(chunk, first=first), ours.feed(chunk, first=first)
            same_top += int(np.sum(a.argmax(axis=1) == b.argmax(axis=1)))
            worst = max(worst, kl(a, b))
            n_rows += len(chunk)
        for pos in range(N_TOKENS - 20, N_TOKENS):
            a, b = stock.feed([tokens[pos]], first=pos), ours.feed([tokens[pos]], first=pos)
            same_top += int(a.argmax() == b.argmax())
            worst = max(worst, kl(a, b))
            n_rows += 1
        assert n_rows == N_TOKENS
        assert worst < 0.05
        assert same_top / n_rows > 0.985
        assert ours.domain is not None
        assert ours.domain.figures().n_fallback == 0
        cells = {ours.domain.layer(i).cells_per_stream for i in range(ours.domain.n_layers())}
        assert len(cells) == 2  # both kinds of cache are ours
