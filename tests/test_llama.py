"""kvtier.Llama is a llama_cpp.Llama: its ways of making text, its figures, and what it leaves behind."""

from __future__ import annotations

import gc
import json
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from kvtier import KVSettings, Llama, MemorySettings, errors
from kvtier.figures import TIERS
from kvtier.formats import FORMATS

from .texts import source_text

N_CTX = 1024
SMALL = "6MiB"  # of RAM: less than the cache of 500 tokens of this model in f16 takes


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[Llama]:
    with Llama(str(smollm2_path), n_ctx=N_CTX, n_threads=2, verbose=False) as model:
        yield model


def _tiered(path: Path, folder: Path, **more: Any) -> Llama:
    return Llama(
        str(path),
        n_ctx=N_CTX,
        n_threads=2,
        verbose=False,
        **{"kv_host": SMALL, "kv_disk": "1GiB", "kv_dir": folder, **more},
    )


def _empty(llm: Llama) -> None:
    llm.reset()  # type: ignore[no-untyped-call]
    llm._ctx.kv_cache_clear()


def _tokens(llm: llama_cpp.Llama, n: int) -> list[int]:
    return llm.tokenize(source_text().encode())[:n]


def test_completion_chat_stream_grammar(llm: Llama) -> None:
    answer = llm("The capital of France is", max_tokens=4, temperature=0)
    assert "Paris" in answer["choices"][0]["text"]  # type: ignore[index]
    streamed = llm("The capital of France is", max_tokens=4, temperature=0, stream=True)
    text = "".join(chunk["choices"][0]["text"] for chunk in streamed)  # type: ignore[index]
    assert text == answer["choices"][0]["text"]
    question: Any = [{"role": "user", "content": "Write the word banana three times."}]
    chat = llm.create_chat_completion(question, max_tokens=16, temperature=0)
    assert "banana" in chat["choices"][0]["message"]["content"].lower()  # type: ignore[index,union-attr]
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
    grammar = llama_cpp.LlamaGrammar.from_json_schema(json.dumps(schema), verbose=False)
    out = llm("The capital of France as JSON:", max_tokens=24, temperature=0, grammar=grammar)
    assert isinstance(json.loads(out["choices"][0]["text"])["city"], str)  # type: ignore[index]


def test_embeddings(smollm2_path: Path) -> None:
    with Llama(str(smollm2_path), n_ctx=256, embedding=True, verbose=False) as ours:
        vector = np.array(ours.embed("the cat sat on the mat"))
    stock = llama_cpp.Llama(str(smollm2_path), n_ctx=256, embedding=True, verbose=False, flash_attn=True)
    expected = np.array(stock.embed("the cat sat on the mat"))
    stock.close()
    assert vector.shape == expected.shape
    assert np.dot(vector.ravel(), expected.ravel()) / (np.linalg.norm(vector) * np.linalg.norm(expected)) > 0.999


