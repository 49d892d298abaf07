"""Lossy fidelity against an exact cache of the same text, one token at a time: KL, same top-1, perplexity ratio.

    python scripts/measure-lossy.py TEXT --keep 0.5 0.2 --rows delta lru h2o -o table.jsonl

A row is a policy, or `delta` with a part of it taken away or made larger: delta-no-scorer (present mass instead), delta-no-compress (pages are dropped as they
are), delta-scorer (the scorer alone), delta-online-1 (1 % of the budget for summary cells), delta-online-4, delta-spread-4.
The weights are widened to F32 first, so that only the cache rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from kvtier import Llama
from kvtier.evaluation.widened import ModelFile
from kvtier.lossy.memory import LossyEngine, MemorySettings
from kvtier.measuring.text import read_text
from kvtier.models import resolve
from kvtier.policies.base import Policy
from kvtier.policies.delta import Delta
from kvtier.settings import KVSettings

LIBRARY = "python"
MEMORY = {
    "delta-no-compress": MemorySettings(compress=False),
    "delta-online-1": MemorySettings(online_share=0.01),
    "delta-online-4": MemorySettings(online_share=0.04),
    "delta-spread-4": MemorySettings(online_share=0.04, spread=True),
}


def parts_of(row: str) -> tuple[str | Policy, MemorySettings | None]:
    """The policy and the memory of a row."""
    if row == "delta-no-scorer":
        return Delta(scorer=None), None
    if row == "delta-scorer":
        return Delta(forecast_share=1.0), None
    return ("delta", MEMORY[row]) if row in MEMORY else (row, None)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max()
    return x - np.log(np.exp(x).sum())


def logits_of(llm: Llama, text: list[int], n_prompt: int, settle: bool) -> tuple[list[np.ndarray], float]:
    """Log-probabilities after each token from the end of the prompt on, and seconds per token."""
    step = llm.n_batch
    for first in range(0, n_prompt, step):
        llm.eval(text[first : min(first + step, n_prompt)])
    out = [log_softmax(np.array(llm._ctx.get_logits()[: llm.n_vocab()]))]
    start = time.perf_counter()
    for token in text[n_prompt:-1]:
        llm.eval([token])
        if settle and llm.placement is not None:
            llm.placement.settle()
        out.append(log_softmax(np.array(llm._ctx.get_logits()[: llm.n_vocab()])))
    return out, (time.perf_counter() - start) / max(1, len(text) - n_prompt - 1)


def compare(exact: list[np.ndarray], ours: list[np.ndarray], text: list[int], n_prompt: int) -> dict[str, float]:
    kl = np.array([float(np.sum(np.exp(p) * (p - q))) for p, q in zip(exact, ours, strict=True)])
    nll = [np.mean([-lp[t] for lp, t in zip(rows, text[n_prompt:], strict=True)]) for rows in (exact, ours)]
    same = np.mean([p.argmax() == q.argmax() for p, q in zip(exact, ours, strict=True)])
    return {
        "kl": float(kl.mean()),
        "kl_p99": float(np.quantile(kl, 0.99)),
        "same_top1": float(same),
        "ppl_ratio": float(np.exp(nll[1] - nll[0])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="a UTF-8 file, or the word python for sources of Python's standard library")
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.5, 0.35, 0.2])
    parser.add_argument("--rows", nargs="+", default=["delta", "lru", "sink_window", "h2o", "key_diversity"])
    parser.add_argument("--n-prompt", type=int, default=3840)
    parser.add_argument("--n-decode", type=int, default=500)
    parser.add_argument("--skip", type=int, default=0, help="characters of the text to leave out at its start")
    parser.add_argument("-b", "--batch", type=int, default=64, help="tokens of a batch of the prompt")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    source = resolve(args.model)
    with TemporaryDirectory() as folder, ModelFile(source, True, Path(folder) / source.stem, lambda: None) as model:
        measure(str(model.path()), args)


def measure(path: str, args: argparse.Namespace) -> None:
    n_all = args.n_prompt + args.n_decode
    common = {"n_ctx": n_all + 32, "n_batch": args.batch, "n_ubatch": args.batch, "n_threads": args.threads, "n_threads_batch": args.threads, "verbose": False}
    with Llama(path, **common) as llm:
        text = llm.tokenize(read_text(None if args.text == LIBRARY else Path(args.text))[args.skip :][: 8 * n_all].encode())[:n_all]
        exact, exact_s = logits_of(llm, text, args.n_prompt, False)
        n_bytes = llm.kv.figures.tiers["host"].used_bytes
    print(f"exact: {n_bytes / 2**20:.1f} MiB, {1000 * exact_s:.1f} ms a token", flush=True)
    for keep in args.keep:
        for row in args.rows:
            policy, memory = parts_of(row)
            settings = KVSettings(host=int(keep * n_bytes), fidelity="lossy")
            with Llama(path, **common, kv_settings=settings, policy=policy, kv_memory=memory) as llm:
                if llm.placement is not None:
                    llm.placement._planner._limit_s = 60.0  # quality is measured here, and the machine may be busy
                ours, seconds = logits_of(llm, text, args.n_prompt, True)
                figures = llm.kv.figures
                engine = llm.placement._engine if llm.placement is not None else None
                counts = engine.counts if isinstance(engine, LossyEngine) else None
                problem = llm.placement.figures.problem if llm.placement is not None else ""
            result: dict[str, object] = {"keep": keep, "row": row, **compare(exact, ours, text, args.n_prompt), "ms": 1000 * seconds}
            result |= {"peak_share": figures.peak_host_bytes / (keep * n_bytes), "gone": figures.tiers["none"].n_pages, "host": figures.tiers["host"].n_pages}
            result |= {"reencoded": counts.n_reencoded if counts else 0, "dropped": counts.n_dropped if counts else 0}
            result |= {"n_gone": figures.n_gone, "problem": problem}
            print(" ".join(f"{k}={v:.4f}" if isinstance(v, float) else f"{k}={v}" for k, v in result.items()), flush=True)
            if args.output is not None:
                with args.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
