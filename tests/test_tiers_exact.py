"""Where a page lives must not change a token: same model, same text, greedy, under every placement."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtier import Llama

from .contexts import open_context
from .texts import source_text

N_PROMPT = 600
N_PREDICT = 80
N_CTX = 768


def generate(
    path: Path, *, evict_every_step: bool = False, n_predict: int = N_PREDICT, **kv: object
) -> tuple[list[int], Llama]:
    """Greedy tokens after the prompt, and the model with its caches as they are then."""
    llm = Llama(str(path), n_ctx=N_CTX, n_batch=256, n_ubatch=256, verbose=False, seed=1, **kv)
    prompt = llm.tokenize(source_text().encode())[:N_PROMPT]
    llm.eval(prompt)
    llm.kv.evict_every_step(evict_every_step)
    tokens: list[int] = []
    for _ in range(n_predict):
        token = llm.sample(temp=0.0)
        tokens.append(token)
        llm.eval([token])
    return tokens, llm


@pytest.fixture(scope="module")
def in_ram(smollm2_path: Path) -> tuple[list[int], int]:
    """Tokens with everything in RAM, and the bytes that the cache took."""
    tokens, llm = generate(smollm2_path)
    with llm:
        figures = llm.kv.figures
        assert figures.tiers["disk"].n_pages == 0
        assert figures.n_fallback == 0
        return tokens, figures.tiers["host"].used_bytes


def test_a_quarter_in_ram_gives_the_same_tokens(
    smollm2_path: Path, in_ram: tuple[list[int], int], tmp_path: Path
) -> None:
    tokens, n_bytes = in_ram
    budget = n_bytes // 4
    ours, llm = generate(smollm2_path, kv_host=budget, kv_disk="1GiB", kv_dir=tmp_path)
    with llm:
        figures = llm.kv.figures
        assert ours == tokens
        assert figures.tiers["host"].held_bytes <= budget
        assert figures.peak_host_bytes <= budget
        assert figures.tiers["disk"].used_bytes >= n_bytes // 2
        assert figures.disk_reads > 0
    assert list(tmp_path.iterdir()) == []


def test_evicting_everything_at_every_step_gives_the_same_tokens(
    smollm2_path: Path, in_ram: tuple[list[int], int], tmp_path: Path
) -> None:
    tokens, _ = in_ram
    n_steps = 30  # every step writes and reads the whole cache
    ours, llm = generate(smollm2_path, evict_every_step=True, n_predict=n_steps, kv_disk="1GiB", kv_dir=tmp_path)
    with llm:
        figures = llm.kv.figures
        assert ours == tokens[:n_steps]
        assert figures.n_evicted >= n_steps


@pytest.mark.parametrize("page_tokens", [64, 128])
def test_page_size_changes_nothing(smollm2_path: Path, page_tokens: int) -> None:
    """Sums are cut by position, not by page."""
    with (
        open_context(smollm2_path, ours=True) as small,
        open_context(smollm2_path, ours=True, settings=f"page-tokens={page_tokens}") as large,
    ):
        tokens = small.tokenize(source_text(), 320)
        np.testing.assert_array_equal(small.feed(tokens[:300]), large.feed(tokens[:300]))
        for pos in range(300, 320):
            np.testing.assert_array_equal(small.feed([tokens[pos]], first=pos), large.feed([tokens[pos]], first=pos))
        assert large.domain is not None
        assert large.domain.layer(0).page_tokens == page_tokens
