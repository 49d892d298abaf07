"""Files that arguments name: llama.cpp gets none that it cannot use, and the error says what is wrong."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest

from kvtier import Llama, errors
from kvtier.model import files
from kvtier.model.gguf import read_header, read_model
from kvtier.model.header import GgufHeader

from .children import run_child
from .test_gguf import F32, F64, STRING, U32, gguf, key, tensor

RANK, N_EMBD, N_VOCAB = 4, 576, 49152  # of SmolLM2
N_FF, N_KV = 1536, 192
LORA = [
    key("general.type", STRING, "adapter"),
    key("general.architecture", STRING, "llama"),
    key("adapter.type", STRING, "lora"),
    key("adapter.lora.alpha", F32, float(RANK)),
]
FACTORS = [("blk.28.attn_q.weight", N_EMBD, N_EMBD), ("blk.29.ffn_down.weight", N_FF, N_EMBD)]
Shapes = list[tuple[str, tuple[int, ...]]]


def shapes(factors: list[tuple[str, int, int]] = FACTORS, rank: int = RANK) -> Shapes:
    """Names and shapes (fastest first) of the two factors of each tensor of so many inputs and outputs."""
    return [
        part
        for name, n_in, n_out in factors
        for part in ((f"{name}.lora_a", (n_in, rank)), (f"{name}.lora_b", (rank, n_out)))
    ]


def adapter(keys: list[bytes] = LORA, parts: Shapes | None = None, type_id: int = 0, scale: float = 1.0) -> bytes:
    """A LoRA adapter with factors at random."""
    parts = shapes() if parts is None else parts
    dtype = {0: np.float32, 1: np.float16, 26: np.int32}[type_id]
    rng = np.random.default_rng(7)
    infos, data = [], b""
    for name, shape in parts:
        infos.append(tensor(name, shape, type_id, len(data)))
        raw = (rng.standard_normal(int(np.prod(shape))) * scale).astype(dtype).tobytes()
        data += raw + bytes(-len(raw) % 32)
    return gguf(keys, infos) + data


def replaced(old: str, new: bytes) -> list[bytes]:
    return [new if old.encode() in entry else entry for entry in LORA]


def without(old: str) -> list[bytes]:
    return [entry for entry in LORA if old.encode() not in entry]


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> tuple[GgufHeader, ...]:
    return read_model(smollm2_path)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    def write_file(data: bytes) -> Path:
        path = tmp_path / "adapter.gguf"
        path.write_bytes(data)
        return path

    return write_file


def logits(model: llama_cpp.Llama) -> npt.NDArray[np.float32]:
    model.eval(model.tokenize(b"The capital of France is"))
    return np.array(np.ctypeslib.as_array(model._ctx.get_logits(), (model.n_vocab(),)))


def test_an_adapter_that_fits(smollm2_path: Path, write: Callable[[bytes], Path]) -> None:
    path = write(adapter())
    common: dict[str, Any] = {"n_ctx": 256, "n_threads": 2, "verbose": False}
    with Llama(str(smollm2_path), **common) as plain:
        without_it = logits(plain)
    with Llama(str(smollm2_path), lora_path=path, lora_scale=0.5, **common) as ours:  # type: ignore[arg-type]
        with_it = logits(ours)
    stock = llama_cpp.Llama(str(smollm2_path), lora_path=str(path), lora_scale=0.5, flash_attn=True, **common)
    expected = logits(stock)
    stock.close()
    assert np.abs(with_it - expected).max() < 0.1 * np.abs(without_it - expected).max()


WHOLE = adapter()
FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "text": (b"a note about adapters\n" * 9, "not a GGUF file"),
    "old format": (b"lmgg" + bytes(64), "not a GGUF file"),
    "cut in its header": (WHOLE[:300], "ends inside|truncated"),
    "cut in its data": (WHOLE[:-4000], "ends inside tensor"),
    "no kind": (adapter(without("general.type")), "kind 'llama', not an adapter"),
    "a model": (
        adapter(replaced("general.type", key("general.type", STRING, "model"))),
        "kind 'model', not an adapter",
    ),
    "kind is a number": (adapter(replaced("general.type", key("general.type", U32, 1))), "should be a string"),
    "a control vector": (
        adapter(replaced("adapter.type", key("adapter.type", STRING, "control"))),
        "kind 'control'",
    ),
    "no kind of adapter": (adapter(without("adapter.type")), "kind None"),
    "another architecture": (
        adapter(replaced("architecture", key("general.architecture", STRING, "gemma3"))),
        "'gemma3'; .* is 'llama'",
    ),
    "alpha of 64 bits": (
        adapter(replaced("alpha", key("adapter.lora.alpha", F64, 8.0))),
        "alpha' should be a 32-bit number",
    ),
    "alpha is whole": (adapter(replaced("alpha", key("adapter.lora.alpha", U32, 8))), "alpha' should be"),
    "nothing in it": (adapter(parts=[]), "changes nothing"),
    "a tensor of none": (adapter(parts=[*shapes(), ("blk.0.attn_q.weight", (N_EMBD, 4))]), "is no part of"),
    "half a pair": (adapter(parts=shapes()[:3]), "only one of its two factors"),
    "a tensor the model lacks": (adapter(parts=shapes([("blk.99.attn_q.weight", N_EMBD, N_EMBD)])), "does not have"),
    "another width": (adapter(parts=shapes([("blk.0.attn_q.weight", 640, 640)])), "do not fit"),
    "ranks that differ": (
        adapter(parts=[("blk.0.attn_q.weight.lora_a", (N_EMBD, 4)), ("blk.0.attn_q.weight.lora_b", (8, N_EMBD))]),
        "do not fit",
    ),
    "looked-up ranks that differ": (
        adapter(parts=[("token_embd.weight.lora_a", (4, N_VOCAB)), ("token_embd.weight.lora_b", (8, N_EMBD))]),
        "do not fit",
    ),
    "rows looked up that are the output too": (
        adapter(parts=[("token_embd.weight.lora_a", (4, N_VOCAB)), ("token_embd.weight.lora_b", (4, N_EMBD))]),
        "is the output of this model too",
    ),
    "factors of experts": (
        adapter(parts=[("blk.0.attn_k.weight.lora_a", (N_EMBD, 4, 2)), ("blk.0.attn_k.weight.lora_b", (4, N_KV, 2))]),
        "do not fit",
    ),
    "whole numbers": (adapter(type_id=26), "type i32, which cannot be multiplied"),
}


@pytest.mark.parametrize("name", FILES)
def test_adapters_that_cannot_be(model: tuple[GgufHeader, ...], write: Callable[[bytes], Path], name: str) -> None:
    data, reason = FILES[name]
    path = write(data)
    with pytest.raises(errors.GgufError, match=reason) as caught:
        files.adapter_path(path, model)
    assert caught.value.path == path and caught.value.hint and caught.value.exit_code == 3


def test_places_where_no_adapter_is(smollm2_path: Path, model: tuple[GgufHeader, ...], tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for place, reason in (
        (tmp_path / "missing.gguf", "no such file"),
        (tmp_path, "is a directory"),
        (fifo, "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (smollm2_path / "below-a-file", "cannot be read|no such file"),
        (smollm2_path, "not an adapter"),
    ):
        with pytest.raises(errors.GgufError, match=reason) as caught:
            files.adapter_path(str(place), model)
        assert "LoRA" in caught.value.hint and caught.value.path == place


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_adapter_that_may_not_be_read(smollm2_path: Path, write: Callable[[bytes], Path]) -> None:
    path = write(WHOLE)
    path.chmod(0)
    with pytest.raises(errors.GgufError, match="Permission denied"):
        Llama(str(smollm2_path), lora_path=str(path), verbose=False)


@pytest.mark.parametrize("argument", ["model_path", "lora_path"])
@pytest.mark.parametrize("value", [42, b"model.gguf", "", "a\0b", "\udcff.gguf", ["model.gguf"], 0.5])
def test_what_is_no_path(smollm2_path: Path, argument: str, value: Any) -> None:
    with pytest.raises(errors.SettingsError, match=argument) as caught:
        Llama(**{"model_path": str(smollm2_path), argument: value}, verbose=False)
    assert caught.value.hint


class Handler:
    """What a chat handler of llama_cpp with a projector of images has of it."""

    def __init__(self, path: Path) -> None:
        self.clip_model_path = str(path)

    def __call__(self, **_: Any) -> None:
        raise AssertionError("nothing was asked")


def test_projectors(smollm2_path: Path, write: Callable[[bytes], Path], tmp_path: Path) -> None:
    clip = gguf([key("general.type", STRING, "mmproj"), key("general.architecture", STRING, "clip")])
    with Llama(str(smollm2_path), n_ctx=256, chat_handler=Handler(write(clip)), verbose=False) as llm:
        assert llm.n_ctx() == 256
    text = tmp_path / "text"
    text.write_text("text" * 99)
    for place, reason in (
        (smollm2_path, "kind 'model', not a projector"),
        (tmp_path / "missing", "no such file"),
        (tmp_path, "is a directory"),
        (write(clip[:60]), "ends inside|truncated"),
        (text, "not a GGUF file"),
    ):
        with pytest.raises(errors.GgufError, match=reason) as caught:
            Llama(str(smollm2_path), chat_handler=Handler(place), verbose=False)
        assert "mmproj" in caught.value.hint


def test_a_chat_template_that_cannot_be_compiled(smollm2_path: Path, tmp_path: Path) -> None:
    raw = bytearray(smollm2_path.read_bytes())
    name = b"tokenizer.chat_template"
    at = raw.index(name) + len(name) + 4 + 8
    raw[at : at + 8] = b"{% if %}"
    path = tmp_path / "broken.gguf"
    path.write_bytes(raw)
    with pytest.raises(errors.ChatTemplateError, match=re.escape(str(path))) as caught:
        Llama(str(path), n_ctx=256, verbose=False)
    assert caught.value.exit_code == 3 and "template" in caught.value.hint


def test_the_missing_adapter_in_a_process_of_its_own(smollm2_path: Path, tmp_path: Path) -> None:
    """llama_cpp.Llama, and ours as it was, ended it with SIGSEGV."""
    code = """
import sys
from kvtier import Llama, errors
try:
    Llama(sys.argv[1], n_ctx=256, lora_path=sys.argv[2], verbose=False)
except errors.GgufError as error:
    print("refused", error.path)
"""
    result = run_child(code, smollm2_path, tmp_path / "missing")
    assert (result.returncode, result.stdout.strip()) == (0, f"refused {tmp_path / 'missing'}"), result.stderr


def test_the_header_knows_wide_numbers(write: Callable[[bytes], Path]) -> None:
    header = read_header(write(gguf([key("narrow", F32, 0.5), key("wide", F64, 0.5), key("words", STRING, "x" * 9)])))
    assert header.wide_floats == {"wide"}
