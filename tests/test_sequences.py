"""What llama.cpp does to caches beside appending: several sequences and streams, copies, removals, shifts.

Every scenario runs twice, on the stock CPU cache and on ours, and must give the same next-token distributions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest

from .contexts import Context, open_context
from .texts import source_text

Logits = npt.NDArray[np.float32]


def kl(p_logits: Logits, q_logits: Logits) -> float:
    """Largest KL divergence over the rows, in nats."""
    p = p_logits.astype(np.float64) - np.logaddexp.reduce(p_logits.astype(np.float64), axis=-1, keepdims=True)
    q = q_logits.astype(np.float64) - np.logaddexp.reduce(q_logits.astype(np.float64), axis=-1, keepdims=True)
    return float(np.max(np.sum(np.exp(p) * (p - q), axis=-1)))


def append(c: Context, tokens: list[int]) -> Logits:
    c.fill(tokens[:300])
    return c.feed(tokens[300:320], first=300)


def remove_and_refill(c: Context, tokens: list[int]) -> Logits:
    c.fill(tokens[:200])
    assert llama_cpp.llama_memory_seq_rm(c.memory, 0, 100, 200)
    c.fill(tokens[300:400], first=100)
    return c.feed(tokens[400:405], first=200)


def two_sequences(c: Context, tokens: list[int]) -> Logits:
    c.fill(tokens[:90], seq=0)
    c.fill(tokens[100:220], seq=1)
    return c.decode([tokens[90], tokens[220]], [90, 120], [[0], [1]])


def copy_sequence(c: Context, tokens: list[int]) -> Logits:
    c.fill(tokens[:130], seq=0)
    llama_cpp.llama_memory_seq_cp(c.memory, 0, 1, -1, -1)
    first = c.feed(tokens[130:140], seq=1, first=130)
    assert llama_cpp.llama_memory_seq_rm(c.memory, 0, -1, -1)
    return np.concatenate([first, c.feed(tokens[140:150], seq=1, first=140)])


def shift(c: Context, tokens: list[int]) -> Logits:
    c.fill(tokens[:256])
    assert llama_cpp.llama_memory_can_shift(c.memory)
    assert llama_cpp.llama_memory_seq_rm(c.memory, 0, 4, 100)
    llama_cpp.llama_memory_seq_add(c.memory, 0, 100, -1, -96)
    return c.feed(tokens[256:266], first=160)


def clear_and_reuse(c: Context, tokens: list[int]) -> Logits:
    c.fill(tokens[:200])
    llama_cpp.llama_memory_clear(c.memory, True)
    return c.feed(tokens[200:260])


SCENARIOS: list[Callable[[Context, list[int]], Logits]] = [
    append,
    remove_and_refill,
    two_sequences,
    copy_sequence,
    shift,
    clear_and_reuse,
]


@pytest.mark.parametrize("kv_unified", [False, True], ids=["streams", "unified"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=[s.__name__ for s in SCENARIOS])
def test_same_as_stock(smollm2_path: Path, scenario: Callable[[Context, list[int]], Logits], kv_unified: bool) -> None:
    options = {"n_seq_max": 2, "kv_unified": kv_unified, "n_ctx": 1024}
    with (
        open_context(smollm2_path, ours=False, **options) as stock,
        open_context(smollm2_path, ours=True, **options) as ours,
    ):
        tokens = stock.tokenize(source_text(), 500)
        assert kl(scenario(stock, tokens), scenario(ours, tokens)) < 0.02


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[s.__name__ for s in SCENARIOS])
def test_same_on_disk(smollm2_path: Path, tmp_path: Path, scenario: Callable[[Context, list[int]], Logits]) -> None:
    options = {"n_seq_max": 2, "n_ctx": 1024, "ours": True}
    settings = f"host=4MiB\ndisk=1GiB\ndir={tmp_path}\n"
    with (
        open_context(smollm2_path, **options) as in_ram,
        open_context(smollm2_path, settings=settings, **options) as on_disk,
    ):
        tokens = in_ram.tokenize(source_text(), 500)
        np.testing.assert_array_equal(scenario(on_disk, tokens), scenario(in_ram, tokens))
        assert on_disk.domain is not None
        assert scenario is clear_and_reuse or on_disk.domain.figures().tiers["disk"].n_pages > 0


# With four bits, two runs whose last bits differ round some keys to different codes: their distributions lie further
# apart.
@pytest.mark.parametrize(("type_k", "limit"), [("q8_0", 0.05), ("q4_0", 0.3), ("bf16", 0.05), ("f32", 0.05)])
def test_shift_of_other_types(smollm2_path: Path, type_k: str, limit: float) -> None:
    stock_type = "f16" if type_k == "bf16" else type_k  # stock ends the process when a BF16 cache is shifted
    with (
        open_context(smollm2_path, ours=False, type_k=stock_type) as stock,
        open_context(smollm2_path, ours=True, type_k=type_k) as ours,
    ):
        tokens = stock.tokenize(source_text(), 500)
        assert kl(shift(stock, tokens), shift(ours, tokens)) < limit


def test_shift_of_wide_pages_under_a_quantized_name(smollm2_path: Path) -> None:
    """As a lossy cache is: llama.cpp rotates what it takes for Q8_0, and turns it back to shift it; the pages hold
    F16."""
    with (
        open_context(smollm2_path, ours=False) as stock,
        open_context(smollm2_path, ours=True, settings="host-k=f16\nhost-v=f16\n", type_k="q8_0") as ours,
    ):
        tokens = stock.tokenize(source_text(), 500)
        assert kl(shift(stock, tokens), shift(ours, tokens)) < 0.05
        assert ours.domain is not None
        assert ours.domain.figures().tiers["host"].bytes_by_format["f16"] > 0


@pytest.mark.parametrize("type_k", ["q8_0", "f16"])
def test_shifted_positions_leave_a_bound_that_says_something(smollm2_path: Path, type_k: str) -> None:
    """What is left out stays what it was, and so does what bounds it: a shift adds what it really rounds, once."""
    with open_context(smollm2_path, ours=True, settings="fidelity=bounded:0.07\n", type_k=type_k) as c:
        assert c.domain is not None
        tokens = c.tokenize(source_text(), 600)
        c.fill(tokens[:500])
        n, bounds = 500, []
        for i in range(4):
            before = c.domain.figures()
            for token in tokens[500 + 8 * i : 508 + 8 * i]:
                c.fill([token], first=n)
                n += 1
            after = c.domain.figures()
            bounds.append((after.bound_sum - before.bound_sum) / (after.recall_rows - before.recall_rows))
            assert llama_cpp.llama_memory_seq_rm(c.memory, 0, 4, 20)
            llama_cpp.llama_memory_seq_add(c.memory, 0, 20, -1, -16)
            n -= 16
        assert bounds[3] < 3.5 * bounds[0], bounds


def test_a_copied_stream_takes_only_the_pages_it_has(smollm2_path: Path) -> None:
    """llama.cpp copies a stream as a whole, also the cells that were never written."""
    with open_context(smollm2_path, ours=True, n_seq_max=2, n_ctx=8192) as c:
        tokens = c.tokenize(source_text(), 200)
        c.fill(tokens[:100], seq=0)
        assert c.domain is not None
        before = c.domain.figures().tiers["host"].n_pages
        llama_cpp.llama_memory_seq_cp(c.memory, 0, 1, -1, -1)
        c.fill(tokens[100:110], seq=1, first=100)
        assert c.domain.figures().tiers["host"].n_pages == 2 * before


def test_layers_that_are_not_given_to_us_are_left_to_the_cpu_backend(smollm2_path: Path) -> None:
    """Their caches lie in host memory, which we could read: but copying them into pages at every step is no help."""
    with (
        open_context(smollm2_path, ours=False) as stock,
        open_context(smollm2_path, ours=True, n_gpu_layers=1) as ours,  # the output layer
    ):
        tokens = stock.tokenize(source_text(), 120)
        for c in (stock, ours):
            c.fill(tokens[:100])
        np.testing.assert_array_equal(ours.feed(tokens[100:101], first=100), stock.feed(tokens[100:101], first=100))


def test_without_flash_attention(smollm2_path: Path) -> None:
    """Not our way, but an answer all the same: the CPU backend computes over gathered rows."""
    with (
        open_context(smollm2_path, ours=False, flash_attn=False) as stock,
        open_context(smollm2_path, ours=True, flash_attn=False) as ours,
    ):
        tokens = stock.tokenize(source_text(), 500)
        assert kl(append(stock, tokens), append(ours, tokens)) < 0.02
        assert ours.domain is not None and ours.domain.figures().n_fallback > 0


@pytest.mark.parametrize("type_k", ["q5_0", "q5_1", "iq4_nl"])
def test_nominal_types_that_are_no_page_format(smollm2_path: Path, type_k: str) -> None:
    """llama.cpp's other cache types are kept in Q8_0 pages, never worse than what was asked for."""
    with open_context(smollm2_path, ours=False) as stock, open_context(smollm2_path, ours=True, type_k=type_k) as ours:
        tokens = stock.tokenize(source_text(), 500)
        assert kl(append(stock, tokens), append(ours, tokens)) < 0.1
        assert ours.domain is not None
        figures = ours.domain.figures()
        assert figures.n_fallback == 0
        assert figures.tiers["host"].bytes_by_format["q8_0"] > 0