def test_figures_add_up(llm: Llama) -> None:
    _empty(llm)
    llm.eval(_tokens(llm, 100))
    figures = llm.kv.figures
    host = figures.tiers["host"]
    assert set(figures.tiers) == set(TIERS)
    assert host.n_pages == llm.kv.n_layers * -(-100 // llm.kv.layer(0).figures.page_tokens)
    assert host.used_bytes <= host.held_bytes <= figures.peak_host_bytes
    assert host.bytes_by_format["f16"] == sum(host.bytes_by_format.values()) > 0
    assert host.budget_bytes is None
    assert figures.disk_reads == figures.disk_writes == figures.tiers["disk"].n_pages == 0
    assert figures.n_attention >= llm.kv.n_layers
    assert figures.n_fallback == 0
    assert llm.kv.last_error is None


def test_layers_are_the_model_s(llm: Llama) -> None:
    _empty(llm)
    llm.eval(_tokens(llm, 40))
    layers = [mass.figures for mass in llm.kv.layers()]
    n_layers = int(llm.metadata["llama.block_count"])
    assert [layer.layer for layer in layers] == list(range(n_layers))
    for layer in layers:
        assert layer.n_head_kv == int(llm.metadata["llama.attention.head_count_kv"])
        assert (
            layer.d_k
            == layer.d_v
            == int(llm.metadata["llama.embedding_length"]) // int(llm.metadata["llama.attention.head_count"])
        )
        assert layer.n_pages * layer.page_tokens >= N_CTX
    pages = llm.kv.pages(0)
    held = pages.tier == TIERS.index("host")
    assert held.sum() == -(-40 // layers[0].page_tokens)
    assert set(pages.format_k[held]) == {FORMATS.index("f16")}
    assert pages.last_use[held].max() > 0


def test_attention_mass_is_a_view_that_moves(llm: Llama) -> None:
    _empty(llm)
    llm.eval(_tokens(llm, 70))
    mass = llm.kv.layer(0)
    assert mass.token_mean.shape == mass.token_max.shape == (mass.figures.n_pages, mass.figures.page_tokens)
    assert mass.page_mean.shape == mass.page_max.shape == (mass.figures.n_pages,)
    assert not mass.token_mean.flags.owndata and not mass.token_mean.flags.writeable
    assert np.shares_memory(mass.token_mean, llm.kv.layer(0).token_mean)
    before = mass.token_mean.copy()
    steps = mass.figures.n_mass_steps
    llm.eval([before.size % 100 + 1])
    assert llm.kv.layer(0).figures.n_mass_steps > steps
    assert not np.array_equal(mass.token_mean, before)
    assert np.all(mass.token_max.ravel()[:71] >= 0) and np.all(mass.token_max.ravel() <= 1 + 1e-5)
    assert np.all(mass.token_mean.ravel()[71:] == 0)  # nothing was ever there
    with pytest.raises(ValueError, match="read-only"):
        mass.token_mean[0, 0] = 1


def test_closing_waits_for_arrays(smollm2_path: Path, tmp_path: Path) -> None:
    model = _tiered(smollm2_path, tmp_path)
    model.eval(_tokens(model, 60))
    part = model.kv.layer(0).token_mean[0, :8]  # a slice of a view keeps it all
    kept = part.copy()
    model.close()
    gc.collect()
    assert np.array_equal(part, kept)
    assert len(list(tmp_path.iterdir())) == 1
    del part
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(errors.NativeError, match="closed"):
        _ = model.kv.figures


def test_closing_leaves_nothing(smollm2_path: Path, tmp_path: Path) -> None:
    model = _tiered(smollm2_path, tmp_path)
    model.eval(_tokens(model, 300))
    figures = model.kv.figures
    assert figures.tiers["disk"].n_pages > 0 and figures.n_evicted > 0 and figures.disk_write_bytes > 0
    assert figures.peak_host_bytes <= 6 << 20
    assert len(list(tmp_path.iterdir())) == 1
    model.close()
    model.close()
    assert list(tmp_path.iterdir()) == []


def test_dropping_is_closing(smollm2_path: Path, tmp_path: Path) -> None:
    model = _tiered(smollm2_path, tmp_path)
    model.eval(_tokens(model, 10))
    del model
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_two_models_share_a_directory(smollm2_path: Path, tmp_path: Path) -> None:
    with _tiered(smollm2_path, tmp_path) as one, _tiered(smollm2_path, tmp_path) as two:
        assert len(list(tmp_path.iterdir())) == 2
        for model in (one, two):
            model.eval(_tokens(model, 30))
        assert one.kv.figures.n_attention == two.kv.figures.n_attention > 0
        one.close()
        assert len(list(tmp_path.iterdir())) == 1
        two.eval([1])
    assert list(tmp_path.iterdir()) == []


def test_no_room_and_no_disk(smollm2_path: Path) -> None:
    with Llama(str(smollm2_path), n_ctx=N_CTX, n_threads=2, verbose=False, kv_host=SMALL) as model:
        with pytest.raises(errors.BudgetError, match=r"layer \d+, page \d+") as caught:
            model.eval(_tokens(model, 900))
        assert "--kv-host" in str(caught.value) and caught.value.exit_code == 5
        last = model.kv.last_error
        assert isinstance(last, errors.BudgetError) and last.message == caught.value.message


def test_fidelity_is_an_argument_like_any(smollm2_path: Path) -> None:
    with Llama(
        str(smollm2_path), n_ctx=512, n_threads=1, verbose=False, fidelity="bounded:0.1", kv_read_budget=200
    ) as model:
        model.eval(list(range(5, 300)))
        assert (model.kv.settings.fidelity, model.kv.settings.read_budget) == ("bounded:0.1", 200)
        for token in range(3):
            model.eval([token + 7])
        assert 0 < model.kv.figures.tokens_read < model.kv.figures.tokens_seen


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"kv_disk": "1GiB"},
        {"fidelity": "lossy"},
        {"fidelity": "bounded"},
        {"fidelity": "bounded", "kv_disk": "1GiB", "type_v": "f16"},
    ],
)
def test_the_least_budget_in_the_error_is_enough(smollm2_path: Path, tmp_path: Path, arguments: dict[str, Any]) -> None:
    folder = {"kv_dir": tmp_path} if "kv_disk" in arguments else {}

    def first_step(kv_host: str) -> None:
        with Llama(
            str(smollm2_path), n_ctx=512, n_threads=1, verbose=False, kv_host=kv_host, **arguments, **folder
        ) as model:
            model.eval([1])

    with pytest.raises(errors.BudgetError) as found:
        first_step("128KiB")
    least = re.search(r"all 30 layers of this cache need (\d+) KiB at the very least", found.value.message)
    assert least is not None, found.value.message
    first_step(f"{least[1]}KiB")
    with pytest.raises(errors.BudgetError):
        first_step(f"{int(least[1]) * 9 // 10}KiB")


