"""The host budget is a promise about memory: held by the store's own count, and by the process's resident size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .texts import source_text

# A fresh process, so that nothing else has touched memory: prints resident growth and the store's own peak, in bytes.
MEASURE = """
import sys, psutil
from kvtier import Llama
from tests.texts import source_text
model, directory, budget = sys.argv[1:]
settings = {"kv_host": int(budget), "kv_disk": "2GiB", "kv_dir": directory} if budget != "0" else {}
with Llama(model, n_ctx=1600, n_batch=256, n_ubatch=256, verbose=False, **settings) as llm:
    tokens = llm.tokenize(source_text().encode())[:1536]
    llm.eval(tokens[:256])
    before = psutil.Process().memory_info().rss
    base = llm.kv.figures.tiers["host"].held_bytes
    for first in range(256, len(tokens), 256):
        llm.eval(tokens[first:first + 256])
    for token in tokens[:8]:
        llm.eval([token])
    figures = llm.kv.figures
    print(psutil.Process().memory_info().rss - before, figures.peak_host_bytes, base, figures.tiers["host"].used_bytes)
"""

N_WORKERS = 2
PAGE_BYTES = 32 * 3 * 64 * 2 * 2  # 32 tokens of 3 KV heads, 64 channels each of K and V, F16
OTHER_BYTES = 12 << 20  # what else grows in a process over 1,500 tokens: scratch, the disk file's table, Python


def measure(path: Path, directory: Path, budget: int) -> tuple[int, int, int, int]:
    out = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), str(directory), str(budget)],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
    ).stdout
    growth, peak, base, used = map(int, out.split())
    return growth, peak, base, used


def test_budget_holds_in_the_store_and_in_the_process(smollm2_path: Path, tmp_path: Path) -> None:
    assert len(source_text()) > 20_000
    budget = 7 << 20
    growth, peak, base, _ = measure(smollm2_path, tmp_path, budget)
    assert peak <= budget + N_WORKERS * PAGE_BYTES
    assert growth <= budget - base + N_WORKERS * PAGE_BYTES + OTHER_BYTES

    unlimited_growth, unlimited_peak, base, used = measure(smollm2_path, tmp_path, 0)
    assert unlimited_peak >= used > 4 * budget  # the cache is much larger than the budget was
    assert unlimited_growth >= used - base - OTHER_BYTES  # and the process's size would have shown it
