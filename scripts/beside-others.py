"""Tokens per second beside other programs: fixed numbers of threads, kvtier's own choice, and stock llama.cpp.

    python scripts/beside-others.py [--model smollm2] [--rows nothing,loops,runs] [--seconds 4] [--threads 2]

Each column is a process of its own that waits while another is measured; they take turns. The rows differ in what runs
beside them: nothing, as many busy loops as threads, or another llama.cpp with that many threads and the loops. Prints
one table for decode and one for prefill, and for the column "chosen" the threads that it had in the end and its rate in
the first seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Final

PROMPT: Final = 256  # tokens of one prefill; decode goes on from there
SPAN: Final = 256  # decoded tokens until the context is taken back to PROMPT
ROWS: Final = {
    "nothing": "nothing",
    "loops": "busy loops",
    "runs": "another run, busy loops",
}
_LOOP: Final = "while True: pass"


@dataclass(frozen=True)
class Column:
    """One way to compute. `threads` None: kvtier chooses."""

    name: str
    stock: bool
    threads: int | None
    env: dict[str, str] = field(default_factory=dict)


def columns(n: int, spins: list[int]) -> list[Column]:
    """What is compared, with up to `n` threads."""
    passive = {"OMP_WAIT_POLICY": "passive"}
    some = [
        Column("1 thread", False, 1),
        Column(f"{n} threads", False, n),
        Column(f"{n}, passive", False, n, passive),
        Column("chosen", False, None),
    ]
    for spin in spins:
        env = {"GOMP_SPINCOUNT": str(spin)}
        some += [Column(f"{n}, spin {spin:,}", False, n, env), Column(f"chosen, spin {spin:,}", False, None, env)]
    return [*some, Column("stock, 1", True, 1), Column(f"stock, {n}", True, n)]


class Worker:
    """A process with the model open, which computes when it is asked to."""

    def __init__(self, model: str, column: Column) -> None:
        env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | column.env
        job = json.dumps([model, column.stock, column.threads])
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a process that measures has ended; its error is above")
        return json.loads(line)

    def start(self, kind: str, seconds: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([kind, seconds]) + "\n")
        self._process.stdin.flush()

    def measure(self, kind: str, seconds: float) -> tuple[float, int]:
        """Tokens per second, and the threads that it had at the end."""
        self.start(kind, seconds)
        rate, threads = self._answer()
        return float(rate), int(threads)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def work(model: str, stock: bool, threads: int | None) -> None:
    """The measuring process: opens the model, then answers lines with a kind and seconds."""
    import llama_cpp

    import kvtier

    given = {} if threads is None else {"n_threads": threads, "n_threads_batch": threads}
    common: dict[str, Any] = {"n_ctx": PROMPT + SPAN + 64, "n_batch": PROMPT, "n_ubatch": PROMPT, "verbose": False}
    llm: Any = (
        llama_cpp.Llama(model, flash_attn=True, n_gpu_layers=0, **common, **given)
        if stock
        else kvtier.Llama(model, **common, **given)
    )
    prompt = (llm.tokenize(b"The tide comes in twice a day, and the harbour fills. " * 60))[:PROMPT]
    llm.eval(prompt[:8])
    print("[]", flush=True)
    for line in sys.stdin:
        kind, seconds = json.loads(line)
        llm.n_tokens = 0 if kind == "prefill" else 8
        n, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < seconds:
            if kind == "prefill":
                llm.n_tokens = 0
                llm.eval(prompt)
                n += len(prompt)
            else:
                llm.n_tokens = llm.n_tokens if llm.n_tokens < SPAN else 8
                llm.eval(prompt[:1])
                n += 1
        figures = None if stock else llm.threads
        used = threads if figures is None else figures.prefill if kind == "prefill" else figures.decode
        print(json.dumps([n / spent, used]), flush=True)


def beside(row: str, model: str, n: int) -> tuple[list[subprocess.Popen[bytes]], list[Worker]]:
    """Start what runs beside."""
    loops = [] if row == "nothing" else [subprocess.Popen([sys.executable, "-c", _LOOP]) for _ in range(n)]
    runs = [Worker(model, Column("", True, n))] if row == "runs" else []
    for run in runs:
        run.start("decode", 1e6)
    return loops, runs


def measure_row(row: str, workers: dict[str, Worker], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Rates of every column, by kind; the median over the rounds."""
    loops, runs = beside(row, args.model, args.threads)
    results: dict[str, dict[str, Any]] = {}
    try:
        for kind in args.kinds.split(","):
            rates: dict[str, list[float]] = {name: [] for name in workers}
            used: dict[str, int] = {}
            for i in range(args.rounds + 1):  # the first is for warming up, and is the time after a change
                for name in [*workers] if i % 2 == 0 else [*workers][::-1]:
                    if i == 0 and not name.startswith("chosen"):
                        continue
                    rate, used[name] = workers[name].measure(kind, args.seconds)
                    rates[name].append(rate)
                    print(f"{ROWS[row]}, {kind}, {name}: {rate:.3g} tokens/s", file=sys.stderr, flush=True)
            results[kind] = {
                name: {
                    "first": of[0],
                    "rate": statistics.median(of[1:] if name.startswith("chosen") else of),
                    "threads": used[name],
                }
                for name, of in rates.items()
            }
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
        for run in runs:
            run.end()
    return results


def show(results: dict[str, dict[str, dict[str, Any]]], names: list[str]) -> None:
    """Tables for people."""
    for kind in sorted({kind for row in results.values() for kind in row}):
        print(f"\n{kind}, tokens/s\n\n| beside | {' | '.join(names)} | of the best fixed |")
        print(f"| {' | '.join('---' for _ in range(len(names) + 2))} |")
        for row, of in results.items():
            fixed = max(of[kind][n]["rate"] for n in names if "thread" in n)
            cells = []
            for name in names:
                cell = f"{of[kind][name]['rate']:.3g}"
                if name.startswith("chosen"):
                    cell += f" ({of[kind][name]['threads']}; first {of[kind][name]['first']:.3g})"
                cells.append(cell)
            print(f"| {ROWS[row]} | {' | '.join(cells)} | {of[kind]['chosen']['rate'] / fixed:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", default="nothing,loops,runs")
    parser.add_argument("--kinds", default="decode,prefill")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one measurement")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="the larger number of threads, and of loops")
    parser.add_argument("--spin", default="", help="values of GOMP_SPINCOUNT to compare as well, with commas")
    parser.add_argument("--only", default="", help="columns to measure, with semicolons; all")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(*json.loads(args.worker))
        return
    from kvtier.model.names import resolve

    args.model = str(resolve(args.model))
    chosen = columns(args.threads, [int(spin) for spin in args.spin.split(",") if spin])
    chosen = [column for column in chosen if not args.only or column.name in args.only.split(";")]
    names = [column.name for column in chosen]
    if "chosen" not in names or not any("thread" in name for name in names):
        parser.error(
            f"--only {args.only!r} must name 'chosen' and a fixed number of threads, of: "
            f"{'; '.join(column.name for column in columns(args.threads, []))}"
        )
    workers = {column.name: Worker(args.model, column) for column in chosen}
    try:
        results = {row: measure_row(row, workers, args) for row in args.rows.split(",")}
    finally:
        for worker in workers.values():
            worker.end()
    if args.json:
        print(json.dumps(results))
    else:
        show(results, names)


if __name__ == "__main__":
    main()