@pytest.mark.parametrize(
    "policy", [5, object(), type("Nameless", (), {"plan": lambda *_: None})(), type("Planless", (), {"name": "x"})()]
)
def test_an_object_that_is_no_policy(smollm2_path: Path, policy: Any) -> None:
    with pytest.raises(errors.SettingsError, match="which is no policy"):
        Llama(str(smollm2_path), policy=policy)


def test_less_than_a_page_per_layer(smollm2_path: Path) -> None:
    with (
        pytest.raises(errors.BudgetError, match="one page per layer"),
        Llama(str(smollm2_path), n_ctx=N_CTX, verbose=False, kv_host="64KiB") as model,
    ):
        model.eval([1])


def test_a_full_disk_tier(smollm2_path: Path, tmp_path: Path) -> None:
    with (
        _tiered(smollm2_path, tmp_path, kv_disk="2MiB") as model,
        pytest.raises(errors.DiskFullError, match=r"disk tier .*2097152"),
    ):
        model.eval(_tokens(model, 900))
    assert list(tmp_path.iterdir()) == []


def test_changed_bytes_are_never_text(smollm2_path: Path, tmp_path: Path) -> None:
    with _tiered(smollm2_path, tmp_path) as model:
        model.eval(_tokens(model, 350))
        (file,) = tmp_path.iterdir()
        with file.open("r+b") as raw:
            for off_bytes in range(0, file.stat().st_size, 1024):
                raw.seek(off_bytes)
                raw.write(b"\xa5" * 16)
        with pytest.raises(errors.ChecksumError, match=r"layer \d+, page \d+ .*disk tier"):
            for _ in range(3):
                model.eval([5])


