"""The benchmark's tables for people, and JSON for programs."""

from __future__ import annotations

from typing import Any

from ..measuring.figures import Spread
from ..measuring.stock import MARK
from ..measuring.table import markdown
from .results import BASELINES, BenchResult, DecodeResult, PrefillResult

BUSY = 0.05  # of the processors; idle machines stay below


def context_name(context: int) -> str:
    """ "empty", "8k", "1,000": a context as the table's headings say it."""
    if context == 0:
        return "empty"
    return f"{context // 1024}k" if context % 1024 == 0 else f"{context:,}"


def _ratio(value: Spread) -> str:
    return f"{value.median:.2f} ({value.low:.2f}..{value.high:.2f})"


def _against(result: DecodeResult | PrefillResult, name: str, bench: BenchResult, *, cpu: bool = False) -> list[str]:
    ratio = result.cpu_ratio if cpu else result.ratio
    return [
        "-"
        if name == baseline or baseline not in result.seconds
        else _ratio(ratio(name, baseline)) + (MARK if bench.slow(name) or bench.slow(baseline) else "")
        for baseline in BASELINES
    ]


def _cpu_header(result: DecodeResult | PrefillResult, bench: BenchResult) -> tuple[str, ...]:
    """Columns of processor time, where they say more than wall time: one thread on a machine that was busy."""
    return ("CPU x f16", "CPU x q8_0") if result.n_threads == 1 and bench.busy > BUSY else ()


def decode_table(result: DecodeResult, bench: BenchResult) -> str:
    """One context and thread count: rates, noise, ratios, roofline."""
    memory = bench.memory_bytes_per_s[result.n_threads]
    cpu = _cpu_header(result, bench)
    rows = []
    for name in result.seconds:
        rate, traffic = result.rate(name), result.traffic[name]
        roof = traffic.roof(memory, bench.disk_bytes_per_s)
        moved = f"{(traffic.weight_bytes + traffic.kv_bytes) / 1e6:,.0f}"
        if traffic.disk_bytes > 0:
            moved += f" + {traffic.disk_bytes / 1e6:,.0f} disk"
        ratios = [*_against(result, name, bench), *(_against(result, name, bench, cpu=True) if cpu else ())]
        share = f"{100 * rate.median / roof:.0f} %"
        tokens_per_s = f"{rate.median:.1f}{MARK if bench.slow(name) else ''}"
        rows.append([name, tokens_per_s, f"{100 * rate.noise:.0f} %", *ratios, moved, f"{roof:.0f}", share])
    stock = ("x stock f16", "x stock q8_0", *cpu)
    header = ("configuration", "tokens/s", "noise", *stock, "MB/token", "roof tokens/s", "of roof")
    title = f"### decode, {context_name(result.context)} context, {_threads(result.n_threads)}"
    return f"{title}\n\n{markdown(header, rows)}"


def _threads(n: int) -> str:
    return f"{n} thread" + ("" if n == 1 else "s")


def prefill_table(result: PrefillResult, bench: BenchResult) -> str:
    """Prefill rates and ratios of sums, with the range of the chunks' ratios."""
    cpu = _cpu_header(result, bench)
    rows = []
    for name in result.seconds:
        ratios = [*_against(result, name, bench), *(_against(result, name, bench, cpu=True) if cpu else ())]
        rows.append([name, f"{result.rate(name):.1f}{MARK if bench.slow(name) else ''}", *ratios])
    how = f", {len(next(iter(result.seconds.values())))} chunks sampled" if result.sampled else ""
    title = f"### prefill of {context_name(result.n_tokens)}, {_threads(result.n_threads)}{how}"
    return f"{title}\n\n{markdown(('configuration', 'tokens/s', 'x stock f16', 'x stock q8_0', *cpu), rows)}"


