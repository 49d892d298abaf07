#!/usr/bin/env python3
"""Decode and prefill of two builds of libkvtier.so, taking turns on this machine: what a change of the kernels costs.

    python scripts/compare-builds.py BEFORE/libkvtier.so build/libkvtier.so -c 8k,32k -t 1,2

Decode is measured at each context, prefill as a batch of 512 tokens behind half of it, which is what the mean batch of
such a prompt takes. One process may be a tenth slower than another of the same library, all its life: where its memory
came to lie. So both are opened several times, in turns, and rounds count for all openings. Prints medians in tokens/s
and the median of the rounds' ratios, second over first.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.machine import hardware
from kvtier.measuring.child import Child
from kvtier.measuring.config import Configuration, Opening
from kvtier.model.names import resolve
from kvtier.sizes import parse_tokens

BATCH = 512


@dataclass(frozen=True)
class Case:
    """What is measured: steps of `op` with `n_tokens` behind a context, with so many threads."""

    op: str
    n_tokens: int
    context: int
    threads: int


Rates = list[tuple[float, float]]  # tokens/s of both builds, round by round


def rates(children: Sequence[Child], case: Case, rounds: int) -> Rates:
    """One round before them does not count. The builds' order changes from round to round."""
    for child in children:
        child.ask("threads", n_threads=case.threads)
        child.ask("fill", n_tokens=case.context)
    found: Rates = []
    for i in range(rounds + 1):
        rate = [0.0, 0.0]
        for k in (0, 1) if i % 2 else (1, 0):
            before = int(children[k].ask("size")["n_past"])
            rate[k] = case.n_tokens / float(children[k].ask(case.op, n_tokens=case.n_tokens)["seconds"])
            if case.op == "prefill":
                children[k].ask("rewind", n_tokens=before)
        if i:
            found.append((rate[0], rate[1]))
    return found


def opened(libraries: Sequence[Path], opening: Opening, tokens: list[int], turn: int) -> list[Child]:
    """One process for each build, in their order; every other turn the second one is opened first."""
    children: dict[int, Child] = {}
    for k in (0, 1) if turn % 2 == 0 else (1, 0):
        os.environ["KVTIER_LIBRARY"] = str(libraries[k].resolve())
        children[k] = Child(opening, tokens)
    return [children[0], children[1]]


def show(kind: str, case: Case, found: Rates) -> None:
    ratios = sorted(second / first for first, second in found)
    first, second = (statistics.median(rate) for rate in zip(*found, strict=True))
    behind = "behind" if case.op == "prefill" else "at"
    what = f"{case.op} {behind} {case.context:,} tokens, {kind}, {case.threads} thread{'s' if case.threads > 1 else ''}"
    spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
    print(f"| {what} | {first:.1f} | {second:.1f} | {statistics.median(ratios):.3f} ({spread}) |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs=2, type=Path)
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("-c", "--contexts", default="8k,32k")
    parser.add_argument("-t", "--threads", default="1,2")
    parser.add_argument("--types", default="f16")
    parser.add_argument("--openings", type=int, default=4, help="of each build")
    parser.add_argument("--rounds", type=int, default=3, help="of each opening; half as many of prefill")
    parser.add_argument("--decode", type=int, default=16, help="tokens of a round")
    parser.add_argument("--no-prefill", action="store_true")
    options = parser.parse_args()
    contexts = [parse_tokens(text) for text in options.contexts.split(",")]
    cases = []
    for context, threads in itertools.product(contexts, map(int, options.threads.split(","))):
        cases.append(Case("decode", options.decode, context, threads))
        if not options.no_prefill:
            cases.append(Case("prefill", BATCH, context // 2, threads))
    path = resolve(options.model)
    text = Path(os.__file__).with_name("subprocess.py").read_text(encoding="utf-8")
    print(f"{hardware.cpu_name()}; {path.name}; {options.libraries[0]} and {options.libraries[1]}\n")
    print("| | first | second | second / first |\n| --- | ---: | ---: | ---: |")
    for kind in options.types.split(","):
        opening = Opening(str(path), Configuration(kind, "kvtier", kind, kind), max(contexts) + 2 * BATCH, 1)
        os.environ["KVTIER_LIBRARY"] = str(options.libraries[0].resolve())
        with Child(opening) as child:
            tokens = child.ask("tokenize", text=text)["tokens"]
        found: dict[Case, Rates] = {case: [] for case in cases}
        for turn in range(options.openings):
            children = opened(options.libraries, opening, tokens, turn)
            try:
                for case in cases:
                    n_rounds = options.rounds if case.op == "decode" else max(1, options.rounds // 2)
                    found[case] += rates(children, case, n_rounds)
            finally:
                for child in children:
                    child.close()
        for case in cases:
            show(kind, case, found[case])


if __name__ == "__main__":
    main()
