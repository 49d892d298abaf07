"""Without our Python: a program that only knows GGML_BACKEND_PATH and KVTIER_CONFIG gets the pages all the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from kvtier.native import binding

# Stock llama_cpp.Llama in a process that never imports kvtier. Model loads use every GPU device that ggml has loaded.
PROGRAM = """
import ctypes, sys
import llama_cpp
from llama_cpp.llama_cpp import _lib as libggml
libggml.ggml_backend_load_all()
libggml.ggml_backend_dev_by_name.restype = ctypes.c_void_p
assert libggml.ggml_backend_dev_by_name(b"KVT0"), "the device is missing"
llm = llama_cpp.Llama(sys.argv[1], n_ctx=512, n_gpu_layers=99, flash_attn=True, verbose=True)
print(llm("The capital of France is", max_tokens=4, temperature=0.0)["choices"][0]["text"])
assert "kvtier" not in sys.modules
"""


# The same with more tokens than the budget holds: what llama-server answers with "Compute error."
TOO_MUCH = PROGRAM.replace('llm("The capital of France is"', 'llm("sea " * 480')


def run(model: Path, config: str, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "GGML_BACKEND_PATH": str(binding.library_path()), "KVTIER_CONFIG": config}
    return subprocess.run(
        [sys.executable, "-c", program, str(model)], env=env, capture_output=True, text=True, check=False
    )


def test_a_program_that_does_not_know_us(smollm2_path: Path, tmp_path: Path) -> None:
    result = run(smollm2_path, f"host=8MiB,disk=64MiB,dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    assert "KVT0 KV buffer size" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_bad_setting_is_an_error_with_its_name(smollm2_path: Path) -> None:
    result = run(smollm2_path, "host=much")
    assert result.returncode == 1  # an exception of llama_cpp, no abort
    assert "setting 'host': 'much' is not a number of bytes" in result.stderr


def test_a_failed_step_is_explained_in_the_log_as_the_docs_say(smollm2_path: Path) -> None:
    result = run(smollm2_path, "host=6MiB", TOO_MUCH)
    assert result.returncode == 1 and "llama_decode returned -3" in result.stderr
    text = (Path(__file__).parents[1] / "docs" / "compatibility.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^    (kvtier: .*)", text, re.MULTILINE)
    for line in (shown, "graph_compute: ggml_backend_sched_graph_compute_async failed"):
        pattern = re.sub(r"\d+", r"\\d+", re.escape(line)).replace(r"\.\.\.", ".+")
        assert re.search(pattern, result.stderr), (pattern, result.stderr)