def _heading(bench: BenchResult) -> str:
    memory = ", ".join(f"{_threads(n)}: {b / 1e9:.1f} GB/s" for n, b in bench.memory_bytes_per_s.items())
    lines = [f"model: {bench.model}", f"memory read: {memory}"]
    if bench.stock is not None:
        lines.append(f"stock: {bench.stock.build.line()}")
        lines += [f"warning: {bench.stock.warning()}"] if bench.stock.build.problems() else []
    if bench.disk_bytes_per_s:
        lines.append(f"disk read: {bench.disk_bytes_per_s / 1e9:.2f} GB/s")
    if bench.busy > BUSY:
        lines.append(f"other programs used {100 * bench.busy:.0f} % of the processors before the start: expect noise")
    return "\n".join(lines)


def text(bench: BenchResult) -> str:
    """The whole report as Markdown."""
    parts = [_heading(bench), *(decode_table(result, bench) for result in bench.decode)]
    if bench.prefill is not None:
        parts.append(prefill_table(bench.prefill, bench))
    parts.append(
        "x: median of the rounds' ratios of times, taken next to each other (smallest..largest); CPU: of processor time"
    )
    if bench.stock is not None and any(map(bench.slow, BASELINES)):
        parts.append(bench.stock.footnote())
    return "\n\n".join(parts)


def _spread(value: Spread) -> dict[str, float]:
    return {"median": value.median, "low": value.low, "high": value.high, "n": value.n}


def _ratios_json(result: DecodeResult | PrefillResult, name: str, bench: BenchResult) -> dict[str, Any]:
    """Ratios by baseline, and the names of those that come from a slow build of stock."""
    baselines = [b for b in BASELINES if b in result.seconds and b != name]
    return {
        "ratios": {b: _spread(result.ratio(name, b)) for b in baselines},
        "slow_build": bench.slow(name),
        "slow_baselines": [b for b in baselines if bench.slow(b)],
    }


def _decode_json(result: DecodeResult, bench: BenchResult) -> dict[str, Any]:
    rows = []
    for name, seconds in result.seconds.items():
        traffic = result.traffic[name]
        roof = traffic.roof(bench.memory_bytes_per_s[result.n_threads], bench.disk_bytes_per_s)
        rows.append(
            {
                "name": name,
                "tokens_per_s": _spread(result.rate(name)),
                **_ratios_json(result, name, bench),
                "weight_bytes": traffic.weight_bytes,
                "kv_bytes": traffic.kv_bytes,
                "disk_bytes": traffic.disk_bytes,
                "roof_tokens_per_s": roof,
                "filled": result.filled[name],
                "seconds": seconds,
                "cpu_seconds": result.cpu_seconds[name],
            }
        )
    return {"context": result.context, "n_threads": result.n_threads, "block_tokens": result.block_tokens, "rows": rows}


def _prefill_json(result: PrefillResult, bench: BenchResult) -> dict[str, Any]:
    rows = [
        {
            "name": name,
            "tokens_per_s": result.rate(name),
            **_ratios_json(result, name, bench),
            "seconds": seconds,
            "cpu_seconds": result.cpu_seconds[name],
        }
        for name, seconds in result.seconds.items()
    ]
    return {
        "n_tokens": result.n_tokens,
        "n_threads": result.n_threads,
        "chunk_tokens": result.chunk_tokens,
        "sampled": result.sampled,
        "rows": rows,
    }


def to_json(bench: BenchResult) -> dict[str, Any]:
    """Every number of the report and the times behind it."""
    return {
        "model": bench.model,
        "machine": bench.machine,
        "stock": None if bench.stock is None else bench.stock.to_dict(),
        "busy": bench.busy,
        "memory_bytes_per_s": {str(n): b for n, b in bench.memory_bytes_per_s.items()},
        "disk_bytes_per_s": bench.disk_bytes_per_s,
        "decode": [_decode_json(result, bench) for result in bench.decode],
        "prefill": _prefill_json(bench.prefill, bench) if bench.prefill else None,
        "failures": [{"name": name, "error": error} for name, error in bench.failures],
    }
