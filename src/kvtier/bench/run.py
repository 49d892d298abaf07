"""Runs a benchmark: children kept alive side by side, timed one at a time in turn."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ..machine.hardware import cpu_count, cpu_name
from ..measuring.child import Child
from ..measuring.config import Configuration, Opening, rope_for
from ..measuring.errors import MeasuringError
from ..measuring.stock import Stock, look
from .plan import STOCK_F16, BenchPlan, bounded_quarter, quarter, resident_configurations
from .results import BenchResult, DecodeResult, PrefillResult, Times, Traffic

Report = Callable[[str], None]

_SLACK_TOKENS = 512  # room for the timed steps and one batch


@dataclass
class _Lane:
    """One configuration's process and what is known about it."""

    child: Child
    how: str = ""
    kv_bytes: int = 0


@dataclass
class _Bench:
    plan: BenchPlan
    report: Report
    tokens: list[int] = field(default_factory=list)
    n_ctx_train: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)
    folder: Path = Path()  # of the states of the context at hand, by cache types
    states: dict[tuple[str, str], Path] = field(default_factory=dict)

    def learn(self) -> tuple[dict[int, float], float]:
        """Tokenise the text, then measure memory and disk; bytes per second by threads, and of the disk."""
        plan = self.plan
        with Child(Opening(str(plan.model), Configuration("tokeniser"), 256, 1)) as child:
            self.tokens = child.ask("tokenize", text=plan.text)["tokens"][: self._tokens_needed()]
            self.n_ctx_train = int(child.info["n_ctx_train"])
        if not self.tokens:
            raise MeasuringError("the text has no tokens")
        with Child() as child:
            self.report("memory bandwidth")
            memory = {n: float(child.ask("bandwidth", n_threads=n)["bytes_per_s"]) for n in plan.threads}
            disk = 0.0
            if plan.tiers and not plan.stock_only:
                self.report("disk bandwidth")
                disk = float(child.ask("disk", directory=str(plan.kv_dir or tempfile.gettempdir()))["bytes_per_s"])
        return memory, disk

    def _tokens_needed(self) -> int:
        longest = max(self.plan.contexts, default=0) + _SLACK_TOKENS
        return max(1024, self.plan.prefill, longest if self.plan.computed else 0)

    def open(self, stack: ExitStack, config: Configuration, context: int) -> Child | None:
        """A process with this configuration open, ended with the stack; None, and a failure noted, if it cannot be."""
        plan = self.plan
        n_ctx = context + _SLACK_TOKENS
        rope = rope_for(n_ctx, self.n_ctx_train)
        opening = Opening(str(plan.model), config, n_ctx, plan.threads[0], plan.n_batch, rope)
        try:
            return stack.enter_context(Child(opening, self.tokens))
        except MeasuringError as error:
            self.fail(config.name, context, error)
            return None

    def fail(self, name: str, context: int, error: MeasuringError) -> None:
        self.failures.append((f"{name} at {context} tokens", error.about(name)))
        self.report(f"{name}: {error}")

    def lane(self, stack: ExitStack, config: Configuration, context: int) -> _Lane | None:
        """An open process whose context holds `context` tokens."""
        config = config.for_model(self.plan.model, context, self.plan.n_batch)
        self.report(f"{config.name}: filling {context:,} tokens")
        child = self.open(stack, config, context)
        if child is None:
            return None
        try:
            answer = self._fill(child, config, max(context, 1))
        except MeasuringError as error:
            self.fail(config.name, context, error)
            return None
        return _Lane(child, str(answer["how"]), int(answer["kv_bytes"]))

    def _fill(self, child: Child, config: Configuration, n_tokens: int) -> dict[str, Any]:
        state = self.states.get((config.type_k, config.type_v))
        if not self.plan.computed:
            return child.ask("fill", n_tokens=n_tokens)
        if state is not None:
            return child.ask("load", path=str(state), n_tokens=n_tokens)
        if config.engine == "stock":  # its speed does not depend on what the cells hold
            return child.ask("fill", n_tokens=n_tokens)
        answer = child.ask("compute", n_tokens=n_tokens, n_threads=max(self.plan.threads))
        state = self.folder / f"{config.type_k}-{config.type_v}.state"
        child.ask("save", path=str(state))
        self.states[config.type_k, config.type_v] = state
        return answer


@contextmanager
def _page_directory(plan: BenchPlan) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=plan.kv_dir) as name:
        yield Path(name)


def _decode_at(bench: _Bench, context: int) -> list[DecodeResult]:
    plan = bench.plan
    with ExitStack() as stack:
        bench.states.clear()
        bench.folder = stack.enter_context(_page_directory(plan))
        lanes: dict[str, _Lane] = {}
        for config in resident_configurations(plan):
            if (lane := bench.lane(stack, config, context)) is not None:
                lanes[config.name] = lane
        if plan.tiers and not plan.stock_only and context > 0 and STOCK_F16.name in lanes:
            directory = stack.enter_context(_page_directory(plan))
            n_bytes = lanes[STOCK_F16.name].kv_bytes
            rows = [quarter(n_bytes, directory)]
            if plan.fidelity is not None:
                rows += [bounded_quarter(n_bytes, directory, plan.fidelity, fmt) for fmt in ("f16", "q8_0")]
            for config in rows:
                if (lane := bench.lane(stack, config, context)) is not None:
                    lanes[config.name] = lane
        return [_rounds(bench, lanes, context, n_threads) for n_threads in plan.threads] if lanes else []


