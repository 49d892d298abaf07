"""llama.cpp's own tests at the pin pass on our device, and the page that lists what is not supported says the truth."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import pytest

from . import report, upstream
from .reasons import reason_of

pytestmark = pytest.mark.long  # minutes, and one file: conftest.py starts with it

CasesOf = Callable[[str], list[upstream.OpCase]]

# what was run when this was written; fewer means that the device refuses what it used to compute
FLOORS = {"SET_ROWS": 99, "FLASH_ATTN_EXT": 5300}
N_ARCHS = 133


@pytest.fixture(scope="module")
def programs() -> Path:
    return upstream.build()


@pytest.fixture(scope="module")
def cases_of(programs: Path) -> CasesOf:
    """Runs an operation's cases when a test first asks for them."""
    return lru_cache(maxsize=None)(partial(upstream.op_cases, programs))


@pytest.fixture(scope="module")
def archs(programs: Path) -> list[upstream.ArchRow]:
    return upstream.arch_rows(programs)


@pytest.mark.parametrize("op", report.OPS)
def test_no_case_fails(cases_of: CasesOf, op: str) -> None:
    failed = [f"{case.params}: {case.error}" for case in cases_of(op) if case.error]
    assert not failed, f"{len(failed)} of {len(cases_of(op))} cases of {op} failed:\n" + "\n".join(failed[:20])


@pytest.mark.parametrize("op", report.OPS)
def test_enough_cases_are_computed(cases_of: CasesOf, op: str) -> None:
    assert sum(case.is_supported for case in cases_of(op)) >= FLOORS[op]


@pytest.mark.parametrize("op", report.OPS)
def test_every_refused_case_has_a_reason(cases_of: CasesOf, op: str) -> None:
    assert not [case.params for case in cases_of(op) if not case.is_supported and reason_of(case) is None]


def test_every_architecture_gives_the_cpu_backends_logits(archs: list[upstream.ArchRow]) -> None:
    assert not [row for row in archs if "FAIL" in (row.logits, row.roundtrip)]
    assert sum(row.logits == "OK" for row in archs) >= N_ARCHS


def test_the_page_is_up_to_date(cases_of: CasesOf, archs: list[upstream.ArchRow]) -> None:
    page = report.render({op: cases_of(op) for op in report.OPS}, archs)
    if os.environ.get("KVTIER_WRITE_DOCS"):
        report.PATH.write_text(page, encoding="utf-8")
    assert report.PATH.read_text(encoding="utf-8") == page, "write it with: make conformance KVTIER_WRITE_DOCS=1"