@pytest.mark.parametrize(("folder", "part"), [("missing", "missing"), ("file", "not a directory")])
def test_a_directory_that_cannot_be_used(smollm2_path: Path, tmp_path: Path, folder: str, part: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(errors.DirectoryError, match=part) as caught:
        _tiered(smollm2_path, tmp_path / folder)
    assert str(tmp_path / folder) in str(caught.value)


def test_more_than_the_context_holds(llm: Llama) -> None:
    _empty(llm)
    with pytest.raises(errors.ContextLengthError) as caught:
        llm.eval([1] * (N_CTX + 1))
    assert (caught.value.n_tokens, caught.value.n_ctx) == (N_CTX + 1, N_CTX)
    assert "1,025" in str(caught.value) and "1,024" in str(caught.value)


def test_a_context_that_llama_rounds_up_is_usable_to_its_end(smollm2_path: Path) -> None:
    with Llama(str(smollm2_path), n_ctx=100, n_batch=100, n_threads=2, verbose=False) as model:
        model.eval(_tokens(model, model.n_ctx()))
        assert model.n_tokens == model.n_ctx() >= 100


def test_arguments_that_cannot_be(smollm2_path: Path, tmp_path: Path) -> None:
    path = str(smollm2_path)
    with pytest.raises(errors.SettingsError, match="offload_kqv"):
        Llama(path, offload_kqv=False)
    with pytest.raises(errors.SettingsError, match="n_ctx is -1"):
        Llama(path, n_ctx=-1)
    with pytest.raises(errors.SettingsError, match="type_k is 12"):
        Llama(path, type_k=12)
    with pytest.raises(errors.SettingsError, match="'q5_1'"):
        Llama(path, type_v="q5_1")
    for wrong, meant in (
        ("kv_hosts", "kv_host"),
        ("kv_fidelity", "fidelity"),
        ("n_thread", "n_threads"),
    ):  # llama_cpp.Llama takes anything
        with pytest.raises(errors.SettingsError, match=f"there is no argument {wrong}") as found:
            Llama(path, **{wrong: "exact"})
        assert f"Did you mean {meant}?" in str(found.value)
    with pytest.raises(errors.SettingsError, match="eps|EPS"):
        Llama(path, fidelity="bounded:2")
    with pytest.raises(errors.SettingsError, match="an exact step reads everything"):
        Llama(path, kv_read_budget=100)
    with pytest.raises(errors.SettingsError, match="kv_settings and fidelity"):
        Llama(path, fidelity="exact", kv_settings=KVSettings())
    with pytest.raises(errors.SettingsError, match="kv_settings and host"):
        Llama(path, kv_host=1 << 30, kv_settings=KVSettings())
    with pytest.raises(errors.GgufError, match="no such file"):
        Llama(str(tmp_path / "none.gguf"))
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(errors.GgufError, match="empty"):
        Llama(str(tmp_path / "empty.gguf"))


def test_what_llama_cpp_refuses_is_explained(smollm2_path: Path, tmp_path: Path) -> None:
    raw = bytearray(smollm2_path.read_bytes())
    at = raw.index(b"general.architecture") + len(b"general.architecture") + 4 + 8
    assert raw[at : at + 5] == b"llama"
    raw[at : at + 5] = b"lamma"
    other = tmp_path / "other.gguf"
    other.write_bytes(raw)
    with pytest.raises(errors.LlamaError, match="lamma") as caught:
        Llama(str(other), verbose=False)
    assert caught.value.exit_code == 12 and caught.value.log


def test_formats_per_tier(smollm2_path: Path, tmp_path: Path) -> None:
    with _tiered(smollm2_path, tmp_path, kv_host="3MiB", type_k="q8_0", type_v=8, kv_disk_type_v="q4_0") as model:
        model.eval(_tokens(model, 350))
        tiers = model.kv.figures.tiers
        assert tiers["host"].bytes_by_format["q8_0"] > 0  # beside pages that came back in the disk's formats
        assert tiers["host"].bytes_by_format["f16"] == 0
        assert {name for name, n in tiers["disk"].bytes_by_format.items() if n} == {"q8_0", "q4_0"}
        assert model.kv.settings.disk_type_k == "q8_0"


def test_offload_hooks_see_every_page(smollm2_path: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int, str, int, str, str]] = []
    lock = threading.Lock()

    def hook(which: str) -> Any:
        def call(array: int, page: int, layer: int, tier: str, data: memoryview, fmt_k: str, fmt_v: str) -> None:
            with lock:
                seen.append((which, array, page, tier, len(data), fmt_k, fmt_v))

        return call

    with _tiered(smollm2_path, tmp_path) as model:
        model.kv.on_offload(hook("leave"), hook("return"))
        model.eval(_tokens(model, 300))
        model.kv.on_offload()
        n_evicted = model.kv.figures.n_evicted
        left = [entry for entry in seen if entry[0] == "leave"]
        assert len(left) >= n_evicted > 0
        assert {entry[3:] for entry in left} == {("disk", left[0][4], "f16", "f16")}
        array, page = left[-1][1:3]
        n_before = len(seen)
        model.eval([3])
        assert len(seen) == n_before  # nobody is told any more
        assert model.kv.pages(0).tier[0] == TIERS.index("host")  # the first page never leaves
        assert 0 <= array < model.kv.n_layers and page >= 1


