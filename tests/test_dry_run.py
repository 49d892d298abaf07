"""llama.cpp plans memory with contexts that have no memory (llama-server fits its parameters so): nothing may abort
then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own, since what is tested is that it does not die.
DRY_RUN = """
import ctypes, sys
import llama_cpp
from kvtier.native import runtime
from tests.contexts import TYPES
loaded = runtime.load()
devices = runtime.device_array(loaded.device)
params = llama_cpp.llama_model_default_params()
params.devices = ctypes.cast(devices, ctypes.c_void_p)
params.n_gpu_layers, params.no_alloc, params.load_mode = 99, True, 0
model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), params)
assert model
context = llama_cpp.llama_context_default_params()
context.n_ctx, context.flash_attn_type = 4096, 1
context.type_k = context.type_v = TYPES[sys.argv[2]]
ctx = llama_cpp.llama_init_from_model(model, context)
assert ctx
llama_cpp.llama_free(ctx)
llama_cpp.llama_model_free(model)
"""


@pytest.mark.parametrize("cache_type", ["f16", "q8_0", "q5_1", "iq4_nl"])
def test_a_dry_context_of_any_cache_type(smollm2_path: Path, cache_type: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DRY_RUN, str(smollm2_path), cache_type],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent.parent,
    )
    assert done.returncode == 0, done.stderr[-2000:]
