"""The plan: against what stock llama.cpp allocates for the real models, and by hand for the rest."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as api
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cli import main
from kvtier.errors import GgufError, UsageError
from kvtier.formats import BY_NAME, page_bytes
from kvtier.machine import hardware
from kvtier.model.gguf import read_model
from kvtier.model.plan import Machine, PlanRequest, bounded_bytes, command_line, make_plan
from kvtier.model.shape import AttentionLayer, ModelShape, shape_of
from tests.test_gguf import BOOL, I32, STRING, U32, array, gguf, key

GGML = {"f16": 1, "q8_0": 8, "q4_0": 2, "q4_1": 3}
BUFFER = re.compile(r"(KV|model|compute|output) buffer size\s*=\s*([0-9.]+) MiB")
MIB = 1 << 20


@contextmanager
def logged() -> Iterator[list[str]]:
    """What llama.cpp logs meanwhile."""
    lines: list[str] = []
    before, user_data = api.llama_log_callback(), ctypes.c_void_p()
    api.llama_log_get(ctypes.byref(before), ctypes.byref(user_data))
    callback = api.llama_log_callback(lambda _level, line, _user: lines.append(line.decode("utf-8", "replace")))
    api.llama_log_set(callback, ctypes.c_void_p())
    try:
        yield lines
    finally:
        api.llama_log_set(before, user_data)


def measured(lines: list[str]) -> dict[str, float]:
    """Bytes per kind of buffer, summed."""
    sums: dict[str, float] = {}
    for kind, mib in BUFFER.findall("".join(lines)):
        sums[kind] = sums.get(kind, 0.0) + float(mib) * MIB
    return sums


class Stock:
    """A model loaded by stock llama.cpp on the CPU."""

    def __init__(self, path: Path) -> None:
        api.llama_backend_init()
        params = api.llama_model_default_params()
        params.n_gpu_layers = 0
        self._no_devices = (ctypes.c_void_p * 1)(None)  # not ours either, which another test may have loaded
        params.devices = ctypes.cast(self._no_devices, ctypes.c_void_p)
        self.headers = read_model(path)
        with logged() as lines:
            self.model = api.llama_model_load_from_file(str(path).encode(), params)
        self.model_bytes = measured(lines)["model"]

    def buffers(self, request: PlanRequest) -> dict[str, float]:
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = (
            request.n_ctx,
            request.n_batch,
            request.n_ubatch,
            request.n_seq_max,
        )
        params.type_k, params.type_v, params.flash_attn_type = GGML[request.type_k], GGML[request.type_v], 1
        params.swa_full, params.kv_unified, params.n_threads = request.swa_full, request.kv_unified, 1
        with logged() as lines:
            context = api.llama_init_from_model(self.model, params)
        assert context
        api.llama_free(context)
        return measured(lines)


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def stock(request: pytest.FixtureRequest) -> Iterator[Stock]:
    from kvtier.model.names import resolve

    loaded = Stock(resolve(request.param))
    yield loaded
    api.llama_model_free(loaded.model)


REQUESTS = {
    "2k": PlanRequest(2048),
    "not a multiple of 256": PlanRequest(6000),
    "8k, micro-batches of 128": PlanRequest(8192, n_ubatch=128),
    "32k q8_0": PlanRequest(32768, "q8_0", "q8_0"),
    "8k q4_0 / q4_1": PlanRequest(8192, "q4_0", "q4_1"),
    "8k, whole windows": PlanRequest(8192, swa_full=True),
    "8k, 4 sequences": PlanRequest(8192, n_seq_max=4),
    "8k, 4 sequences in one stream": PlanRequest(8192, n_seq_max=4, kv_unified=True),
    "128k: the mask is the largest": PlanRequest(131_072, "q4_0", "q4_0"),
    "smaller than a micro-batch": PlanRequest(256, n_ubatch=1024),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_planned_is_what_llama_cpp_allocates(stock: Stock, name: str) -> None:
    plan = make_plan(stock.headers, REQUESTS[name], cpu_flags=hardware.cpu_flags())
    found = stock.buffers(REQUESTS[name])
    assert plan.chosen.cache_bytes == pytest.approx(
        found["KV"], abs=0.02 * MIB
    )  # the log has two digits, and a line per cache
    assert plan.compute_bytes == pytest.approx(found["compute"], rel=0.05)
    assert plan.output_bytes == pytest.approx(found["output"], abs=0.01 * MIB)
    total = (plan.chosen.cache_bytes or 0) + plan.compute_bytes + plan.output_bytes + plan.weight_bytes
    assert total == pytest.approx(found["KV"] + found["compute"] + found["output"] + stock.model_bytes, rel=0.05)


@pytest.mark.parametrize(
    ("name", "n_ctx", "type_k", "type_v"), [("gemma3-270m", 1024, "f16", "f16"), ("smollm2", 512, "q8_0", "q4_1")]
)
def test_planned_is_what_our_device_holds(name: str, n_ctx: int, type_k: str, type_v: str) -> None:
    from kvtier import Llama
    from kvtier.model.names import resolve

    path = resolve(name)
    plan = make_plan(read_model(path), PlanRequest(n_ctx, type_k, type_v, n_batch=128, n_ubatch=128))
    with Llama(
        str(path),
        n_ctx=n_ctx,
        n_batch=128,
        n_ubatch=128,
        swa_full=False,
        type_k=type_k,
        type_v=type_v,
        n_threads=1,
        n_threads_batch=1,
        verbose=False,
    ) as llm:
        tokens = llm.tokenize(b"The sea was calm and the ship went on. " * 300)[:n_ctx]
        llm.eval(tokens)
        host = llm.kv.figures.tiers["host"]
    assert len(tokens) == n_ctx
    assert (host.n_pages, host.used_bytes) == (plan.n_pages, plan.chosen.page_bytes)


@pytest.mark.parametrize("whole_windows", [False, True])
def test_planned_buffers_are_those_with_our_device(stock: Stock, whole_windows: bool) -> None:
    from kvtier import Llama
    from kvtier.native import runtime

    request = PlanRequest(32768, n_batch=512, swa_full=whole_windows)
    runtime.load()  # takes the log first
    with logged() as lines:
        Llama(str(stock.headers[0].path), n_ctx=32768, n_batch=512, n_ubatch=512, swa_full=whole_windows).close()
    found = {
        name: float(mib) * MIB
        for name, mib in re.findall(r"reserve: +(\w+) compute buffer size = *([0-9.]+) MiB", "".join(lines))
    }
    plan = make_plan(stock.headers, request)
    assert set(found) == {"CPU"}  # our device computes in the CPU backend's memory
    assert plan.compute_bytes == pytest.approx(found["CPU"], rel=0.05)


def test_weights_are_what_llama_cpp_maps(stock: Stock) -> None:
    plan = make_plan(stock.headers, PlanRequest(512), cpu_flags=hardware.cpu_flags())
    assert plan.weight_bytes + plan.repack_bytes == pytest.approx(stock.model_bytes, rel=0.05)


def test_gemma3_layers_slide_as_llama_cpp_says(gemma3_path: Path) -> None:
    shape = shape_of(read_model(gemma3_path)[0])
    assert [layer.index for layer in shape.attention if not layer.slides] == [5, 11, 17]
    assert shape.n_swa == 512


def model(
    tmp_path: Path, arch: str, *, n_layer: int = 6, extra: list[bytes] | None = None, heads_kv: Any = 2, **figures: int
) -> ModelShape:
    """The shape of a made-up model: embedding 256 in 4 heads of 64."""
    values = {
        "block_count": n_layer,
        "context_length": 4096,
        "embedding_length": 256,
        "feed_forward_length": 512,
        "attention.head_count": 4,
        **figures,
    }
    keys = [
        key("general.architecture", STRING, arch),
        *(key(f"{arch}.{name.replace('__', '.')}", U32, value) for name, value in values.items()),
    ]
    keys.append(
        key(f"{arch}.attention.head_count_kv", U32, heads_kv)
        if isinstance(heads_kv, int)
        else array(f"{arch}.attention.head_count_kv", U32, heads_kv)
    )
    path = tmp_path / f"{arch}.gguf"
    path.write_bytes(gguf([*keys, *(extra or [])]))
    return shape_of(read_model(path)[0])


def sliding(shape: ModelShape) -> list[int]:
    return [layer.index for layer in shape.attention if layer.slides]


def test_plain_attention(tmp_path: Path) -> None:
    shape = model(tmp_path, "llama")
    assert shape.attention == tuple(AttentionLayer(i, 2, 64, 64, False) for i in range(6))
    assert (shape.n_swa, shape.n_state_layers, shape.notes) == (0, 0, ())


def test_a_window_that_llama_cpp_ignores(tmp_path: Path) -> None:
    assert sliding(model(tmp_path, "llama", attention__sliding_window=512)) == []
    assert sliding(model(tmp_path, "phi3", attention__sliding_window=512)) == []


@pytest.mark.parametrize(
    ("arch", "full"),
    [
        ("gemma2", [1, 3, 5, 7]),
        ("gpt-oss", [1, 3, 5, 7]),
        ("cohere2", [3, 7]),
        ("cohere2moe", [0, 4]),
        ("olmo2", [3, 7]),
        ("gemma3", [5]),
        ("llama4", [3, 7]),
        ("smallthinker", [0, 4]),
    ],
)
def test_sliding_patterns(tmp_path: Path, arch: str, full: list[int]) -> None:
    shape = model(tmp_path, arch, n_layer=8, attention__sliding_window=512)
    assert sliding(shape) == [i for i in range(8) if i not in full]
    assert shape.n_swa == {"llama4": 8192, "smallthinker": 4096}.get(arch, 512)


def test_sliding_pattern_of_the_file(tmp_path: Path) -> None:
    pattern = [array("gemma3.attention.sliding_window_pattern", BOOL, [1, 0, 0, 1, 1, 0])]
    assert sliding(model(tmp_path, "gemma3", extra=pattern, attention__sliding_window=512)) == [0, 3, 4]
    assert sliding(model(tmp_path, "gemma3", attention__sliding_window=512, attention__sliding_window_pattern=3)) == [
        0,
        1,
        3,
        4,
    ]


def test_heads_per_layer_and_layers_without(tmp_path: Path) -> None:
    shape = model(tmp_path, "deci", heads_kv=[2, 0, 4, 1, 0, 2])
    assert [(layer.index, layer.n_head_kv) for layer in shape.attention] == [(0, 2), (2, 4), (3, 1), (5, 2)]


def test_mla_stores_no_values(tmp_path: Path) -> None:
    shape = model(
        tmp_path,
        "deepseek2",
        heads_kv=1,
        attention__key_length=576,
        attention__value_length=512,
        attention__key_length_mla=192,
        attention__value_length_mla=128,
    )
    assert {(layer.n_head_kv, layer.d_k, layer.d_v) for layer in shape.attention} == {(1, 576, 0)}


def test_hybrid_and_recurrent_models_keep_states(tmp_path: Path) -> None:
    ssm = {"ssm__conv_kernel": 4, "ssm__inner_size": 512, "ssm__state_size": 16, "ssm__group_count": 2}
    state = 3 * (512 + 2 * 2 * 16) + 16 * 512
    jamba = model(tmp_path, "jamba", heads_kv=[0, 0, 2, 0, 0, 2], **ssm)
    assert ([layer.index for layer in jamba.attention], jamba.n_state_layers, jamba.state_items) == (
        [2, 5],
        4,
        4 * state,
    )
    qwen = model(tmp_path, "qwen3next", n_layer=8, **ssm)
    assert ([layer.index for layer in qwen.attention], qwen.n_state_layers) == ([3, 7], 6)
    falcon = model(tmp_path, "falcon-h1", **ssm)
    assert (len(falcon.attention), falcon.n_state_layers) == (6, 6)
    mamba = model(tmp_path, "mamba", heads_kv=0, **ssm)
    assert (mamba.attention, mamba.state_items) == ((), 6 * state)
    rwkv = model(tmp_path, "rwkv7", heads_kv=0, wkv__head_size=64)
    assert rwkv.state_items == 6 * 256 * (2 + 64)
    lfm2 = model(tmp_path, "lfm2", heads_kv=[0, 2, 0, 2, 0, 0], shortconv__l_cache=3)
    assert (len(lfm2.attention), lfm2.state_items) == (2, 4 * 256 * 2)


def test_shared_and_draft_layers_have_no_cache(tmp_path: Path) -> None:
    assert len(model(tmp_path, "llama", nextn_predict_layers=1).attention) == 5
    pattern = [array("gemma4.attention.sliding_window_pattern", BOOL, [1, 1, 0, 1, 1, 0])]
    gemma4 = model(
        tmp_path,
        "gemma4",
        extra=pattern,
        attention__sliding_window=512,
        attention__shared_kv_layers=2,
        attention__key_length=128,
        attention__value_length=128,
        attention__key_length_swa=64,
        attention__value_length_swa=64,
    )
    assert [(layer.slides, layer.d_k) for layer in gemma4.attention] == [
        (True, 64),
        (True, 64),
        (False, 128),
        (True, 64),
    ]


@pytest.mark.parametrize("broken", [{"block_count": 0}, {"block_count": 100_000}, {"embedding_length": 0}])
def test_impossible_figures_are_refused(tmp_path: Path, broken: dict[str, int]) -> None:
    with pytest.raises(GgufError, match="not possible"):
        model(
            tmp_path,
            "llama",
            n_layer=broken.get("block_count", 6),
            **{k: v for k, v in broken.items() if k != "block_count"},
        )
    with pytest.raises(GgufError, match="-1, which is not possible"):
        model(tmp_path, "gemma2", extra=[key("gemma2.attention.sliding_window", I32, -1)])
    with pytest.raises(GgufError, match="3 values for 6 layers"):
        model(tmp_path, "llama", heads_kv=[1, 2, 3])


def test_page_layout_by_hand() -> None:
    # csrc/store/format.h: K 2*64*32 and V 2*64*32 bytes per head, already a multiple of 64
    assert page_bytes(AttentionLayer(0, 3, 64, 64, False), "f16", "f16", 32) == 3 * 2 * 2 * 64 * 32
    # values of 72 channels are padded to 80
    assert page_bytes(AttentionLayer(0, 1, 72, 72, False), "f16", "f16", 32) == 32 * 2 * (72 + 80)
    # per 32 channels and token: 34 bytes in Q8_0, 18 in Q4_0, 20 in Q4_1
    assert page_bytes(AttentionLayer(0, 2, 128, 64, False), "q8_0", "q4_1", 64) == 2 * 64 * (4 * 34 + 2 * 20)
    assert page_bytes(AttentionLayer(0, 1, 576, 0, False), "q4_0", "q4_0", 32) == 32 * 18 * 18
    assert page_bytes(AttentionLayer(0, 1, 80, 80, False), "q8_0", "q8_0", 32) is None


@given(
    n_head=st.integers(1, 9),
    d_k=st.integers(1, 300),
    d_v=st.integers(0, 300),
    sub=st.integers(1, 4),
    types=st.tuples(*[st.sampled_from(sorted(BY_NAME))] * 2),
)
def test_pages_hold_their_rows_with_little_padding(
    n_head: int, d_k: int, d_v: int, sub: int, types: tuple[str, str]
) -> None:
    size = page_bytes(AttentionLayer(0, n_head, d_k, d_v, False), *types, 32 * sub)
    (k_items, k_bytes), (v_items, v_bytes) = ((BY_NAME[t].block_items, BY_NAME[t].block_bytes) for t in types)
    if d_k % k_items or d_v % v_items:
        assert size is None
        return
    assert size is not None and size % 64 == 0
    rows = n_head * 32 * sub * (d_k // k_items * k_bytes + d_v // v_items * v_bytes)
    assert rows <= size <= rows + n_head * (63 + 32 * sub * 15 * v_bytes)


def test_requests_that_make_no_sense(smollm2_path: Path) -> None:
    headers = read_model(smollm2_path)
    for request, reason in (
        (PlanRequest(1024, type_k="q5_1"), "unknown cache type 'q5_1'"),
        (PlanRequest(1 << 40), "not possible"),
        (PlanRequest(1024, page_tokens=48), "pages of 48"),
        (PlanRequest(1024, n_ubatch=0), "at least 1"),
    ):
        with pytest.raises(UsageError, match=reason):
            make_plan(headers, request)


def test_the_models_own_context_and_beyond(smollm2_path: Path) -> None:
    headers = read_model(smollm2_path)
    assert make_plan(headers, PlanRequest()).n_ctx == 8192
    assert make_plan(headers, PlanRequest()).warnings == ()
    assert "--rope-scale 4" in make_plan(headers, PlanRequest(32768)).warnings[0]


def test_no_attention_layer(tmp_path: Path) -> None:
    model(tmp_path, "mamba", heads_kv=0, ssm__conv_kernel=4, ssm__inner_size=512, ssm__state_size=16)
    plan = make_plan(read_model(tmp_path / "mamba.gguf"), PlanRequest(4096))
    assert plan.chosen.cache_bytes == 0
    assert any("no attention layer" in warning for warning in plan.warnings)


MACHINE = Machine(16 << 30, 16 << 30, Path("/pages"), 100 << 30)


def test_what_fits_where(smollm2_path: Path) -> None:
    headers = read_model(smollm2_path)
    base = make_plan(headers, PlanRequest(32768), MACHINE)
    in_ram, bounded = base.options
    assert (in_ram.kv_host, in_ram.kv_disk, in_ram.type_k) == (None, None, "f16")
    assert command_line(["smollm2"], base, in_ram) == "kvtier run smollm2 -c 32768"
    assert command_line(["smollm2"], base, bounded) == "kvtier run smollm2 -c 32768 --fidelity bounded"
    (short,) = make_plan(headers, PlanRequest(4096), MACHINE).options
    assert short.fidelity == "exact", "nothing is left out where it gains nothing"

    kv = base.chosen.page_bytes or 0
    tight = replace(MACHINE, ram_available_bytes=base.fixed_bytes + (512 << 20) + kv * 6 // 10)
    plan = make_plan(headers, PlanRequest(32768), tight)
    smaller, bounded, split, lossy = plan.options
    assert (bounded.fidelity, bounded.kv_host, bounded.kv_disk) == ("bounded", None, None)
    assert (
        (lossy.fidelity, lossy.kv_disk) == ("lossy", None) and lossy.kv_host == split.kv_host and "53 %" in lossy.text
    )
    assert (smaller.type_k, smaller.kv_disk) == ("q8_0", None)
    assert split.type_k == "f16" and split.kv_host is not None and split.kv_disk is not None
    assert split.kv_host <= kv * 6 // 10
    assert split.kv_host + split.kv_disk >= kv, "both budgets together must hold the cache"
    assert "--kv-disk" in command_line(["m x.gguf"], plan, split, Path("/a b")) and "'m x.gguf'" in command_line(
        ["m x.gguf"], plan, split
    )
    by_type = {cache.type_k: cache.n_ctx_in_ram or 0 for cache in plan.caches}
    assert by_type["f16"] < 32768 <= by_type["q8_0"] <= by_type["q4_1"] <= by_type["q4_0"]

    nothing = make_plan(headers, PlanRequest(32768), replace(MACHINE, ram_available_bytes=64 << 20))
    assert nothing.options == () and any("more than the memory" in warning for warning in nothing.warnings)
    no_disk = make_plan(headers, PlanRequest(32768), replace(tight, disk_free_bytes=1 << 20))
    assert [option.kv_disk for option in no_disk.options] == [None, None, None]


def test_what_fits_where_little_fits(smollm2_path: Path) -> None:
    headers = read_model(smollm2_path)
    base = make_plan(headers, PlanRequest(32768), MACHINE)
    kv, bounded = base.chosen.page_bytes or 0, base.bounded
    assert bounded is not None and bounded.always_bytes < kv * 3 // 10

    def options(n_bytes: int) -> dict[str, tuple[int | None, int | None]]:
        plan = make_plan(
            headers, PlanRequest(32768), replace(MACHINE, ram_available_bytes=base.fixed_bytes + (512 << 20) + n_bytes)
        )
        return {
            f"{way.fidelity} {way.type_k}": (way.kv_host, way.kv_disk)
            for way in plan.options
            if way.kv_host is not None
        }

    host, disk = options(kv * 35 // 100)["bounded q8_0"]
    assert (
        host is not None
        and disk is not None
        and bounded.always_bytes < host < bounded.always_bytes + bounded.page_bytes <= host + disk
    )
    assert set(options(kv * 35 // 100)) == {"exact f16", "bounded q8_0", "lossy f16"}
    assert set(options(kv * 25 // 100)) == {"exact f16", "lossy f16"}, "the keys alone are more"
    assert set(options(kv * 15 // 100)) == {"exact f16"}, "what lossy does with less than a fifth is not known"


@pytest.mark.parametrize(("name", "n_ctx"), [("smollm2", 512), ("gemma3-270m", 1024)])
def test_planned_is_what_a_bounded_cache_holds(name: str, n_ctx: int) -> None:
    from kvtier import Llama
    from kvtier.model.names import resolve

    path = resolve(name)
    plan = make_plan(read_model(path), PlanRequest(n_ctx, n_batch=128, n_ubatch=128))
    with Llama(
        str(path),
        n_ctx=n_ctx,
        n_batch=128,
        n_ubatch=128,
        swa_full=False,
        n_threads=1,
        n_threads_batch=1,
        fidelity="bounded",
        verbose=False,
    ) as llm:
        tokens = llm.tokenize(b"The sea was calm and the ship went on. " * 300)[:n_ctx]
        llm.eval(tokens)
        figures = llm.kv.figures
    assert plan.bounded is not None and len(tokens) == n_ctx
    assert figures.reserved_bytes == plan.bounded.always_bytes
    assert figures.tiers["host"].used_bytes == plan.bounded.always_bytes + plan.bounded.page_bytes


def test_no_bounded_cache_where_head_sizes_forbid_it(tmp_path: Path) -> None:
    assert bounded_bytes(model(tmp_path, "llama"), PlanRequest(512)) is not None
    assert bounded_bytes(model(tmp_path, "llama", embedding_length=240), PlanRequest(512)) is None  # 60 channels
    assert (
        bounded_bytes(
            model(
                tmp_path,
                "deepseek2",
                heads_kv=1,
                attention__key_length=576,
                attention__value_length=512,
                attention__key_length_mla=192,
                attention__value_length_mla=128,
            ),
            PlanRequest(512),
        )
        is None
    )


def test_longest_context_is_the_edge(smollm2_path: Path) -> None:
    headers = read_model(smollm2_path)
    machine = replace(MACHINE, ram_available_bytes=1 << 30)
    longest = make_plan(headers, PlanRequest(512), machine).caches[0].n_ctx_in_ram or 0
    assert longest > 512
    assert make_plan(headers, PlanRequest(longest), machine).options[0].type_k == "f16"
    assert make_plan(headers, PlanRequest(longest + 256), machine).options[0].type_k != "f16"


def test_command_line_program(smollm2_path: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    shown = run(main, ["plan", str(smollm2_path), "--ctx", "32k", "--kv-dir", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "720.0 MiB" in shown.stdout and "382.5 MiB" in shown.stdout and "kvtier run" in shown.stdout
    assert "8,192" in shown.stdout and "--rope-scaling" in shown.stderr
    assert all(
        len(line) <= 80 for line in shown.stdout.splitlines() if "kvtier run" not in line and str(tmp_path) not in line
    )

    assert run(main, ["plan", "smollm2"]).stdout.startswith("smollm2 (")  # and then the file's own name for itself

    told = run(
        main,
        ["plan", str(smollm2_path), "-c", "1.5k", "-ctk", "q8_0", "-ctv", "q8_0", "--json"],
        env={"KVTIER_UBATCH_SIZE": "64"},
    )
    out = json.loads(told.stdout)
    assert (out["n_ctx"], out["request"]["n_ubatch"], out["chosen"]["type_k"]) == (1536, 64, "q8_0")
    assert out["chosen"]["cache_bytes"] == 1536 * 30 * 2 * 3 * 2 * 34

    for args, text in (
        (["plan"], "no model is given"),
        (["plan", "smolm2"], "smollm2"),
        (["plan", str(smollm2_path), "-c", "24,3"], "comma"),
        (["plan", str(smollm2_path), "-c", "-1"], "negative"),
        (["plan", str(smollm2_path), "-c", ""], "empty"),
        (["plan", str(smollm2_path), "-ctk", "q9"], "q9"),
        (["plan", str(smollm2_path), "--kv-page-tokens", "40"], "pages of 40"),
    ):
        bad = run(main, args)
        assert bad.exit_code == 2 and text in bad.stderr, (args, bad.output)
    (tmp_path / "cut.gguf").write_bytes(smollm2_path.read_bytes()[:1000])
    bad = run(main, ["plan", str(tmp_path / "cut.gguf")])
    assert bad.exit_code == 3 and "truncated" in bad.stderr


def test_damaged_figures_raise_only_our_errors(smollm2_path: Path, tmp_path: Path) -> None:
    """Every 32-bit number of the real header, one after the other set to extremes."""
    names = [
        b"llama.block_count",
        b"llama.context_length",
        b"llama.embedding_length",
        b"llama.attention.head_count",
        b"llama.attention.head_count_kv",
        b"llama.feed_forward_length",
    ]
    path = tmp_path / "changed.gguf"
    shutil.copyfile(smollm2_path, path)
    raw = path.read_bytes()[:1500]
    for name in names:
        at = raw.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4
        for number in (0, 1, 7, 513, 1 << 20, (1 << 31) - 1, (1 << 32) - 1):
            patch(path, at, struct.pack("<I", number))
            try:
                make_plan(read_model(path), PlanRequest(4096), MACHINE)
            except (GgufError, UsageError) as err:
                assert err.hint
        patch(path, at, raw[at : at + 4])


def patch(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)
