"""A model without any attention layer (a tiny random Mamba): it runs, its states take their ordinary way, nothing is
tiered."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from kvtier import Llama

N_EMBD, N_LAYER, D_CONV, D_STATE, DT_RANK = 64, 2, 4, 16, 4
D_INNER = 2 * N_EMBD
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
U32, F32, STRING, ARRAY, I32 = 4, 6, 8, 9, 5


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _metadata() -> list[bytes]:
    def key(name: str, kind: int, value: bytes) -> bytes:
        return _text(name) + struct.pack("<I", kind) + value

    def array(name: str, kind: int, items: list[bytes]) -> bytes:
        return key(name, ARRAY, struct.pack("<IQ", kind, len(items)) + b"".join(items))

    numbers = {
        "context_length": 512,
        "embedding_length": N_EMBD,
        "block_count": N_LAYER,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "ssm.conv_kernel": D_CONV,
        "ssm.inner_size": D_INNER,
        "ssm.state_size": D_STATE,
        "ssm.time_step_rank": DT_RANK,
    }
    types = [2, 3, 3, *[6] * 256]  # unknown, control, bytes
    return [
        key("general.architecture", STRING, _text("mamba")),
        *(key(f"mamba.{name}", U32, struct.pack("<I", n)) for name, n in numbers.items()),
        key("mamba.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", 1e-5)),
        key("tokenizer.ggml.model", STRING, _text("llama")),
        array("tokenizer.ggml.tokens", STRING, [_text(token) for token in TOKENS]),
        array("tokenizer.ggml.scores", F32, [struct.pack("<f", 0.0)] * len(TOKENS)),
        array("tokenizer.ggml.token_type", I32, [struct.pack("<i", kind) for kind in types]),
    ]


def _tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)

    def random(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.2, shape).astype(np.float32)

    embedding, norm = random(len(TOKENS), N_EMBD), np.ones(N_EMBD, np.float32)
    tensors = {"token_embd.weight": embedding, "output_norm.weight": norm, "output.weight": random(len(TOKENS), N_EMBD)}
    for i in range(N_LAYER):
        block = {
            "attn_norm.weight": np.ones(N_EMBD, np.float32),
            "ssm_in.weight": random(2 * D_INNER, N_EMBD),
            "ssm_conv1d.weight": random(D_INNER, D_CONV),
            "ssm_conv1d.bias": random(D_INNER),
            "ssm_x.weight": random(DT_RANK + 2 * D_STATE, D_INNER),
            "ssm_dt.weight": random(D_INNER, DT_RANK),
            "ssm_dt.bias": random(D_INNER),
            "ssm_a": -np.abs(random(D_INNER, D_STATE)),
            "ssm_d": random(D_INNER),
            "ssm_out.weight": random(N_EMBD, D_INNER),
        }
        tensors.update({f"blk.{i}.{name}": data for name, data in block.items()})
    return tensors


@pytest.fixture(scope="module")
def mamba_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of version 3 with F32 tensors."""
    metadata, tensors = _metadata(), _tensors()
    infos, data = b"", b""
    for name, tensor in tensors.items():
        shape = tensor.shape[::-1]  # ggml's order: fastest first
        infos += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, len(data))
        data += tensor.tobytes() + b"\0" * (-tensor.nbytes % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + b"".join(metadata) + infos
    path = tmp_path_factory.mktemp("mamba") / "mamba.gguf"
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def _logits(llm: llama_cpp.Llama) -> np.ndarray:
    llm.eval(llm.tokenize(b"state space models have no attention"))
    llm.eval([7])
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits(llm.ctx), (llm.n_vocab(),)).copy()


def test_its_logits_are_stock_s(mamba_path: Path) -> None:
    stock = llama_cpp.Llama(str(mamba_path), n_ctx=256, verbose=False)
    expected = _logits(stock)
    stock.close()
    with Llama(str(mamba_path), n_ctx=256, verbose=False, kv_host="16MiB") as ours:
        found = _logits(ours)
        assert ours.kv.n_layers == 0 and ours.kv.layers() == ()
        assert ours.kv.figures.tiers["host"].n_pages == 0
    assert np.ptp(expected) > 0.1
    assert np.allclose(found, expected, rtol=1e-3, atol=1e-3 * np.ptp(expected))


def test_run_says_so(mamba_path: Path) -> None:
    run = [sys.executable, "-m", "kvtier", "run", str(mamba_path), "-p", "hello", "-n", "5", "--kv-host", "16MiB"]
    done = subprocess.run(run, capture_output=True, text=True, errors="replace", timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "no attention layer" in done.stderr
    out = json.loads(subprocess.run([*run, "--json"], capture_output=True, timeout=120, check=True).stdout)
    assert out["kv"]["n_layers"] == 0
