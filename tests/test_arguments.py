"""What becomes of each argument of llama_cpp.Llama: every one has a decision, and what is not done says why."""

from __future__ import annotations

import inspect
import math
import re
import warnings
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from kvtier import Llama, errors
from kvtier.engine import arguments

ROOT = Path(__file__).resolve().parents[1]
SIGNATURE = inspect.signature(llama_cpp.Llama.__init__).parameters
PARAMETERS = [name for name, p in SIGNATURE.items() if name != "self" and p.kind is not inspect.Parameter.VAR_KEYWORD]
OWN = ("model_path", "type_k", "type_v", "lora_path")  # read by modules of their own

# Values that are asked for and not done, and values that no argument of that name can have.
NOT_DONE: dict[str, list[Any]] = {
    "n_gpu_layers": [0, 1, 29],
    "split_mode": [2, 3],
    "main_gpu": [3, -1],
    "tensor_split": [[0.5, 0.5], [1.0], ["a", "b"], 7],
    "offload_kqv": [False, 0],
    "flash_attn": [False],
    "op_offload": [True],
    "lora_base": ["base.gguf"],
}
SWITCHES = ["vocab_only", "use_mmap", "use_mlock", "logits_all", "embedding"]
SWITCHES += ["offload_kqv", "flash_attn", "no_perf", "spm_infill", "verbose"]
IMPOSSIBLE: dict[str, list[Any]] = {
    "n_gpu_layers": ["all", 1.5, 1 << 40, None, True],
    "split_mode": [-1, 4, "layer", None],
    "main_gpu": ["0", 2**31, None],
    "kv_overrides": [
        *([("a", 1)], "a=1", {"a": None}, {"a": [1]}, {"a": 1 << 63}, {1: 1}, {"": 1}, {"k" * 128: 1}),
        *({"a": "v" * 128}, {"a": math.nan}, {"a\0b": 1}, {"a": "x\0y"}),
    ],
    "seed": [-(2**70), -2, 1 << 32, "1", 0.5],
    "n_ctx": ["abc", -1, 1 << 31, 1e3, True, None],
    "n_batch": [0, -512, "512", 512.0, None],
    "n_ubatch": [0, -1, None, [1]],
    "n_threads": [-5, 513, "two", 1.0],
    "n_threads_batch": [-1, 10**9],
    "rope_scaling_type": [-2, 4, "yarn", 1.0],
    "pooling_type": [5, -2, None, "mean"],
    "attention_type": [2, -2, None],
    "rope_freq_base": [math.nan, math.inf, -1.0, 1e39, "10000", None, 10**400],
    "rope_freq_scale": [math.nan, -0.5, 1j],
    "yarn_orig_ctx": [-1, 1 << 31, 0.5],
    "last_n_tokens_size": [-2, 1 << 31, "64"],
    "lora_scale": [math.nan, math.inf, "1", None],
    "numa": [5, -1, "on", None],
    "chat_format": [7, b"chatml", "no-such-format"],
    "chat_handler": ["llava", 7],
    "draft_model": [42, "draft.gguf"],
    "tokenizer": ["tokenizer.json", 7, object()],
    "op_offload": ["no", 2],
    "swa_full": ["yes", 2],
    **{f"yarn_{name}": [math.nan, -math.inf, "1"] for name in ("ext_factor", "attn_factor", "beta_fast", "beta_slow")},
}
for switch in SWITCHES:
    IMPOSSIBLE.setdefault(switch, []).extend(["yes", 2, None, 0.0])


def test_every_parameter_has_a_decision() -> None:
    assert set(arguments.DECISIONS) == set(PARAMETERS)
    for name, decision in arguments.DECISIONS.items():
        assert (decision.outcome == "honoured") == (name not in NOT_DONE), name
        assert bool(decision.why) == (name in NOT_DONE), name
        assert bool(decision.way_out) == (decision.outcome == "refused"), name


def test_every_parameter_has_impossible_values_here() -> None:
    assert set(IMPOSSIBLE) | set(NOT_DONE) | set(OWN) == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_defaults_of_upstream_that_are_done_pass_as_they_are(name: str) -> None:
    default = SIGNATURE[name].default
    if name not in ("model_path", *NOT_DONE):
        assert arguments.read_values({name: default}) == {name: default}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in IMPOSSIBLE for value in IMPOSSIBLE[name]])
