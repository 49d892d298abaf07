"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.sizes import format_bytes, format_rate, format_seconds, parse_bytes, parse_tokens

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("0", 0),
        ("1", 1),
        ("8192", 8192),
        ("32k", 32768),
        ("32K", 32768),
        ("1.5k", 1536),
        ("0.5k", 512),
        ("1m", MIB),
        (" 32k ", 32768),
        ("1.0k", 1024),
        (4096, 4096),
    ],
)
def test_tokens(text: str | int, n: int) -> None:
    assert parse_tokens(text) == n


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("-1", "negative"),
        ("-32k", "negative"),
        ("24,3", "comma"),
        ("1,000", "comma"),
        ("1.3k", "1331"),
        ("0.1", "whole number"),
        ("k", "not a number"),
        ("32kk", "not a number"),
        ("1e3", "not a number"),
        ("32 tokens", "not a number"),
        ("0x10", "not a number"),
        ("٣٢", "not a number"),
        ("4g", "not a number"),
        ("9999999999999", "at most"),
        (-1, "negative"),
        (".5k", "not a number"),
        ("5.k", "not a number"),
    ],
)
def test_tokens_refused(text: str | int, part: str) -> None:
    with pytest.raises(ValueError, match=part) as caught:
        parse_tokens(text)
    assert repr(str(text)) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("1K", KIB),
        ("1k", KIB),
        ("1KiB", KIB),
        ("512M", 512 * MIB),
        ("2G", 2 * GIB),
        ("2GiB", 2 * GIB),
        ("2gib", 2 * GIB),
        ("1.5 GiB", 3 * GIB // 2),
        ("1T", 1024 * GIB),
        ("0.5k", 512),
        (7, 7),
    ],
)
def test_bytes(text: str | int, n: int) -> None:
    assert parse_bytes(text) == n


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "empty"),
        ("-1", "negative"),
        ("-2GiB", "negative"),
        ("24,3", "comma"),
        ("2GB", "write 2GiB"),
        ("1.5mb", "write 1.5miB"),
        ("2X", "not a number"),
        ("GiB", "not a number"),
        ("inf", "not a number"),
        ("nan", "not a number"),
        ("2 0", "not a number"),
        ("99999999T", "more than any machine"),
    ],
)
def test_bytes_refused(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=part) as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@given(st.integers(0, 1 << 20))
def test_tokens_round_trip(n: int) -> None:
    assert parse_tokens(str(n)) == n
    assert parse_tokens(f"{n}k") == 1024 * n


@given(st.integers(0, 1 << 40), st.sampled_from(["", "B", "K", "KiB", "m", "MiB", "G", "gib"]))
def test_bytes_units_are_powers_of_1024(n: int, unit: str) -> None:
    power = {"": 0, "b": 0, "k": 1, "m": 2, "g": 3}[unit[:1].lower()]
    if n * 1024**power < 1 << 63:
        assert parse_bytes(f"{n}{unit}") == n * 1024**power


@given(st.text())
def test_any_text_gives_a_size_or_a_reason(text: str) -> None:
    for parse in (parse_tokens, parse_bytes):
        try:
            assert parse(text) >= 0
        except ValueError as err:
            assert f"'{text}'" in str(err)


@given(st.integers(1, 1 << 50))
def test_formatted_bytes_read_back_nearly(n: int) -> None:
    shown = format_bytes(n)
    assert abs(parse_bytes(shown.replace("PiB", "TiB")) * (1024 if "PiB" in shown else 1) - n) <= max(1, 0.006 * n)


@pytest.mark.parametrize(
    ("n", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (10 * KIB, "10.0 KiB"),
        (MIB - 1, "1.00 MiB"),
        (3 * GIB // 2, "1.50 GiB"),
        (1 << 50, "1.00 PiB"),
        (1 << 62, "4096.0 PiB"),
    ],
)
def test_format_bytes(n: int, shown: str) -> None:
    assert format_bytes(n) == shown


def test_format_others() -> None:
    assert format_rate(None) == "-"
    assert format_rate(14.23) == "14.2 tokens/s"
    assert format_rate(1234.5) == "1,234 tokens/s"
    assert format_seconds(None) == "-"
    assert format_seconds(0.0123) == "12 ms"
    assert format_seconds(3.416) == "3.42 s"
    assert format_seconds(125) == "2 min 05 s"
