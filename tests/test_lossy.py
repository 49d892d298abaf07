"""Lossy fidelity: memory is bounded without a disk, and what had to leave is not seen any more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtier import Llama
from kvtier.errors import BudgetError, NativeError, SettingsError, UnsupportedError
from kvtier.lossy.batch import fitting_batch
from kvtier.lossy.memory import LossyEngine
from kvtier.lossy.settings import MemorySettings
from kvtier.model.gguf import read_model
from kvtier.model.shape import shape_of
from kvtier.native.summary import Summary, SummaryCells, SummaryGroup
from kvtier.settings import KVSettings

from .test_sequences import kl
from .texts import source_text

N_TOKENS = 1200
N_PREDICT = 16
N_CTX = 1280
PAGE_BYTES = 32 * 3 * 64 * 2 * 2  # SmolLM2: 32 tokens of 3 KV heads, 64 channels each of K and V, F16
N_LAYERS = 30
ALL_BYTES = (N_TOKENS + N_PREDICT + 31) // 32 * N_LAYERS * PAGE_BYTES


def open_lossy(path: Path, budget: int, n_ctx: int = N_CTX) -> Llama:
    """Without a policy at work: what leaves is left to the library, and to what the test says."""
    settings = KVSettings(host=budget, fidelity="lossy")
    llm = Llama(
        str(path),
        n_ctx=n_ctx,
        n_batch=256,
        n_ubatch=256,
        n_threads=1,
        n_threads_batch=1,
        verbose=False,
        seed=1,
        kv_settings=settings,
    )
    assert llm.placement is not None
    llm.placement.stop()
    return llm


def generate(llm: Llama, n_tokens: int = N_TOKENS) -> list[int]:
    prompt = llm.tokenize(source_text().encode())[:n_tokens]
    for first in range(0, len(prompt), 256):
        llm.eval(prompt[first : first + 256])
    tokens = []
    for _ in range(N_PREDICT):
        tokens.append(llm.sample(temp=0.0))
        llm.eval(tokens[-1:])
    return tokens


@pytest.mark.parametrize(
    "memory", [MemorySettings(online_share=0.01), MemorySettings(low_rank=32, low_rank_share=0.25, online_share=0.01)]
)
def test_the_online_memory_keeps_to_its_budget(smollm2_path: Path, memory: MemorySettings) -> None:
    """Pages lose bits, then become groups of the streaming cache, then a share of the online state; and all of it
    twice, for two texts."""
    budget = 12 * N_LAYERS * PAGE_BYTES
    settings = KVSettings(host=budget, fidelity="lossy")
    common = {
        "n_ctx": 1536,
        "n_batch": 64,
        "n_ubatch": 64,
        "n_threads": 1,
        "n_threads_batch": 1,
        "verbose": False,
        "seed": 1,
    }
    with Llama(str(smollm2_path), kv_settings=settings, kv_memory=memory, **common) as llm:
        assert llm.placement is not None and llm.placement.figures.policy in ("delta", "adaptive")
        for n_tokens in (1300, 800):
            llm.reset()
            llm._ctx.kv_cache_clear()
            tokens = generate(llm, n_tokens)
            assert len(tokens) == N_PREDICT and llm.placement.settle(60.0) and not llm.placement.figures.problem
            figures = llm.kv.figures
            assert figures.peak_host_bytes <= budget and figures.tiers["disk"].n_pages == 0
            host = figures.tiers["host"].bytes_by_format
            assert min(host["q4_0"], host["f16"]) > 0, host
            assert figures.reserved_bytes <= budget * (
                0.1 + (memory.low_rank > 0) * memory.low_rank_share
            )  # cells come in 32s
            plain = budget // (PAGE_BYTES + 64)
            assert figures.tiers["host"].n_pages > plain  # more pages than the budget would hold whole
            mass = [llm.kv.summary_mass(llm.kv.layer(i).figures) for i in range(N_LAYERS)]
            assert max(float(part.sum()) for part in mass) > 0.0 and figures.tiers["none"].n_pages > 0
            if memory.low_rank:
                engine = llm.placement._engine
                assert isinstance(engine, LossyEngine) and engine._stand_ins.n_groups > 0
    with pytest.raises(SettingsError, match="kv_memory"):
        Llama(str(smollm2_path), kv_memory=MemorySettings(), verbose=False)


@pytest.fixture(scope="module")
def exact(smollm2_path: Path) -> list[int]:
    """With F16 pages of rotated keys and values, which round as a lossy cache's do."""
    rotated = {"type_k": "q8_0", "type_v": "q8_0", "kv_settings": KVSettings(host_type_k="f16", host_type_v="f16")}
    with Llama(
        str(smollm2_path),
        n_ctx=N_CTX,
        n_batch=256,
        n_ubatch=256,
        n_threads=1,
        n_threads_batch=1,
        verbose=False,
        seed=1,
        **rotated,
    ) as llm:
        return generate(llm)


