"""`same_bits`: equal logits however they are computed, the check behind it, and what it refuses."""

from __future__ import annotations

import json
import os
import platform
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtier import Llama
from kvtier.engine import samebits
from kvtier.errors import SameBitsError, SettingsError
from kvtier.model import gguf
from kvtier.native.products import ROWS, Products, Weight
from kvtier.native.runtime import libggml
from kvtier.settings import KVSettings

from .test_no_attention import mamba_path  # noqa: F401  a fixture

F16 = 1

# The last logits of one text in a few cuts; argument: a model. Prints the largest differences from one prefill.
_CUTS = """
import json, sys
import numpy as np
import llama_cpp.llama_cpp as api
from kvtier import Llama
from tests.texts import source_text

with Llama(sys.argv[1], n_ctx=512, n_batch=256, n_threads=2, n_threads_batch=2, same_bits=True, verbose=False) as llm:
    tokens = llm.tokenize(source_text().encode()[:4000])[:170]

    def logits(cuts, n_threads):
        api.llama_set_n_threads(llm._ctx.ctx, n_threads, n_threads)
        llm.reset()
        at = 0
        for n in cuts:
            llm.eval(tokens[at : at + n])
            at += n
        assert at == len(tokens)
        last = api.llama_get_logits_ith(llm._ctx.ctx, -1)
        return np.ctypeslib.as_array(last, (llm.n_vocab(),)).copy()

    whole = logits([170], 2)
    cuts = {"one thread": ([170], 1), "150 + 20": ([150, 20], 2), "169 + 1": ([169, 1], 2),
            "165 + 5 x 1": ([165] + [1] * 5, 1), "17 x 10": ([10] * 17, 2)}
    print(json.dumps({name: float(np.abs(logits(*how) - whole).max()) for name, how in cuts.items()}))
    assert np.ptp(whole) > 1
"""

# A model computes as usual, then another is asked for the same bits. Arguments: both.
_TOO_LATE = """
import sys
from kvtier import Llama
from kvtier.errors import SameBitsError

with Llama(sys.argv[1], n_ctx=64, verbose=False) as llm:
    llm.eval([1, 2])
try:
    Llama(sys.argv[2], n_ctx=64, same_bits=True, verbose=False)
except SameBitsError as err:
    print(err)
"""


def in_a_process(code: str, *args: Path | str | int) -> str:
    """What a fresh Python prints: ggml reads its variable once per process."""
    env = {name: value for name, value in os.environ.items() if name != samebits.TILES_VARIABLE}
    root = Path(__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], cwd=root, env=env, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("model", ["smollm2_path", "gemma3_path"])
def test_equal_logits_however_computed(model: str, request: pytest.FixtureRequest) -> None:
    """Q4_1 and Q8_0; and Q4_K and Q6_K, which llama.cpp as it is multiplies in other orders."""
    differences = json.loads(in_a_process(_CUTS, request.getfixturevalue(model)))
    assert len(differences) == 5
    assert set(differences.values()) == {0.0}, differences


def first_weight(path: Path, kind: str) -> Weight:
    (header,) = gguf.read_model(path)
    return next(weight for tensor, weight in samebits.sample_weights(header) if tensor.type.name == kind)


def test_every_kind_of_weight_is_tried(gemma3_path: Path) -> None:
    (header,) = gguf.read_model(gemma3_path)
    tried = {(tensor.type.name, weight.n_in) for tensor, weight in samebits.sample_weights(header)}
    assert tried == {(t.type.name, t.shape[0]) for t in header.tensors if len(t.shape) > 1}


def test_products_of_a_q4_1_weight(smollm2_path: Path) -> None:
    weight = first_weight(smollm2_path, "q4_1")
    half = len(weight.data) // 2
    experts = Weight(weight.type_id, weight.n_in, weight.n_out // 2, 2, weight.data[: 2 * half])
    with Products() as products:
        assert products.rows_are_independent(weight, repacked=True)
        assert products.rows_are_independent(weight, repacked=False)
        assert products.rows_are_independent(experts, repacked=True)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="where llamafile's products differ is known for x86 only")
def test_the_check_finds_llamafiles_products() -> None:
    """A build with them has another order for several rows of F16, one without has not."""
    values = np.random.default_rng(3).standard_normal((64, 512)).astype(np.float16)
    with Products() as products:
        independent = products.rows_are_independent(Weight(F16, 512, 64, 0, values.tobytes()), repacked=False)
    assert independent == (not libggml.ggml_cpu_has_llamafile())
    assert max(ROWS) >= 16


