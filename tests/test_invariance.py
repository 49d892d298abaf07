"""One answer, whichever way it was computed: whole models, bit for bit, over cache types, cuts of a text, and tiers.

llama.cpp's own matrix products are made equal with `same_bits`; what is left is our attention, decode against prefill.
Gemma's weights are stored as Q8_0 for this, whose products are equal at full speed (its K quants: test_same_bits.py).
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import llama_cpp
import pytest

from kvtier.native import runtime

from .test_same_bits import in_a_process

CACHE_TYPES = ("f16", "bf16", "q8_0", "q4_0", "q4_1")

# The last logits of one text, computed in several ways. Arguments: model, cache type, tokens, folder for pages or "".
# Prints the largest difference of each way from one prefill, and how many pages were on disk.
_WAYS = """
import json, sys
import numpy as np
import llama_cpp.llama_cpp as api
from kvtier import Llama
from tests.texts import source_text

path, cache, n_tokens, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
common = dict(n_ctx=1024, n_batch=256, n_ubatch=256, n_threads=2, n_threads_batch=2, type_k=cache, type_v=cache,
              same_bits=True, verbose=False)

def logits(llm, tokens, cuts, n_kept=0):
    llm.n_tokens = n_kept  # eval forgets what stands behind it
    for n in cuts:
        llm.eval(tokens[llm.n_tokens : llm.n_tokens + n])
    assert llm.n_tokens == len(tokens)
    last = api.llama_get_logits_ith(llm._ctx.ctx, -1)
    return np.ctypeslib.as_array(last, (llm.n_vocab(),)).copy()

n, k = n_tokens, n_tokens - 20
ways = {"a short batch last": [20], "one token last": [19, 1], "five tokens last": [15, *[1] * 5]}
with Llama(path, **common) as llm:
    tokens = llm.tokenize(source_text().encode()[:20000])[:n]
    whole = logits(llm, tokens, [n])
    llm.reset()
    llm.eval(tokens[:k])
    found = {name: float(np.abs(logits(llm, tokens, cuts, k) - whole).max()) for name, cuts in ways.items()}
    used = llm.kv.figures.tiers["host"].used_bytes
n_on_disk = 0
if folder:
    with Llama(path, kv_host=used // 2, kv_disk="1GiB", kv_dir=folder, **common) as llm:
        llm.kv.evict_every_step(True)
        llm.eval(tokens[:k])
        for name, cuts in ways.items():
            found[name + ", from disk"] = float(np.abs(logits(llm, tokens, cuts, k) - whole).max())
            n_on_disk += llm.kv.figures.tiers["disk"].n_pages
assert np.isfinite(whole).all() and np.ptp(whole) > 1
print(json.dumps([found, n_on_disk]))
"""

# A prompt of argv[2] tokens in batches of argv[3]; with argv[4] the windows' cache is as large as the others', so that
# the batch does not set the size of its ring. Prints a hash of the last logits.
_BATCHES = """
import hashlib, sys
import numpy as np
import llama_cpp.llama_cpp as api
from kvtier import Llama
from tests.texts import source_text

n_tokens, n_batch, swa_full = map(int, sys.argv[2:])
with Llama(sys.argv[1], n_ctx=n_tokens + 8, n_batch=n_batch, n_ubatch=n_batch, swa_full=bool(swa_full),
           verbose=False) as llm:
    tokens = llm.tokenize(source_text().encode())[:n_tokens]
    assert len(tokens) == n_tokens
    llm.eval(tokens)
    last = np.ctypeslib.as_array(api.llama_get_logits_ith(llm._ctx.ctx, -1), (llm.n_vocab(),))
    assert np.isfinite(last).all() and np.ptp(last) > 1
    print(hashlib.sha256(last.tobytes()).hexdigest())
"""


@pytest.fixture(scope="module")
def gemma3_q8_path(gemma3_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M with every weight as Q8_0."""
    runtime.load()
    runtime.log.muted = True
    path = tmp_path_factory.mktemp("models") / "gemma3-270m-q8_0.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, True
    assert llama_cpp.llama_model_quantize(str(gemma3_path).encode(), str(path).encode(), ctypes.byref(params)) == 0
    return path


@pytest.mark.parametrize("cache", CACHE_TYPES)
@pytest.mark.parametrize(
    ("model", "n_tokens"), [("smollm2_path", 300), ("gemma3_q8_path", 560)]
)  # Gemma's windows: 512
def test_one_answer_for_every_cut(
    model: str, n_tokens: int, cache: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Decode against prefill, pages in RAM and half of them on disk, evicted at every step: the same logits."""
    path = request.getfixturevalue(model)
    on_disk = str(tmp_path) if cache in ("f16", "q8_0") else ""
    found, n_on_disk = json.loads(in_a_process(_WAYS, path, cache, n_tokens, on_disk))
    assert len(found) == (6 if on_disk else 3)
    assert set(found.values()) == {0.0}, found
    assert (n_on_disk > 0) == bool(on_disk)


@pytest.mark.parametrize(
    ("model", "n_tokens", "batches", "swa_full"),
    [("smollm2_path", 5000, (512, 4096), False), ("gemma3_q8_path", 1100, (128, 1024), True)],
)
def test_small_batches_and_large_ones(
    model: str, n_tokens: int, batches: tuple[int, int], swa_full: bool, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    small, large = (in_a_process(_BATCHES, path, n_tokens, n_batch, int(swa_full)) for n_batch in batches)
    assert small == large
