"""llama.cpp's state save and restore on our pages: byte for byte, in a new process, also from a fragmented cache."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from kvtier import Llama

from .test_sequences import kl
from .texts import source_text

CONTEXT = {"n_ctx": 1024, "n_batch": 256, "n_ubatch": 256, "verbose": False}

# A fresh process: restores the file, saves again, and decodes one token.
RESTORE = """
import sys
from pathlib import Path
import numpy as np
from kvtier import Llama
from tests.test_state import CONTEXT, full_state, set_full_state, logits_after
model, state, again, logits, token, n_past, type_k = sys.argv[1:]
with Llama(model, type_k=type_k, type_v=type_k, **CONTEXT) as llm:
    set_full_state(llm, Path(state).read_bytes())
    Path(again).write_bytes(full_state(llm))
    np.save(logits, logits_after(llm, int(token), int(n_past)))
"""


def full_state(llm: Llama) -> bytes:
    size = llama_cpp.llama_state_get_size(llm.ctx)
    buffer = (ctypes.c_uint8 * size)()
    written = llama_cpp.llama_state_get_data(llm.ctx, buffer, size)
    assert written > 0
    return bytes(buffer)[:written]


def set_full_state(llm: Llama, state: bytes) -> None:
    buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
    assert llama_cpp.llama_state_set_data(llm.ctx, buffer, len(state)) == len(state)


def sequence_state(llm: Llama, seq_id: int) -> bytes:
    size = llama_cpp.llama_state_seq_get_size(llm.ctx, seq_id)
    buffer = (ctypes.c_uint8 * size)()
    assert llama_cpp.llama_state_seq_get_data(llm.ctx, buffer, size, seq_id) == size
    return bytes(buffer)


def set_sequence_state(llm: Llama, seq_id: int, state: bytes) -> None:
    buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
    assert llama_cpp.llama_state_seq_set_data(llm.ctx, buffer, len(state), seq_id) == len(state)


def logits_after(llm: Llama, token: int, n_past: int) -> np.ndarray:
    llm.n_tokens = n_past
    llm.eval([token])
    return np.array(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), (llm.n_vocab(),)))


def fragment(llm: Llama, n_past: int) -> None:
    """Free every third run of 20 cells, then fill some of them with later tokens."""
    memory = llama_cpp.llama_get_memory(llm.ctx)
    for first in range(40, n_past - 60, 60):
        assert llama_cpp.llama_memory_seq_rm(memory, 0, first, first + 20)


@pytest.mark.parametrize("type_k", ["f16", "q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize("fragmented", [False, True])
def test_full_state_in_a_new_process(smollm2_path: Path, tmp_path: Path, type_k: str, fragmented: bool) -> None:
    with Llama(str(smollm2_path), type_k=type_k, type_v=type_k, **CONTEXT) as llm:
        tokens = llm.tokenize(source_text().encode())[:400]
        llm.eval(tokens)
        if fragmented:
            fragment(llm, 400)
            llm.eval(tokens[:50])
        n_past = llm.n_tokens
        state = full_state(llm)
        expected = logits_after(llm, tokens[7], n_past)
    paths = {name: tmp_path / name for name in ("state", "again", "logits.npy")}
    paths["state"].write_bytes(state)
    subprocess.run(
        [
            sys.executable,
            "-c",
            RESTORE,
            str(smollm2_path),
            *map(str, paths.values()),
            str(tokens[7]),
            str(n_past),
            type_k,
        ],
        check=True,
        cwd=Path(__file__).parent.parent,
    )
    assert paths["again"].read_bytes() == state
    if fragmented:  # llama.cpp restores the cells without the gaps: other pages, so other partial sums
        assert kl(expected[None], np.load(paths["logits.npy"])[None]) < 0.05
    else:
        np.testing.assert_array_equal(np.load(paths["logits.npy"]), expected)


def test_one_sequence_moves_to_another(smollm2_path: Path) -> None:
    with Llama(str(smollm2_path), **CONTEXT) as llm:
        tokens = llm.tokenize(source_text().encode())[:300]
        llm.eval(tokens)
        state = sequence_state(llm, 0)
        memory = llama_cpp.llama_get_memory(llm.ctx)
        assert llama_cpp.llama_memory_seq_rm(memory, 0, -1, -1)
        set_sequence_state(llm, 0, state)
        assert sequence_state(llm, 0) == state


def test_state_survives_the_disk_tier(smollm2_path: Path, tmp_path: Path) -> None:
    with (
        Llama(str(smollm2_path), kv_host="3MiB", kv_disk="1GiB", kv_dir=tmp_path, **CONTEXT) as small,
        Llama(str(smollm2_path), **CONTEXT) as large,
    ):
        tokens = large.tokenize(source_text().encode())[:600]
        large.eval(tokens)
        small.eval(tokens)
        assert small.kv.figures.tiers["disk"].n_pages > 0
        assert sequence_state(small, 0) == sequence_state(large, 0)
        state = sequence_state(small, 0)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(small.ctx), True)
        assert small.kv.figures.tiers["disk"].n_pages == 0
        set_sequence_state(small, 0, state)
        assert sequence_state(small, 0) == state
