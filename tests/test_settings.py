"""Settings: what is refused and why, and what the native library reads."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import KVSettings
from kvtier.errors import ConfigError, NativeError, SettingsError
from kvtier.formats import FORMATS
from kvtier.native import binding, runtime
from kvtier.settings import LEAST_EPS, MAX_EPS


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    runtime.load()


def test_defaults_set_nothing() -> None:
    assert KVSettings().to_native() == ""


def test_every_setting_reaches_the_library(tmp_path: Path) -> None:
    settings = KVSettings(
        host="1GiB",
        disk="2GiB",
        dir=tmp_path,
        host_type_k="Q8_0",
        host_type_v="q4_0",
        disk_type_k="q4_0",
        disk_type_v="q4_1",
        page_tokens=64,
        io_threads=3,
        protect_first=2,
        protect_last=4,
        mass_decay=0.5,
        fidelity="bounded:0.1",
        read_budget=4096,
    )
    lines = dict(line.split("=", 1) for line in settings.to_native().splitlines())
    assert lines == {
        "host": str(1 << 30),
        "disk": str(2 << 30),
        "dir": str(tmp_path),
        "host-k": "q8_0",
        "host-v": "q4_0",
        "disk-k": "q4_0",
        "disk-v": "q4_1",
        "page-tokens": "64",
        "io-threads": "3",
        "protect-first": "2",
        "protect-last": "4",
        "mass-decay": "0.5",
        "fidelity": "bounded:0.1",
        "read-budget": "4096",
    }
    assert len(lines) == len(dataclasses.fields(settings)) - 1  # host_share only says where the budget is from
    assert KVSettings(host="1GiB", fidelity="lossy").to_native().splitlines() == [f"host={1 << 30}", "fidelity=lossy"]
    domain = binding.Domain(settings.to_native())
    figures = domain.figures()
    domain.close()
    assert figures.tiers["host"].budget_bytes == 1 << 30
    assert figures.tiers["disk"].budget_bytes == 2 << 30
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "kept", "eps"),
    [
        ("exact", "exact", None),
        ("bounded", "bounded:0.07", 0.07),
        ("Bounded:1e-1", "bounded:0.1", 0.1),
        ("lossy", "lossy", None),
    ],
)
def test_fidelity_is_read_once(text: str, kept: str, eps: float | None) -> None:
    settings = KVSettings(fidelity=text)
    assert settings.fidelity == kept and settings.eps == eps


@pytest.mark.parametrize(
    "text",
    [
        "",
        "bounded:",
        "bounded:0",
        "bounded:1",
        "bounded:nan",
        "bounded:-0.1",
        "bounded:1e-300",
        "bounded:0.99999999",
        "bounded:x",
        "exact:0.1",
        "lossy:1",
        "fast",
    ],
)
def test_other_fidelities_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="exact, bounded:EPS, lossy with EPS from 1.2e-38 to 0.999999"):
        KVSettings(fidelity=text)


@pytest.mark.parametrize("eps", [LEAST_EPS, MAX_EPS])
def test_the_ends_of_eps_are_the_librarys_too(eps: float) -> None:
    binding.Domain(KVSettings(fidelity=f"bounded:{eps}").to_native()).close()


@pytest.mark.parametrize(
    "text",
    [
        "fidelity=bounded",
        "fidelity=bounded,host=1g",
        "host=1.5KiB",
        " # a note \n\n host = 4096 \n",
        "fidelity=lossy,host=2M",
    ],
)
def test_texts_that_the_library_takes(text: str) -> None:
    binding.Domain(text).close()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("host", "'host' is not key=value; known keys are: host disk dir"),
        ("hots=1", "unknown setting 'hots'; known are: host disk dir"),
        ("host=2GB", "setting 'host': '2GB' is not a number of bytes such as 4096, 512MiB or 2GiB"),
        ("host=0", "'0' is not a number of bytes"),
        ("host=-1", "'-1'"),
        ("host=1e99", "'1e99'"),
        ("host=nan", "'nan'"),
        ("disk=1GiB", "'disk' needs 'dir'"),
        ("host-k=q5_0", "'q5_0' is not a storage format"),
        ("page-tokens=33", "a multiple of 32"),
        ("io-threads=99999999999999999999", "a number from 0 to 64"),
        ("mass-decay=1", "a number in [0, 1)"),
        ("fidelity=bounded:", "'bounded:' is not 'exact', 'lossy', 'bounded' or 'bounded:EPS'"),
        ("fidelity=bounded:1", "EPS between 0 and 1"),
        ("fidelity=bounded:nan", "EPS between 0 and 1"),
        ("fidelity=bounded:0.1x", "EPS between 0 and 1"),
        ("fidelity=bounded,read-budget=95", "95 tokens cannot hold the 96"),
        ("fidelity=lossy,disk=1MiB,dir=/", "takes no 'disk'"),
        ("@/", "is it a file?"),
        ("@/nowhere", "cannot read the settings file '/nowhere'"),
    ],
)
def test_texts_that_the_library_refuses(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        binding.Domain(text)


@pytest.mark.parametrize(("values", "least"), [({}, 96), ({"protect_first": 0, "page_tokens": 64}, 128)])
def test_the_least_read_budget_is_the_librarys(values: dict[str, Any], least: int) -> None:
    binding.Domain(KVSettings(fidelity="bounded", read_budget=least, **values).to_native()).close()
    with pytest.raises(SettingsError, match=f"read_budget is {least - 1}\n.*from {least} to .*always read"):
        KVSettings(fidelity="bounded", read_budget=least - 1, **values)


@pytest.mark.parametrize("name", ["plain", "with space", "a,b", "host=1", "ünï", "#hash"])
def test_any_directory_name_is_used_as_it_is(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    domain = binding.Domain(KVSettings(disk="1MiB", dir=folder).to_native())
    assert [path.suffix for path in folder.iterdir()] == [".pages"]
    domain.close()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"host": 0}, ("0 bytes", "--kv-host")),
        ({"host": "24,3"}, ("'24,3'", "comma")),
        ({"host": "-1"}, ("'-1'", "negative")),
        ({"host": ""}, ("''", "empty")),
        ({"disk": 0, "dir": "/"}, ("0 bytes", "--kv-disk")),
        ({"disk": "2GB", "dir": "/"}, ("'2GB'", "2GiB")),
        ({"dir": "/"}, ("/", "no budget", "--kv-disk")),
        ({"disk": 1, "dir": " "}, ("empty",)),
        ({"disk": 1, "dir": "a\nb"}, ("line break",)),
        ({"host_type_k": "q5_0"}, ("host_type_k", "'q5_0'", "q8_0")),
        ({"disk_type_v": ""}, ("disk_type_v", "''", "f16")),
        ({"page_tokens": 31}, ("page_tokens", "31", "32")),
        ({"page_tokens": 33}, ("page_tokens", "33", "Take 32")),
        ({"page_tokens": 80}, ("page_tokens", "80", "Take 64")),
        ({"page_tokens": 8192}, ("page_tokens", "8192", "4,096")),
        ({"io_threads": 0}, ("io_threads", "0", "1 to 64")),
        ({"protect_first": -1}, ("protect_first", "-1")),
        ({"protect_last": 0}, ("protect_last", "0")),
        ({"mass_decay": 1.0}, ("mass_decay", "1.0", "0.99")),
        ({"mass_decay": float("nan")}, ("mass_decay", "nan")),
    ],
)
def test_refusals_name_the_value_and_the_way_out(values: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError) as caught:
        KVSettings(**values)
    for part in parts:
        assert part in str(caught.value)
    assert caught.value.exit_code == 2


def test_cache_types_fill_what_is_not_given() -> None:
    plain = KVSettings().with_cache_types(None, None)
    assert (plain.host_type_k, plain.host_type_v, plain.disk_type_k, plain.disk_type_v) == ("f16",) * 4
    bounded = KVSettings(fidelity="bounded:0.1", host_type_v="q4_0")
    assert (bounded.with_cache_types(None, None).host_type_k, bounded.with_cache_types("f16", "f16").host_type_k) == (
        "q8_0",
        "f16",
    )
    assert bounded.with_cache_types(None, None).disk_type_v == "q4_0"
    nominal = KVSettings(host_type_v="q4_1", disk_type_k="q4_0").with_cache_types("q8_0", "q8_0")
    assert (nominal.host_type_k, nominal.host_type_v, nominal.disk_type_k, nominal.disk_type_v) == (
        "q8_0",
        "q4_1",
        "q4_0",
        "q4_1",
    )


def test_the_disk_tier_has_a_home_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVTIER_CACHE_DIR", str(tmp_path))
    assert KVSettings(disk="1GiB").disk_dir() == tmp_path / "pages"
    assert KVSettings().disk_dir() is None


@pytest.mark.parametrize("text", ["nonsense", "hots=1GiB", "host=x", "host-k=q5_0", "page-tokens=33", "disk=1GiB"])
def test_the_library_refuses_too(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        binding.Domain(text)
    assert text.split("=")[-1] in str(caught.value) or text.split("=")[0] in str(caught.value)


@given(
    host=st.none() | st.integers(1, 1 << 50),
    formats=st.tuples(*[st.none() | st.sampled_from(FORMATS)] * 4),
    page_tokens=st.none() | st.integers(1, 128).map(lambda n: 32 * n),
    io_threads=st.none() | st.integers(1, 64),
    protect=st.tuples(st.none() | st.integers(0, 1 << 20), st.none() | st.integers(1, 1 << 20)),
    mass_decay=st.none() | st.floats(0, 0.999999),
)
def test_what_python_accepts_the_library_accepts(
    host: int | None, formats: tuple[str | None, ...], page_tokens: int | None, io_threads: int | None,
    protect: tuple[int | None, int | None], mass_decay: float | None,
) -> None:  # fmt: skip
    settings = KVSettings(host, None, None, *formats, page_tokens, io_threads, *protect, mass_decay)
    try:
        binding.Domain(settings.to_native()).close()
    except ConfigError:
        raise
    except NativeError as err:
        assert "budget" in str(err)  # a budget may be too small for this page size, but that is no syntax error


def test_what_is_written_for_the_library_can_be_read_again(tmp_path: Path) -> None:
    for settings in (
        KVSettings(),
        KVSettings(
            host="1GiB",
            disk="2GiB",
            dir=tmp_path / "a,b",
            host_type_k="q8_0",
            disk_type_v="q4_0",
            page_tokens=64,
            io_threads=2,
        ),
        KVSettings(host="64MiB", fidelity="lossy"),
        KVSettings(protect_first=0, protect_last=3, mass_decay=0.5, fidelity="bounded:0.05", read_budget=100),
    ):
        again = KVSettings.from_native(settings.to_native())
        assert again == settings
    with pytest.raises(SettingsError, match="no setting 'colour'"):
        KVSettings.from_native("colour=red\n")
