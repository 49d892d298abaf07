"""Which cache types llama.cpp is told where nobody asked for one: quantized where pages are, so that it rotates what is
rounded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier import Llama
from kvtier.errors import GgufError
from kvtier.measuring.config import Configuration, Opening
from kvtier.measuring.errors import MeasuringError
from kvtier.measuring.spec import parse_spec
from kvtier.model import cachetypes
from kvtier.model.cachetypes import AUTO, cache_types
from kvtier.model.gguf import read_model
from kvtier.model.shape import AttentionLayer, ModelShape
from kvtier.settings import KVSettings

from .texts import source_text


def shape(*heads: tuple[int, int], indexer: int = 0) -> ModelShape:
    layers = [AttentionLayer(i, 2, d_k, d_v, False) for i, (d_k, d_v) in enumerate(heads)]
    if indexer:
        layers.append(AttentionLayer(len(layers), 1, indexer, indexer, False, indexer=True))
    return ModelShape("llama", "m", 4096, 100, 64, 64, len(heads), 4, 0, tuple(layers), 0, 0)


Types = Callable[..., tuple[str, str]]


@pytest.fixture
def types(monkeypatch: pytest.MonkeyPatch, smollm2_path: Path) -> Types:
    """The types for settings, with a model of the shape that is given."""
    header = read_model(smollm2_path)[0]

    def types(
        model: ModelShape | None, asked: tuple[str | None, str | None] = (None, None), **settings: Any
    ) -> tuple[str, str]:
        if model is not None:
            monkeypatch.setattr(cachetypes, "shape_of", lambda _header: model)
        return cache_types(KVSettings(**settings).with_cache_types(*asked), header, *asked)

    return types


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("f16", "f16")),
        ({"disk": "1GiB", "disk_type_k": "q4_0"}, ("f16", "f16")),  # what RAM holds must survive a saved state
        ({"host_type_k": "q8_0"}, ("q8_0", "f16")),
        ({"host_type_v": "q4_1"}, ("f16", "q4_1")),
        ({"fidelity": "bounded:0.05"}, ("q8_0", "q8_0")),
        ({"fidelity": "bounded:0.05", "host_type_v": "f16"}, ("q8_0", "f16")),
        ({"fidelity": "bounded:0.05", "host_type_k": "f16"}, ("f16", "q8_0")),
        ({"fidelity": "lossy", "host": "1GiB"}, ("q8_0", "q8_0")),
        ({"host_type_k": "bf16", "host_type_v": "f32"}, ("f16", "f16")),
    ],
)
def test_by_what_pages_hold(types: Types, settings: dict[str, Any], expected: tuple[str, str]) -> None:
    assert types(shape((64, 64), (64, 64)), **settings) == expected


@pytest.mark.parametrize(("kind", "expected"), [("f16", "f16"), ("f32", "f16"), ("bf16", "bf16"), ("q4_0", "q4_0")])
def test_what_is_asked_for_comes_first(types: Types, kind: str, expected: str) -> None:
    assert types(shape((64, 64)), (kind, kind), fidelity="lossy", host="1GiB") == (expected, expected)
    assert types(shape((64, 64)), (kind, AUTO), fidelity="lossy", host="1GiB", host_type_v="q8_0") == (expected, "q8_0")


@pytest.mark.parametrize("heads", [((80, 80),), ((96, 64),), ((64, 64), (128, 128)), ((576, 0),), ()])
def test_only_heads_that_llama_cpp_rotates(types: Types, heads: tuple[tuple[int, int], ...]) -> None:
    k, v = types(shape(*heads), fidelity="lossy", host="1GiB")
    assert k == "f16"
    assert v == ("q8_0" if heads == ((96, 64),) else "f16")


def test_an_indexers_keys_do_not_count(types: Types) -> None:
    assert types(shape((128, 128), indexer=96), fidelity="lossy", host="1GiB") == ("q8_0", "q8_0")


def test_rows_follow_the_model(smollm2_path: Path, tmp_path: Path) -> None:
    row = parse_spec("kvtier:fidelity=bounded:0.05")
    assert (row.type_k, row.type_v) == (AUTO, AUTO)
    opening = Opening(str(smollm2_path), row, 512, 1)
    assert (opening.config.type_k, opening.config.type_v) == ("q8_0", "q8_0")
    assert Opening.from_dict(opening.to_dict()) == opening
    asked = parse_spec("kvtier:cache-k=f16,fidelity=bounded:0.05")
    assert (asked.for_model(smollm2_path, 512).type_k, asked.for_model(smollm2_path, 512).type_v) == ("f16", "q8_0")
    assert (
        replace(row, type_k="f16", type_v="f16").for_model(tmp_path / "none.gguf", 512).type_k == "f16"
    )  # nothing to look up
    with pytest.raises(GgufError):
        row.for_model(tmp_path / "none.gguf", 512)


def test_stock_is_told_a_type() -> None:
    with pytest.raises(MeasuringError, match="auto"):
        Configuration("x", "stock", AUTO)


def logits(path: Path, tokens: list[int] | None = None, **arguments: Any) -> np.ndarray:
    with Llama(str(path), n_ctx=512, n_batch=256, n_threads=2, n_threads_batch=2, verbose=False, **arguments) as llm:
        llm.eval(llm.tokenize(source_text().encode())[:300])
        for token in (5, 6, 7):
            llm.eval([token])
        return np.array(llm._ctx.get_logits()[: llm.n_vocab()])


def test_a_run_tells_llama_cpp_so(smollm2_path: Path) -> None:
    """The same bits as with the types named; others without, since what is stored is not rotated then."""
    quantized = {"kv_host_type_k": "q4_0", "kv_host_type_v": "q4_0"}
    chosen = logits(smollm2_path, **quantized)
    np.testing.assert_array_equal(chosen, logits(smollm2_path, type_k="q4_0", type_v="q4_0"))
    assert np.abs(chosen - logits(smollm2_path, type_k="f16", type_v="f16", **quantized)).max() > 0.05
    lossy = KVSettings(fidelity="lossy", host="1GiB")
    named = replace(lossy, host_type_k="f16", host_type_v="f16")
    np.testing.assert_array_equal(
        logits(smollm2_path, kv_settings=lossy), logits(smollm2_path, kv_settings=named, type_k="q8_0", type_v="q8_0")
    )


def test_the_shape_of_a_real_model(types: Types) -> None:
    assert types(None, fidelity="bounded:0.05") == ("q8_0", "q8_0")
