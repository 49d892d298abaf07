"""What is written in more than one place says the same everywhere."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import llama_cpp

from kvtier import settings
from kvtier.doctor import cuda
from kvtier.native import binding, runtime

from .scripts_loader import load

ROOT = Path(__file__).resolve().parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def first(pattern: str, text: str) -> str:
    found = re.search(pattern, text, flags=re.M)
    assert found is not None, pattern
    return found.group(1)


def compatible() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(llama-cpp-python, ggml) of every row that docs/compatibility.md says yes to, newest first."""
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]*?) \| ([\d.]+) \| yes \|", page, flags=re.M)
    numbers = [(re.findall(r"\d+\.\d+\.\d+", releases), ggml) for releases, ggml in rows]
    return [
        (tuple(map(int, r.split("."))), tuple(map(int, ggml.split("."))))
        for releases, ggml in numbers
        for r in releases
    ]


def test_one_version_everywhere() -> None:
    written = first(r'^version = "(.*)"', PROJECT)
    runtime.load()
    assert version("kvtier") == written
    assert binding.version() == written


def test_the_changelog_has_an_entry_for_it() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[(Unreleased|{re.escape(version('kvtier'))})\]", changelog, flags=re.M)


def test_dependency_range_is_the_documented_one() -> None:
    releases = [release for release, _ in compatible()]
    oldest, newest = min(releases), max(releases)
    assert f'"llama-cpp-python>={".".join(map(str, oldest))},<={".".join(map(str, newest))}"' in PROJECT
    assert f'"llama-cpp-python{cuda.SUPPORTED}"' in PROJECT, "and the one that the doctor names"


def test_the_library_accepts_the_documented_ggml_versions() -> None:
    header = (ROOT / "csrc" / "plugin" / "ggml-versions.h").read_text(encoding="utf-8")
    minors = [ggml[1] for _, ggml in compatible()]
    assert int(first(r"MINOR_MIN (\d+)", header)) == min(minors)
    assert int(first(r"MINOR_MAX (\d+)", header)) == max(minors)


def test_the_pin_is_what_is_tested() -> None:
    assert llama_cpp.__version__ == load("fetch-llama").VERSION == ".".join(map(str, compatible()[0][0]))


def test_the_demo_text_is_longer_than_promised_and_fits(smollm2_path: Path) -> None:
    demo = load("demo-text")
    text = demo.text()
    assert text.count(demo.SECRET) == 1 and 0.1 < text.index(demo.SECRET) / len(text) < 0.3
    assert demo.NUMBER in (ROOT / "Makefile").read_text(encoding="utf-8")
    model = llama_cpp.Llama(str(smollm2_path), vocab_only=True, verbose=False)
    assert 6000 < len(model.tokenize(text.encode())) <= 8192 - 64


def test_settings_have_the_library_s_own_defaults() -> None:
    """llama.cpp's own programs leave them to the library, Python knows them to plan and to measure with."""
    header = (ROOT / "csrc" / "plugin" / "settings.h").read_text(encoding="utf-8")
    assert first(r"KVT_EPS_DEFAULT ([\d.]+)f", header) == settings.DEFAULT_EPS
    assert float(first(r"mass_decay = ([\d.]+)f", header)) == settings.MASS_DECAY
    assert int(first(r"protect_first = (\d+)", header)) == settings.PROTECT_FIRST
    assert int(first(r"protect_last = (\d+)", header)) == settings.PROTECT_LAST