def test_what_is_set_aside_is_no_negative_number(smollm2_path: Path) -> None:
    with Llama(str(smollm2_path), n_ctx=256, verbose=False, fidelity="bounded") as model:
        model.eval([5, 6, 7])
        keys = model.kv.figures.reserved_bytes
        with pytest.raises(errors.NativeError, match="cannot be set aside"):
            model.kv.reserve(2**64 - 4096)
        assert model.kv.figures.reserved_bytes == keys > 0


def test_offload_hooks_cannot_ask_for_layers(smollm2_path: Path, tmp_path: Path) -> None:
    answers: list[str] = []
    with _tiered(smollm2_path, tmp_path) as model:
        model.eval(_tokens(model, 40))
        layer = model.kv.layer(0).figures
        calls: list[Callable[[], object]] = [
            lambda: model.kv.summary_mass(layer),
            lambda: model.kv.read_page(layer, 0),
            lambda: model.kv.set_keep(layer.array, np.zeros(layer.n_pages, np.float32)),
            lambda: model.kv.set_summary(layer, None),
        ]

        def ask(*_: Any) -> None:  # another thread may be freeing that layer's cache
            for call in calls:
                try:
                    call()
                    answers.append("allowed")
                except errors.NativeError as error:
                    answers.append(str(error))

        model.kv.on_offload(ask)
        model.eval(_tokens(model, 300))
        model.kv.on_offload()
        calls[0]()
    assert answers
    assert all("offload callback" in answer for answer in answers)


def test_pages_move_on_request(smollm2_path: Path, tmp_path: Path) -> None:
    with _tiered(smollm2_path, tmp_path, kv_host=None) as model:
        model.eval(_tokens(model, 300))
        array = model.kv.layer(0).figures.array
        assert model.kv.move(array, [2, 3], "disk") == 2
        assert list(model.kv.pages(0).tier[1:5]) == [TIERS.index(name) for name in ("host", "disk", "disk", "host")]
        assert model.kv.move(array, [3], "host") == 1
        assert model.kv.pages(0).tier[3] == TIERS.index("host")
        with pytest.raises(errors.NativeError):
            model.kv.move(array, [0], "remote")


def test_stock_models_elsewhere_stay_stock(smollm2_path: Path) -> None:
    """A plain llama_cpp.Llama, made in another thread while ours loads and after it, gets no device of ours."""
    made: list[bool] = []

    def make_stock() -> None:
        stock = llama_cpp.Llama(str(smollm2_path), n_ctx=256, verbose=False)
        made.append(stock.model_params.devices is None)
        stock.close()

    thread = threading.Thread(target=make_stock)
    thread.start()
    with Llama(str(smollm2_path), n_ctx=256, verbose=False) as model:
        thread.join()
        make_stock()
        assert made == [True, True]
        assert model.model_params.devices is not None


def test_a_lossy_copy_through_pickle(smollm2_path: Path) -> None:
    memory = MemorySettings(compress=False)
    with Llama(
        str(smollm2_path), n_ctx=256, verbose=False, kv_host="64MiB", fidelity="lossy", kv_memory=memory
    ) as model:
        state = pickle.loads(
            pickle.dumps({name: value for name, value in model.__getstate__().items() if name != "chat_handler"})
        )
    assert (state["kv_memory"], state["policy"]) == (memory, "adaptive")


def test_a_copy_through_pickle(smollm2_path: Path) -> None:
    with Llama(str(smollm2_path), n_ctx=256, verbose=False, kv_host="64MiB", type_k="q8_0", type_v="q8_0") as model:
        state = model.__getstate__()
    again = pickle.loads(pickle.dumps({name: value for name, value in state.items() if name != "chat_handler"}))
    with Llama(**again) as copy:
        assert copy.kv.settings == model.kv.settings
        copy.eval([1, 2, 3])
        assert copy.kv.figures.tiers["host"].bytes_by_format["q8_0"] > 0