def test_impossible_values(smollm2_path: Path, name: str, value: Any) -> None:
    with pytest.raises(errors.SettingsError, match=re.escape(name)) as caught:
        Llama(str(smollm2_path), verbose=False, **{name: value}) if name != "verbose" else Llama(
            str(smollm2_path), verbose=value
        )
    assert caught.value.hint.startswith("Take ")


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in NOT_DONE for value in NOT_DONE[name]])
def test_what_is_not_done(smollm2_path: Path, name: str, value: Any) -> None:
    decision = arguments.DECISIONS[name]
    if decision.outcome == "refused":
        with pytest.raises(errors.SettingsError, match=name) as refused:
            Llama(str(smollm2_path), n_ctx=256, verbose=False, **{name: value})
        assert decision.why in refused.value.message and refused.value.hint == decision.way_out
    else:
        with (
            pytest.warns(errors.ArgumentWarning, match=name) as warned,
            Llama(str(smollm2_path), n_ctx=256, verbose=False, **{name: value}) as model,
        ):
            model.eval([1, 2, 3])
            assert model.kv.figures.n_attention > 0
        (warning,) = warned
        assert decision.why in str(warning.message) and warning.filename == __file__


@pytest.mark.parametrize(
    "given",
    [
        {"n_gpu_layers": -1},
        {"n_gpu_layers": 99},
        {"split_mode": llama_cpp.LLAMA_SPLIT_MODE_NONE, "main_gpu": 0},
        {"split_mode": llama_cpp.LLAMA_SPLIT_MODE_LAYER, "tensor_split": None},
        {"flash_attn": True, "offload_kqv": True, "op_offload": False},
        {"lora_base": None, "lora_path": None, "swa_full": None, "rope_scaling_type": None, "n_threads": None},
        {"n_ctx": np.int64(256), "rope_freq_base": np.float32(1e5), "logits_all": np.bool_(True), "seed": np.int32(7)},
        {"chat_format": "chatml"},
        {"chat_format": "chat_template.default"},
        {"n_threads": 0, "n_threads_batch": 0, "n_ctx": 0, "n_batch": 10**9, "n_ubatch": 64},
        {"attention_type": 0, "pooling_type": 0, "embedding": True},
    ],
)
def test_what_comes_out_as_asked_is_silent(smollm2_path: Path, given: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Llama(str(smollm2_path), **{"n_ctx": 256, "verbose": False, **given}) as model:
            assert model.n_batch <= model.n_ctx()


def test_a_vocabulary_alone(smollm2_path: Path) -> None:
    with Llama(str(smollm2_path), n_ctx=256, vocab_only=True, verbose=False) as model:
        assert model.detokenize(model.tokenize(b"some words", add_bos=False)) == b"some words"


def test_a_copy_through_pickle_does_not_warn(smollm2_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Llama(str(smollm2_path), n_ctx=256, verbose=False) as model:
            state = {name: value for name, value in model.__getstate__().items() if name != "chat_handler"}
        with Llama(**state) as copy:
            copy.eval([1])


def test_seed_0_is_a_seed(smollm2_path: Path) -> None:
    """llama_cpp.Llama takes it for none."""
    texts = []
    for _ in range(2):
        with Llama(str(smollm2_path), n_ctx=256, verbose=False, seed=0) as model:
            tokens = model.generate(model.tokenize(b"Once"), temp=2.0, top_k=0, top_p=1.0, min_p=0.0)
            texts.append([next(tokens) for _ in range(12)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("n_layers", [0, -1, 1000, 1 << 40])
def test_overrides_are_held_to_what_a_file_is_held_to(smollm2_path: Path, n_layers: int) -> None:
    with pytest.raises(errors.GgufError, match="block_count"):
        Llama(str(smollm2_path), verbose=False, kv_overrides={"llama.block_count": n_layers})


def test_overrides_reach_llama_cpp(smollm2_path: Path) -> None:
    overrides = {"tokenizer.ggml.add_bos_token": True, "general.name": "another name"}
    with Llama(str(smollm2_path), n_ctx=256, verbose=False, kv_overrides=overrides) as model:
        assert len(model.tokenize(b"")) == 1


def test_too_much_memory_is_a_typed_error(smollm2_path: Path) -> None:
    with pytest.raises(errors.SettingsError, match="n_ctx is 2,147,483,647.* this machine has"):
        Llama(str(smollm2_path), n_ctx=(1 << 31) - 1, verbose=False)
    with pytest.raises(errors.OutOfMemoryError, match="the model cannot be made") as caught:
        Llama(str(smollm2_path), n_ctx=1 << 22, logits_all=True, n_threads=1, verbose=False)  # 768 GiB of logits
    assert "logits_all" in caught.value.hint


def test_the_documented_table_is_the_table() -> None:
    text = (ROOT / "docs" / "arguments.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (honoured|refused|warned) \|", text, re.MULTILINE)
    assert dict(rows) == {name: decision.outcome for name, decision in arguments.DECISIONS.items()}
    assert len(rows) == len(arguments.DECISIONS)
    for decision in arguments.DECISIONS.values():
        assert decision.why in " ".join(text.split()), decision.why
