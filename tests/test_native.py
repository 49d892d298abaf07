"""The border to the native library: header, symbols and error codes cannot drift apart."""

from __future__ import annotations

import re
from pathlib import Path

import cffi
import pytest

from kvtier import errors
from kvtier.errors import LibraryError, NativeError
from kvtier.figures import TIERS, Figures
from kvtier.formats import FORMATS
from kvtier.native import binding, runtime


@pytest.fixture(scope="module", autouse=True)
def library() -> runtime.Runtime:
    return runtime.load()


def _header() -> str:
    return binding.header_path(binding.library_path()).read_text(encoding="utf-8")


def test_every_declared_function_is_exported() -> None:
    names = re.findall(r"\b(kvt_\w+)\(", binding.declarations(_header()))
    assert len(names) > 15
    ffi = cffi.FFI()
    ffi.cdef(binding.declarations(_header()))
    lib = ffi.dlopen(str(binding.library_path()))
    for name in names:
        assert getattr(lib, name)


def test_error_classes_are_the_list_of_the_header() -> None:
    text = binding.header_path(binding.library_path()).with_name("kvtier-errors.h").read_text(encoding="utf-8")
    listed = {int(code): message for code, message in re.findall(r"X\(\w+,\s*(-?\d+), \"(.*?)\"\)", text)}
    assert set(errors.NATIVE_ERRORS) == set(listed) - {0}
    for code, message in listed.items():
        assert binding.error_message(code) == message
    for code, cls in errors.NATIVE_ERRORS.items():
        raised = errors.from_code(code, "what happened")
        assert type(raised) is cls and raised.code == code and raised.message == "what happened"
    unknown = errors.from_code(-999, "x")
    assert type(unknown) is NativeError and unknown.code == -999


def test_every_exit_code_is_documented() -> None:
    classes = [errors.KvtierError]
    for cls in classes:
        classes.extend(sub for sub in cls.__subclasses__() if sub not in classes and sub.__module__ == "kvtier.errors")
    documented = {int(code) for code in re.findall(r"^(\d+) +\w", errors.__doc__ or "", re.MULTILINE)}
    assert {cls.exit_code for cls in classes} | {129, 130, 143} == documented


def test_names_match_the_library() -> None:
    assert binding.version()
    assert binding.ggml_version()
    assert binding.isa() in {"scalar", "avx2", "avx512", "avx512vnni", "neon"}
    domain = binding.Domain("")
    figures = domain.figures()
    assert tuple(figures.tiers) == TIERS
    assert all(tuple(tier.bytes_by_format) == FORMATS for tier in figures.tiers.values())
    assert figures.tiers["host"].budget_bytes is None
    declared = _header().split("kvt_tier_figures tier[5];")[1].split("}")[0]
    assert set(Figures.__dataclass_fields__) - {"tiers"} == set(re.findall(r"(?:uint64_t|double) +(\w+);", declared))
    domain.close()


def test_a_closed_domain_says_so() -> None:
    domain = binding.Domain("")
    assert domain.is_open and domain.last_error() is None and domain.n_layers() == 0
    domain.close()
    domain.close()
    assert not domain.is_open
    for use in (
        domain.figures,
        domain.n_layers,
        domain.last_error,
        domain.bind,
        lambda: domain.layer(0),
        lambda: domain.pages(0),
    ):
        with pytest.raises(NativeError, match="closed"):
            use()


def test_a_layer_that_does_not_exist() -> None:
    domain = binding.Domain("")
    with pytest.raises(errors.InvalidArgumentError, match="layer 3"):
        domain.layer(3)
    domain.close()


def test_an_unknown_instruction_set() -> None:
    before = binding.isa()
    with pytest.raises(NativeError, match="sse9"):
        binding.set_isa("sse9")
    assert binding.isa() == before


def test_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(binding.LIBRARY_ENV, str(tmp_path / "none.so"))
    with pytest.raises(LibraryError, match=r"none\.so"):
        binding.library_path()
    with pytest.raises(LibraryError, match="declarations"):
        binding.declarations("nothing of ours")
