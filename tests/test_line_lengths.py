"""No line of code or text is longer than 120 characters, but rows of tables, which Markdown cannot break."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MOST = 120
TEXTS = sorted(p for folder in (ROOT, ROOT / "docs") for p in folder.glob("*.md"))
FOLDERS = ("src", "csrc", "tests", "scripts", "cmake")
SOURCES = sorted(
    path
    for path in (ROOT / "CMakeLists.txt", *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*")))
    if path.suffix in (".py", ".cpp", ".h", ".c", ".sh", ".cmake") or path.name == "CMakeLists.txt"
)


@pytest.mark.parametrize("path", [*TEXTS, *SOURCES], ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_are_short(path: Path) -> None:
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    long = [n for n, line in lines if len(line) > MOST and not (path.suffix == ".md" and line.startswith("|"))]
    assert not long, f"{path}: lines {long}"
