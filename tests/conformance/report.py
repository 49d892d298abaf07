"""Writes docs/conformance.md from the records of a run; the test compares the file with a fresh run."""

from __future__ import annotations

import textwrap
from collections import Counter

from .reasons import REASONS, reason_of
from .upstream import ROOT, ArchRow, OpCase

PATH = ROOT / "docs" / "conformance.md"
GROUP_BY = {"SET_ROWS": ("type_src", "type_dst", "type_idx"), "FLASH_ATTN_EXT": ("type_K", "type_V", "hsk", "hsv")}
OPS = tuple(GROUP_BY)


def wrapped(lines: list[str]) -> list[str]:
    """The lines with prose wrapped to 120 characters; rows of tables stay whole."""
    return [part for line in lines for part in ([line] if line.startswith("|") else wrap(line) or [""])]


def wrap(line: str) -> list[str]:
    return textwrap.wrap(line, 120, break_long_words=False, break_on_hyphens=False)


def op_section(op: str, cases: list[OpCase]) -> list[str]:
    taken = [case for case in cases if case.is_supported]
    refused = [case for case in cases if not case.is_supported]
    lines = [f"## test-backend-ops: {op}", ""]
    lines += [
        f"{len(cases)} cases; {len(taken)} computed by our pages and kernels, "
        f'{len(refused)} answered with "not supported".',
        "",
    ]
    if not refused:
        return lines
    groups = Counter((reason_of(case), tuple(case.values[key] for key in GROUP_BY[op])) for case in refused)
    for reason in (r for r in REASONS if r.op == op):
        rows = sorted((values, n) for (covering, values), n in groups.items() if covering is reason)
        if rows:
            lines += [
                f"Not supported: {reason.title} ({sum(n for _, n in rows)} cases). "
                f"{reason.why[0].upper()}{reason.why[1:]}.",
                "",
            ]
            lines += ["| " + " | ".join((*GROUP_BY[op], "cases")) + " |", "| --- " * len(GROUP_BY[op]) + "| ---: |"]
            lines += ["| " + " | ".join(values) + f" | {n} |" for values, n in rows]
            lines.append("")
    return lines


def arch_section(rows: list[ArchRow]) -> list[str]:
    run = [row for row in rows if row.logits == "OK"]
    skipped = [f"{row.arch} ({row.config})" for row in rows if row.logits == "SKIP"]
    lines = ["## test-llama-archs", ""]
    lines += [
        f"{len(rows)} configurations of architectures; {len(run)} run, all with logits equal to the CPU backend's "
        "within upstream's own bound; "
        f"{len(skipped)} are skipped by upstream itself on every backend:",
        "",
        ", ".join(skipped) + ".",
        "",
    ]
    return lines


def render(ops: dict[str, list[OpCase]], archs: list[ArchRow]) -> str:
    lines = [
        "# Conformance with upstream's own tests",
        "",
        "Written by `make conformance KVTIER_WRITE_DOCS=1`; `make conformance` runs the same tests and fails "
        "where this page is out of date.",
        "",
        "The programs are llama.cpp's, at the pin, compiled from `third_party/llama.cpp` unchanged and linked to "
        "the libraries of the installed llama-cpp-python, so that llama.cpp itself is compiled once. `test-"
        "backend-ops` loads our library through `GGML_BACKEND_PATH`. `test-llama-archs` does not load backends by "
        "itself: `tests/conformance/preload-backend.cpp`, linked beside it, does so before its `main`. Every case "
        "runs on the device `KVT0`. K and V that are no cache are taken into temporary pages, so what is tested "
        "is our kernels and never ggml's own attention.",
        "",
    ]
    for op in OPS:
        lines += op_section(op, ops[op])
    lines += arch_section(archs)
    return "\n".join(wrapped(lines)).rstrip() + "\n"
