"""What a bounded step says it left out, on steps of real models, with brute force as the judge.

Queries and keys are taken from llama.cpp while it reads a text, rotated as it rotates them for a quantized cache, and
handed to test-recall, which keeps the keys as they were beside those that are stored: of every query of every layer it
works out in F64 which probability was left out.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from . import scripts_loader
from .texts import source_text

BUILD = Path(os.environ.get("KVTIER_TEST_PROGRAMS", scripts_loader.ROOT / "build"))
N_PREFIX, N_STEPS = 1500, 3


@pytest.fixture(scope="module")
def program() -> Path:
    path = BUILD / "test-recall"
    assert path.is_file(), f"{path} is missing: make test-c builds it"
    return path


@pytest.mark.parametrize("name", ["smollm2_path", "gemma3_path"])
def test_no_step_of_a_model_leaves_out_more_than_it_says(
    name: str, program: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    study = scripts_loader.load("recall-study")
    taken = study.capture(request.getfixturevalue(name), source_text(), N_PREFIX, N_STEPS, all_keys=True)
    n_layers = len(taken.queries)
    assert n_layers in (30, 18) and len(taken.keys) == n_layers * N_STEPS
    path = tmp_path / "steps.bin"
    with path.open("wb") as file:
        for i, (keys, seen) in enumerate(zip(taken.keys, taken.visible, strict=True)):
            queries = taken.queries[i % n_layers][i // n_layers]  # [heads, channels]
            n_head_kv, n_cells, d = keys.shape
            assert N_PREFIX < seen.sum() <= N_PREFIX + N_STEPS or seen.sum() == 512  # a window of Gemma's
            file.write(np.array([n_head_kv, len(queries) // n_head_kv, d, n_cells], np.int32).tobytes())
            file.write(np.float32(taken.scale).tobytes())
            file.write(study.rotated(queries).tobytes())
            file.write(np.ascontiguousarray(study.rotated(keys).transpose(1, 0, 2)).tobytes())
            file.write(np.where(seen, 0, 0xFC00).astype(np.uint16).tobytes())
    run = subprocess.run([program, "--captured", path], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.match(rf"{n_layers * N_STEPS} layers and steps\n", run.stdout)