def test_half_of_the_cache_is_enough_to_go_on(smollm2_path: Path) -> None:
    budget = ALL_BYTES // 2
    with open_lossy(smollm2_path, budget) as llm:
        tokens = generate(llm)
        figures = llm.kv.figures
        assert len(tokens) == N_PREDICT
        assert figures.peak_host_bytes <= budget
        assert figures.tiers["disk"].n_pages == 0 and figures.disk_writes == 0
        n_all = (N_TOKENS + N_PREDICT + 31) // 32 * N_LAYERS
        assert figures.tiers["none"].n_pages + figures.tiers["host"].n_pages == n_all
        assert figures.n_gone == figures.tiers["none"].n_pages >= n_all // 2
        assert figures.mass_lost > 0.0
        for i in range(llm.kv.n_layers):  # the first page and the newest two are never dropped
            tier = llm.kv.pages(i).tier[: (N_TOKENS + N_PREDICT + 31) // 32]
            assert tier[0] == 2 and (tier[-2:] == 2).all()


def test_what_was_lost_of_a_text_goes_with_it(smollm2_path: Path) -> None:
    with open_lossy(smollm2_path, ALL_BYTES, n_ctx=1024) as llm:
        text = llm.tokenize(source_text().encode())[:320]
        llm.eval(text)
        arrays = [mass.figures.array for mass in llm.kv.layers()]
        assert llm.kv.lost_mass() == 0.0
        for array in arrays:
            llm.kv.move(array, [2, 3, 6, 7], "gone")
        lost = llm.kv.lost_mass()
        assert lost == pytest.approx(llm.kv.figures.mass_lost) and lost > 0.0
        llm._ctx.kv_cache_seq_rm(0, 192, -1)
        llm.n_tokens = 192
        llm.eval(text[192:256])  # over two of the four
        assert llm.kv.lost_mass() == pytest.approx(lost / 2)
        llm.reset()
        llm._ctx.kv_cache_clear()
        llm.eval(text[:200])
        assert llm.kv.lost_mass() == 0.0
        assert llm.kv.figures.mass_lost == pytest.approx(lost)


def test_a_budget_for_everything_gives_the_tokens_of_exact(smollm2_path: Path, exact: list[int]) -> None:
    with open_lossy(smollm2_path, ALL_BYTES * 5 // 4) as llm:
        assert generate(llm) == exact
        assert llm.kv.figures.n_gone == 0


def test_a_page_that_is_dropped_is_masked_not_zero(smollm2_path: Path) -> None:
    """Dropping a page gives the distribution of a cache in which those tokens are hidden: here by removing them from
    it."""
    logits = {}
    for how in ("whole", "gone", "removed"):
        with open_lossy(smollm2_path, ALL_BYTES, n_ctx=1024) as llm:
            text = llm.tokenize(source_text().encode())[:300]
            llm.eval(text[:256])
            if how == "gone":
                for mass in llm.kv.layers():
                    assert llm.kv.move(mass.figures.array, [2, 3], "gone") == 2
                assert llm.kv.figures.n_gone == 2 * N_LAYERS
            elif how == "removed":
                assert llm._ctx.kv_cache_seq_rm(0, 64, 128)
            llm.eval(text[256:257])
            logits[how] = np.array(llm._ctx.get_logits()[: llm.n_vocab()], np.float64)
    assert kl(logits["removed"], logits["gone"]) < 0.002
    assert kl(logits["whole"], logits["gone"]) > 0.01


def identity_summary(llm: Llama, index: int, pages: list[int], fmt: str) -> Summary:
    """All of some pages in as many dimensions as they have, so nothing is lost but by the format."""
    layer = llm.kv.layer(index).figures
    parts = [llm.kv.read_page(layer, page) for page in pages]
    keys, values = (np.concatenate([p[i] for p in parts]).transpose(1, 0, 2) for i in range(2))
    eye = np.broadcast_to(np.eye(layer.d_k, dtype=np.float32), (layer.n_head_kv, layer.d_k, layer.d_k))
    zero = np.zeros((layer.n_head_kv, layer.d_k), np.float32)
    half = keys.shape[1] // 2
    cells = SummaryCells(keys[:, :half], values[:, :half], np.zeros((layer.n_head_kv, half), np.float32), fmt=fmt)
    group = SummaryGroup(zero, eye, keys[:, half:], zero, eye, values[:, half:], fmt_coord=fmt)
    return Summary(cells, (group,))


@pytest.mark.parametrize("fmt", ["f16", "q8_0"])
@pytest.mark.parametrize("n_last", [1, 6])  # more than 16 rows per KV head are a prefill
def test_a_summary_stands_in_for_dropped_pages(smollm2_path: Path, fmt: str, n_last: int) -> None:
    """A summary that holds all there was gives the distribution of the whole cache, at decode and in a prefill."""
    logits = {}
    for how in ("whole", "gone", "summary"):
        with open_lossy(smollm2_path, ALL_BYTES, n_ctx=1024) as llm:
            text = llm.tokenize(source_text().encode())[:300]
            llm.eval(text[:256])
            for i in range(N_LAYERS if how != "whole" else 0):
                summary = identity_summary(llm, i, [2, 3, 4], fmt)
                llm.kv.move(llm.kv.layer(i).figures.array, [2, 3, 4], "gone")
                if how == "summary":
                    llm.kv.set_summary(llm.kv.layer(i).figures, summary)
            llm.eval(text[256 : 256 + n_last])
            logits[how] = np.array(llm._ctx.get_logits()[: llm.n_vocab()], np.float64)
            if how == "summary":
                assert llm.kv.figures.reserved_bytes > 0
                mass = llm.kv.summary_mass(llm.kv.layer(3).figures)
                assert mass.shape == (2,) and (mass > 0).all()
                llm.kv.set_summary(llm.kv.layer(3).figures, None)
                assert llm.kv.summary_mass(llm.kv.layer(3).figures).shape == (0,)
    near = kl(logits["whole"], logits["summary"])
    far = kl(logits["whole"], logits["gone"])
    assert far > 0.01 and near < far / 3


def test_a_group_may_stay(smollm2_path: Path) -> None:
    """A summary that names groups of the one before is the summary of those groups."""
    with open_lossy(smollm2_path, ALL_BYTES, n_ctx=1024) as llm:
        text = llm.tokenize(source_text().encode())[:300]
        llm.eval(text[:256])
        layers = [llm.kv.layer(i).figures for i in range(N_LAYERS)]
        groups = [
            [group for page in (2, 3, 4) for group in identity_summary(llm, i, [page], "q8_0").groups]
            for i in range(N_LAYERS)
        ]
        for layer in layers:
            llm.kv.move(layer.array, [2, 3, 4], "gone")
        logits = {}
        for how in ("new", "stay"):
            for layer, (first, second, third) in zip(layers, groups, strict=True):
                if how == "stay":
                    llm.kv.set_summary(layer, Summary(None, (second, first)))
                    llm.kv.set_summary(layer, Summary(None, (1, third)))
                else:
                    llm.kv.set_summary(layer, Summary(None, (first, third)))
            llm.eval(text[256:257])
            logits[how] = np.array(llm._ctx.get_logits()[: llm.n_vocab()])
            assert llm._ctx.kv_cache_seq_rm(0, 256, 257)
            llm.n_tokens = 256
        np.testing.assert_array_equal(logits["new"], logits["stay"])
        with pytest.raises(NativeError, match="no such group"):
            llm.kv.set_summary(layers[0], Summary(None, (2,)))
        assert len(llm.kv.summary_mass(layers[0])) == 2  # what was there is still there


def test_a_summary_is_paid_for(smollm2_path: Path) -> None:
    budget = 24 * N_LAYERS * PAGE_BYTES
    with open_lossy(smollm2_path, budget, n_ctx=1024) as llm:
        text = llm.tokenize(source_text().encode())[:900]
        for first in range(0, 768, 256):
            llm.eval(text[first : first + 256])
        layer = llm.kv.layer(0).figures
        n_gone = llm.kv.figures.n_gone
        llm.kv.reserve(budget // 8)
        figures = llm.kv.figures
        assert figures.reserved_bytes == budget // 8 and figures.n_gone > n_gone
        llm.kv.set_summary(layer, identity_summary(llm, 0, [22], "f32"))
        assert llm.kv.figures.reserved_bytes == budget // 8
        n = 2048
        big = SummaryCells(
            np.zeros((3, n, 64), np.float32), np.zeros((3, n, 64), np.float32), np.zeros((3, n), np.float32), fmt="f32"
        )
        for i in range(4):
            llm.kv.set_summary(llm.kv.layer(i).figures, Summary(big))
            figures = llm.kv.figures
            assert figures.tiers["host"].held_bytes <= budget
        assert figures.reserved_bytes > 4 * n * 3 * 64 * 2 * 4
        with pytest.raises(BudgetError):
            llm.kv.set_summary(llm.kv.layer(4).figures, Summary(big))
        llm.eval(text[768:800])
        assert llm.kv.figures.peak_host_bytes <= budget
        with pytest.raises(NativeError, match="shape"):
            llm.kv.set_summary(layer, Summary(SummaryCells(big.key[:2], big.value, big.log_count)))
        with pytest.raises(NativeError, match="not a number"):
            llm.kv.set_summary(
                layer, Summary(SummaryCells(big.key[:, :4] * np.nan, big.value[:, :4], big.log_count[:, :4]))
            )


def test_moves_to_nowhere(smollm2_path: Path) -> None:
    with open_lossy(smollm2_path, ALL_BYTES, n_ctx=1024) as llm:
        llm.eval(llm.tokenize(source_text().encode())[:300])
        layer = llm.kv.layers()[0].figures
        keys, values = llm.kv.read_page(layer, 4)
        assert keys.shape == (32, 3, 64) and values.shape == (32, 3, 64)
        assert np.isfinite(keys).all() and np.abs(keys).max() > 0
        llm.kv.move(layer.array, [4], "gone")
        with pytest.raises(NativeError, match="dropped"):
            llm.kv.read_page(layer, 4)
        assert llm.kv.layer(0).page_mean[4] == 0.0
        for page, why in ((0, "protected"), (9, "protected"), (20, "no content")):
            with pytest.raises(NativeError, match=why):
                llm.kv.move(layer.array, [page], "gone")


def test_what_is_least_wanted_leaves_first(smollm2_path: Path) -> None:
    budget = 24 * N_LAYERS * PAGE_BYTES
    with open_lossy(smollm2_path, budget, n_ctx=1024) as llm:
        text = llm.tokenize(source_text().encode())[:900]
        for first in range(0, 512, 256):
            llm.eval(text[first : first + 256])
        scores = np.full(32, 1.0, np.float32)
        scores[5:9] = 0.0
        for mass in llm.kv.layers():
            llm.kv.set_keep(mass.figures.array, scores)
        n_gone = llm.kv.figures.n_gone
        i = 512
        while llm.kv.figures.n_gone < n_gone + 3 * N_LAYERS:
            assert i < len(text)
            llm.eval(text[i : i + 1])
            i += 1
        gone = np.array([llm.kv.pages(k).tier[:16] == 0 for k in range(N_LAYERS)])
        assert gone[:, 5:9].sum() >= 3 * N_LAYERS
        assert not gone[:, 1:5].any() and not gone[:, 9:].any()
        with pytest.raises(NativeError, match="not a number"):
            llm.kv.set_keep(llm.kv.layers()[0].figures.array, np.full(32, np.nan, np.float32))
        with pytest.raises(NativeError, match="32 pages"):
            llm.kv.set_keep(llm.kv.layers()[0].figures.array, np.zeros(3, np.float32))


def test_the_budget_can_shrink_and_grow(smollm2_path: Path) -> None:
    with open_lossy(smollm2_path, ALL_BYTES, n_ctx=1024) as llm:
        text = llm.tokenize(source_text().encode())[:900]
        llm.eval(text[:256])
        llm.eval(text[256:512])
        small = 10 * N_LAYERS * PAGE_BYTES
        llm.kv.set_host_budget(small)
        assert llm.kv.figures.tiers["host"].held_bytes <= small
        assert llm.kv.figures.n_gone >= 5 * N_LAYERS
        with pytest.raises(BudgetError):
            llm.kv.set_host_budget(2 * N_LAYERS * PAGE_BYTES)
        llm.eval(text[512:768])
        assert llm.kv.figures.tiers["host"].held_bytes <= small
        llm.kv.set_host_budget(ALL_BYTES)
        n_gone = llm.kv.figures.n_gone
        llm.eval(text[768:896])
        assert llm.kv.figures.n_gone == n_gone


def test_a_lossy_state_is_refused(smollm2_path: Path) -> None:
    with open_lossy(smollm2_path, ALL_BYTES, n_ctx=1024) as llm:
        llm.eval(llm.tokenize(source_text().encode())[:300])
        llm.save_state()  # nothing is gone yet
        llm.kv.move(llm.kv.layers()[0].figures.array, [4], "gone")
        with pytest.raises(UnsupportedError, match="lossy"):
            llm.save_state()
        llm.eval([1])  # and the model goes on


def test_a_shift_of_positions_keeps_what_is_gone_gone(smollm2_path: Path) -> None:
    with open_lossy(smollm2_path, ALL_BYTES, n_ctx=1024) as llm:
        text = llm.tokenize(source_text().encode())[:300]
        llm.eval(text[:256])
        for mass in llm.kv.layers():
            llm.kv.move(mass.figures.array, [4], "gone")
        assert llm._ctx.kv_cache_seq_rm(0, 32, 64)
        llm._ctx.kv_cache_seq_shift(0, 64, 256, -32)
        llm.n_tokens = 224
        llm.eval(text[256:260])
        assert llm.kv.figures.tiers["none"].n_pages == N_LAYERS


def test_settings_that_cannot_be(smollm2_path: Path) -> None:
    with pytest.raises(SettingsError, match="disk"):
        KVSettings(host=1 << 24, disk=1 << 30, fidelity="lossy")
    with pytest.raises(BudgetError, match="never dropped"), open_lossy(smollm2_path, 2 * N_LAYERS * PAGE_BYTES) as llm:
        llm.eval([1, 2, 3])
    with Llama(str(smollm2_path), n_ctx=512, verbose=False) as llm:
        llm.eval(llm.tokenize(source_text().encode())[:200])
        with pytest.raises(NativeError, match="lossy"):
            llm.kv.move(llm.kv.layers()[0].figures.array, [2], "gone")


def test_what_lies_before_a_window_stays_out_of_it(gemma3_path: Path) -> None:
    """With caches of full size for layers with a window, pages before it may go, and no summary of them may be seen
    instead."""
    common = {
        "n_ctx": 1792,
        "n_batch": 128,
        "n_ubatch": 128,
        "n_threads": 1,
        "n_threads_batch": 1,
        "verbose": False,
        "swa_full": True,
    }
    logits = []
    for settings, memory in (
        (KVSettings(), None),
        (KVSettings(host="9MiB", fidelity="lossy"), MemorySettings(online_share=0.01)),
    ):
        with Llama(str(gemma3_path), **common, kv_settings=settings, kv_memory=memory) as llm:
            prompt = llm.tokenize(source_text().encode())[:1600]
            for first in range(0, len(prompt), 128):
                llm.eval(prompt[first : first + 128])
                if llm.placement is not None:
                    assert llm.placement.settle(60)
            logits.append(np.array(llm._ctx.get_logits()[: llm.n_vocab()], np.float32))
            if settings.fidelity == "lossy":
                assert llm.kv.figures.n_gone > 100
    assert kl(logits[0], logits[1]) < 0.5


@pytest.mark.parametrize(
    ("name", "budget", "n_batch", "expected"),
    [
        ("smollm2_path", "16MiB", 512, 256),  # 22.5 KiB a token: 728 in all, 364 in half
        ("smollm2_path", "2MiB", 512, 64),  # never less
        ("smollm2_path", "16MiB", 48, 48),  # never more than asked for
        ("smollm2_path", "1GiB", 512, 512),
        ("gemma3_path", "17MiB", 512, 256),  # what windows take is no room
    ],
)
def test_a_batch_suits_the_budget(
    name: str, budget: str, n_batch: int, expected: int, request: pytest.FixtureRequest
) -> None:
    shape = shape_of(read_model(request.getfixturevalue(name))[0])
    assert fitting_batch(shape, KVSettings(host=budget, fidelity="lossy"), n_batch) == expected
    assert fitting_batch(shape, KVSettings(host=budget), n_batch) == n_batch
    assert fitting_batch(shape, KVSettings(fidelity="lossy"), n_batch) == n_batch


def test_nothing_is_dropped_that_fewer_bits_can_keep(smollm2_path: Path) -> None:
    """With batches as they are by default, which would otherwise be two thirds of this budget."""
    with Llama(
        str(smollm2_path), n_ctx=1536, n_threads=1, verbose=False, fidelity="lossy", kv_host="16MiB", policy="delta"
    ) as llm:
        assert llm.n_batch == 256
        llm.eval(llm.tokenize(source_text().encode())[:1400])
        assert llm.kv.figures.n_gone == 0
        assert llm.kv.figures.tiers["host"].bytes_by_format["q4_0"] > 0


def test_a_budget_below_the_windows_is_refused(gemma3_path: Path) -> None:
    settings = KVSettings(host="4MiB", fidelity="lossy")
    with Llama(
        str(gemma3_path),
        n_ctx=1024,
        n_batch=64,
        n_ubatch=64,
        n_threads=1,
        verbose=False,
        swa_full=False,
        kv_settings=settings,
    ) as llm:
        text = llm.tokenize(source_text().encode())[:512]
        llm.eval(text[:64])
        with pytest.raises(
            BudgetError, match=r"4,194,304 bytes.*18 layers.*\n.*--kv-host \d+MiB is the least"
        ) as caught:
            llm.eval(text[64:128])
    least = int(str(caught.value).split("--kv-host ")[1].split("MiB")[0])
    settings = KVSettings(host=f"{least}MiB", fidelity="lossy")
    with Llama(
        str(gemma3_path),
        n_ctx=1024,
        n_batch=64,
        n_ubatch=64,
        n_threads=1,
        verbose=False,
        swa_full=False,
        kv_settings=settings,
    ) as llm:
        for first in range(0, 512, 64):
            llm.eval(text[first : first + 64])
        assert llm.kv.figures.peak_host_bytes <= least << 20
