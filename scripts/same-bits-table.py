#!/usr/bin/env python3
"""The table of docs/same-bits.md: how far the last logits of one text lie from one prefill, by how they were computed.

    python scripts/same-bits-table.py TEXT [-m smollm2 -m gemma3-270m]

Stock llama.cpp, kvtier, and kvtier with same bits, each in a process of its own. Largest difference of a logit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

N_TOKENS = 1024
CUTS = {
    "1,000 tokens, then a batch of 24": [1000, 24],
    "1,016, then a batch of 8": [1016, 8],
    "1,023, then one": [1023, 1],
    "1,016, then eight times one": [1016, *[1] * 8],
}
ENGINES = ("stock", "kvtier", "same bits")


def differences(engine: str, model: str, text: str) -> dict[str, float]:
    """The largest difference of each cut, computed in this process."""
    import llama_cpp

    from kvtier import Llama
    from kvtier.model.names import resolve

    common = {"n_ctx": 2048, "n_batch": 512, "n_threads": 2, "n_threads_batch": 2, "verbose": False}
    path = str(resolve(model))
    if engine == "stock":
        llm = llama_cpp.Llama(path, flash_attn=True, **common)
    else:
        llm = Llama(path, same_bits=engine == "same bits", **common)
    tokens = llm.tokenize(Path(text).read_text(encoding="utf-8")[30_000:60_000].encode())[:N_TOKENS]

    def last(cuts: list[int]) -> np.ndarray:
        llm.reset()
        at = 0
        for n in cuts:
            llm.eval(tokens[at : at + n])
            at += n
        logits = llama_cpp.llama_get_logits_ith(llm._ctx.ctx, -1)
        return np.ctypeslib.as_array(logits, (llm.n_vocab(),)).copy()

    whole = last([N_TOKENS])
    return {name: float(np.abs(last(cuts) - whole).max()) for name, cuts in CUTS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text")
    parser.add_argument("-m", "--model", action="append")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    models = options.model or ["smollm2", "gemma3-270m"]
    if options.engine:
        print(json.dumps(differences(options.engine, models[0], options.text)))
        return
    columns = []
    for model in models:
        for engine in ENGINES:
            command = [sys.executable, __file__, options.text, "-m", model, "--engine", engine]
            run = subprocess.run(command, capture_output=True, text=True, check=True)
            columns.append((f"{model}: {engine}", json.loads(run.stdout.splitlines()[-1])))
            print(columns[-1], file=sys.stderr, flush=True)
    print("| the last tokens computed as | " + " | ".join(name for name, _ in columns) + " |")
    print("| --- |" + " ---: |" * len(columns))
    for cut in CUTS:
        print(f"| {cut} | " + " | ".join(f"{found[cut]:.2g}" for _, found in columns) + " |")


if __name__ == "__main__":
    main()
