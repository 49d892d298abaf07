#!/usr/bin/env python3
"""Decode and prefill of two builds of libkvtier.so, taking turns on this machine: what a change of the kernels costs.

    python scripts/compare-builds.py BEFORE/libkvtier.so build/libkvtier.so -c 8k,32k -t 1,2

Decode is measured at each context, prefill as a batch of 512 tokens behind half of it, which is what the mean batch of
such a prompt takes. Prints medians in tokens/s and the median of the rounds' ratios, second over first.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path

from kvtier.machine import hardware
from kvtier.measuring.child import Child
from kvtier.measuring.config import Configuration, Opening
from kvtier.model.names import resolve
from kvtier.sizes import parse_tokens

BATCH = 512


def rates(children: list[Child], op: str, n_tokens: int, rounds: int) -> list[list[float]]:
    """Tokens/s of each child in each round; one round before them does not count."""
    found: list[list[float]] = [[] for _ in children]
    for i in range(rounds + 1):
        turn = list(enumerate(children))
        for k, child in turn if i % 2 else reversed(turn):
            before = int(child.ask("size")["n_past"])
            seconds = float(child.ask(op, n_tokens=n_tokens)["seconds"])
            if op == "prefill":
                child.ask("rewind", n_tokens=before)
            if i:
                found[k].append(n_tokens / seconds)
    return found


def show(what: str, found: list[list[float]]) -> None:
    ratios = sorted(b / a for a, b in zip(*found, strict=True))
    medians = [statistics.median(rate) for rate in found]
    spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
    print(f"| {what} | {medians[0]:.1f} | {medians[1]:.1f} | {statistics.median(ratios):.3f} ({spread}) |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs=2, type=Path)
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("-c", "--contexts", default="8k,32k")
    parser.add_argument("-t", "--threads", default="1,2")
    parser.add_argument("--types", default="f16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decode", type=int, default=16, help="tokens of a round")
    parser.add_argument("--no-prefill", action="store_true")
    options = parser.parse_args()
    contexts = [parse_tokens(text) for text in options.contexts.split(",")]
    path = resolve(options.model)
    text = Path(os.__file__).with_name("subprocess.py").read_text(encoding="utf-8")
    print(f"{hardware.cpu_name()}; {path.name}; {options.libraries[0]} and {options.libraries[1]}\n")
    print("| | first | second | second / first |\n| --- | ---: | ---: | ---: |")
    for kind in options.types.split(","):
        children = []
        try:
            for library in options.libraries:
                os.environ["KVTIER_LIBRARY"] = str(library.resolve())
                config = Configuration(kind, "kvtier", kind, kind)
                opening = Opening(str(path), config, max(contexts) + 2 * BATCH, 1)
                with Child(opening) as child:
                    tokens = child.ask("tokenize", text=text)["tokens"]
                children.append(Child(opening, tokens))
            for context in contexts:
                for threads in map(int, options.threads.split(",")):
                    for child in children:
                        child.ask("threads", n_threads=threads)
                        child.ask("fill", n_tokens=context)
                    where = f"{kind} pages, {context:,} tokens, {threads} thread{'s' if threads > 1 else ''}"
                    show(f"decode, {where}", rates(children, "decode", options.decode, options.rounds))
                    if not options.no_prefill:
                        for child in children:
                            child.ask("fill", n_tokens=context // 2)
                        where = where.replace(f"{context:,}", f"{context // 2:,}")
                        show(f"prefill behind {where}", rates(children, "prefill", BATCH, max(1, options.rounds // 2)))
        finally:
            for child in children:
                child.close()


if __name__ == "__main__":
    main()