def write_adapter(path: Path, rank: int = 8, n_embd: int = 576) -> Path:
    """A GGUF file with one pair of LoRA matrices in F16."""
    rng = np.random.default_rng(4)
    tensors = {
        "blk.0.attn_q.weight.lora_a": rng.standard_normal((rank, n_embd)).astype(np.float16),
        "blk.0.attn_q.weight.lora_b": rng.standard_normal((n_embd, rank)).astype(np.float16),
    }

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    words = {"general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora"}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(words))
    head += b"".join(text(key) + struct.pack("<I", 8) + text(word) for key, word in words.items())
    at = 0
    for name, array in tensors.items():
        head += text(name) + struct.pack("<IQQIQ", 2, *array.shape[::-1], F16, at)
        at += array.nbytes
    head += b"\0" * (-len(head) % 32)
    path.write_bytes(head + b"".join(array.tobytes() for array in tensors.values()))
    return path


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not libggml.ggml_cpu_has_llamafile(), reason="this build has one order for F16"
)
def test_what_cannot_be_had_is_refused(smollm2_path: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "lora.gguf")
    with pytest.raises(SameBitsError, match=r"f16 \(blk\.0\.attn_q\.weight\.lora_a\)") as caught:
        Llama(str(smollm2_path), n_ctx=64, lora_path=str(adapter), same_bits=True, verbose=False)
    assert "-DGGML_LLAMAFILE=OFF" in caught.value.hint
    assert caught.value.exit_code == 13


def test_a_model_that_computed_before_is_named(smollm2_path: Path, gemma3_path: Path) -> None:
    """On processors where K quants are multiplied in tiles; elsewhere the second model works as well."""
    said = in_a_process(_TOO_LATE, smollm2_path, gemma3_path)
    assert said == "" or ("q6_K" in said and f"{samebits.TILES_VARIABLE}=0" in said)


def test_recurrent_layers_are_refused(mamba_path: Path) -> None:  # noqa: F811
    with pytest.raises(SameBitsError, match="recurrent state"):
        Llama(str(mamba_path), n_ctx=64, same_bits=True, verbose=False)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (KVSettings(fidelity="bounded"), "bounded"),
        (KVSettings(fidelity="lossy", host=1 << 26), "lossy"),
        (KVSettings(disk=1 << 26, disk_type_k="q8_0"), "on disk"),
    ],
)
def test_settings_that_cannot_promise_it(smollm2_path: Path, settings: KVSettings, word: str) -> None:
    with pytest.raises(SettingsError, match=f"same_bits.*{word}"):
        Llama(str(smollm2_path), n_ctx=64, kv_settings=settings, same_bits=True, verbose=False)
    samebits.check_settings(KVSettings(disk=1 << 26).with_cache_types("q8_0", "q8_0"))


def test_caches_of_windows_that_depend_on_the_micro_batch(gemma3_path: Path) -> None:
    """Refused in Python; the command line takes the full size by itself."""
    with pytest.raises(SettingsError, match=r"same_bits.*swa_full False.*512 tokens"):
        Llama(str(gemma3_path), n_ctx=64, swa_full=False, same_bits=True, verbose=False)
    pages = []
    for option in ([], ["--same-bits"]):
        command = [sys.executable, "-m", "kvtier", "run", str(gemma3_path), *option, "-c", "1280", "-ub", "128"]
        prompt = " ".join(f"{i} and" for i in range(250))  # longer than a window and such a micro-batch
        run = subprocess.run([*command, "-n", "1", "--json", "-p", prompt], capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr
        result = json.loads(run.stdout)
        pages.append(
            (result["kv"]["tiers"]["host"]["n_pages"], -(-result["n_prompt"] // 32) * result["kv"]["n_layers"])
        )
    (ring, all_ring), (full, all_full) = pages
    assert ring < all_ring and full == all_full


def test_the_command(smollm2_path: Path) -> None:
    command = [sys.executable, "-m", "kvtier", "run", str(smollm2_path), "--same-bits", "-p", "One", "-n", "2"]
    run = subprocess.run([*command, "-c", "64", "--json"], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and json.loads(run.stdout), run.stderr
    run = subprocess.run([*command, "--fidelity", "bounded"], capture_output=True, text=True, timeout=300)
    assert run.returncode == 2 and "same_bits" in run.stderr