def _rounds(bench: _Bench, lanes: dict[str, _Lane], context: int, n_threads: int) -> DecodeResult:
    """Time every lane once per round. A lane that fails leaves the table, and the others go on."""
    plan, n = bench.plan, bench.plan.block_tokens(context)
    turns = _Turns(bench, {name: lane.child for name, lane in lanes.items()}, context)
    disk, read = dict.fromkeys(lanes, 0.0), dict.fromkeys(lanes, 0.0)
    for name in turns.order(0):
        turns.ask(name, "threads", n_threads=n_threads)
        turns.ask(name, "decode", n_tokens=min(n, 8))  # warm caches, threads and clocks
    for i in range(plan.rounds):
        bench.report(f"decode at {context:,} tokens, {n_threads} threads: round {i + 1} of {plan.rounds}")
        for name in turns.order(i):
            answer = turns.ask(name, "decode", n_tokens=n)
            turns.add(name, answer)
            disk[name] += float(answer.get("disk_read_bytes", 0)) / (n * plan.rounds)
            read[name] += float(answer.get("kv_read_bytes", 0)) / (n * plan.rounds)
    traffic = {
        name: Traffic(int(lanes[name].child.info["model_bytes"]), round(read[name]) or lanes[name].kv_bytes, disk[name])
        for name in turns.times
    }
    filled = {name: lanes[name].how for name in turns.times}
    return DecodeResult(context, n_threads, n, turns.times, turns.cpu_times, traffic, filled)


class _Turns:
    """Processes that take turns. One that fails is out from then on, and its times with it."""

    def __init__(self, bench: _Bench, children: dict[str, Child], context: int) -> None:
        self._bench, self._children, self._context = bench, children, context
        self.times: Times = {name: [] for name in children}
        self.cpu_times: Times = {name: [] for name in children}

    def order(self, i: int) -> list[str]:
        """Who is still in, forwards in even turns and backwards in odd ones, so that nobody always follows the same."""
        return list(self.times) if i % 2 == 0 else list(reversed(self.times))

    def ask(self, name: str, op: str, **arguments: Any) -> dict[str, Any]:
        """The answer, empty if this process is out."""
        if name not in self.times:
            return {}
        try:
            return self._children[name].ask(op, **arguments)
        except MeasuringError as error:
            self._bench.fail(name, self._context, error)
            del self.times[name], self.cpu_times[name]
            return {}

    def add(self, name: str, answer: dict[str, Any]) -> None:
        if name in self.times:
            self.times[name].append(float(answer["seconds"]))
            self.cpu_times[name].append(float(answer["cpu_seconds"]))


def _prefill(bench: _Bench) -> PrefillResult | None:
    """Chunks of one prompt, each computed by every configuration before the next chunk starts."""
    plan = bench.plan
    n_threads = max(plan.threads)
    with ExitStack() as stack:
        opened = {config.name: bench.open(stack, config, plan.prefill) for config in resident_configurations(plan)}
        children = {name: child for name, child in opened.items() if child is not None}
        turns = _Turns(bench, children, plan.prefill)
        for name in turns.order(0):
            turns.ask(name, "threads", n_threads=n_threads)
            turns.ask(name, "prefill", n_tokens=64)  # warm
            turns.ask(name, "rewind", n_tokens=0)
        starts = chunk_starts(plan.prefill, plan.n_batch, plan.prefill_sampled)
        for i, start in enumerate(starts):
            bench.report(f"prefill: chunk {i + 1} of {len(starts)}")
            for name in turns.order(i):
                if plan.prefill_sampled and start > 0:
                    turns.ask(name, "fill", n_tokens=start)
                turns.add(name, turns.ask(name, "prefill", n_tokens=plan.n_batch))
        if not turns.times:
            return None
        lengths = (plan.prefill, n_threads, plan.n_batch)
        return PrefillResult(*lengths, plan.prefill_sampled, turns.times, turns.cpu_times)


def chunk_starts(n_tokens: int, chunk: int, sampled: bool, n_samples: int = 4) -> list[int]:
    """Where the chunks of a prefill begin: all of them, or `n_samples` in the middles of equal parts.

    A chunk's cost grows linearly with its position, so the mean over the middles is the mean over all.
    """
    if not sampled or n_tokens < 2 * n_samples * chunk:
        return list(range(0, n_tokens - chunk + 1, chunk))
    part = n_tokens / n_samples
    return [round((i + 0.5) * part - chunk / 2) for i in range(n_samples)]


def run(plan: BenchPlan, report: Report, stock: Stock | None = None) -> BenchResult:
    """Measure everything in the plan. `stock` is asked for here if it is not given.

    Raises MeasuringError if nothing can be measured.
    """
    if 0 < plan.prefill < plan.n_batch:
        raise MeasuringError(f"a prompt of {plan.prefill} tokens is shorter than one batch of {plan.n_batch}")
    bench = _Bench(plan, report)
    report("how stock llama.cpp was built")
    stock = stock or look(plan.model)
    report("how busy the machine is")
    busy = psutil.cpu_percent(interval=1.0) / 100
    memory, disk = bench.learn()
    decode: list[DecodeResult] = []
    for context in plan.contexts:
        decode += _decode_at(bench, context)
    prefill = _prefill(bench) if plan.prefill > 0 else None
    if not decode and prefill is None:
        raise MeasuringError("nothing was measured: " + "; ".join(f"{name}: {error}" for name, error in bench.failures))
    machine = {
        "processor": cpu_name(),
        "cpus": str(cpu_count()),
        "system": platform.platform(),
    }
    return BenchResult(
        plan.model.name, memory, disk, busy, tuple(decode), prefill, tuple(bench.failures), machine, stock
    )
