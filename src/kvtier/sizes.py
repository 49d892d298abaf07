"""Sizes as people write them: tokens ("32k"), bytes ("2GiB"), and back. All units are powers of 1024."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

_TOKENS: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([km]?)", re.IGNORECASE)
_BYTES: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(?:([kmgt])(?:ib)?|b)?", re.IGNORECASE)
_POWER: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_MAX_TOKENS: Final = 1 << 31
_MAX_BYTES: Final = 1 << 63


def parse_tokens(text: str | int) -> int:
    """Tokens from "8192", "32k", "32K" or "1.5k" (= 1,536). Raises ValueError that says what is allowed."""
    if isinstance(text, int):
        text = str(text)
    match = _TOKENS.fullmatch(text.strip())
    if match is None:
        raise ValueError(_refusal(text, "a number of tokens", "8192, 32k or 1.5k (k is 1024)"))
    exact = Fraction(match[1]) * 1024 ** _POWER[match[2].lower()]
    if exact.denominator != 1:
        raise ValueError(f"'{text}' is {float(exact):g} tokens, which is not a whole number: write {round(exact)}")
    if exact >= _MAX_TOKENS:
        raise ValueError(f"'{text}' is {int(exact):,} tokens: at most {_MAX_TOKENS - 1:,} can be addressed")
    return int(exact)


def parse_bytes(text: str | int) -> int:
    """Bytes from "2GiB", "2G", "512M", "1.5 GiB" or "4096". Raises ValueError that says what is allowed."""
    if isinstance(text, int):
        text = str(text)
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        if re.fullmatch(r"[0-9.]+ ?[kmgt]b", text.strip(), re.IGNORECASE):
            raise ValueError(
                f"'{text}' could mean powers of 1000 or of 1024: write {text.strip()[:-1]}iB for powers of 1024"
            )
        raise ValueError(_refusal(text, "a number of bytes", "2GiB, 512M or 4096 (powers of 1024)"))
    n_bytes = int(Fraction(match[1]) * 1024 ** _POWER[(match[2] or "").lower()])
    if n_bytes >= _MAX_BYTES:
        raise ValueError(f"'{text}' is more than any machine can address: write for example 2GiB")
    return n_bytes


def _refusal(text: str, what: str, examples: str) -> str:
    bare = text.strip()
    if not bare:
        return f"'{text}' is empty: expected {what}, such as {examples}"
    if bare.startswith("-"):
        return f"'{text}' is negative: expected {what}, such as {examples}"
    if "," in bare:
        return f"'{text}' has a comma: expected {what} with a point for fractions and no separators, such as {examples}"
    return f"'{text}' is not {what}: expected for example {examples}"


def parse_share(text: str) -> float:
    """A share from "20%" or "0.2", whatever its size. Raises ValueError."""
    text = text.strip()
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


def format_bytes(n_bytes: int) -> str:
    """For example "512 B", "24.0 KiB", "1.50 GiB"."""
    if n_bytes < 1024:
        return f"{n_bytes} B"
    size, power = n_bytes / 1024, 0
    while size >= 1023.95 and power < 4:
        size, power = size / 1024, power + 1
    return f"{size:.2f} {'KMGTP'[power]}iB" if size < 10 else f"{size:.1f} {'KMGTP'[power]}iB"


def format_rate(per_s: float | None) -> str:
    """Tokens per second, three significant digits; a dash when it was not measured."""
    if per_s is None:
        return "-"
    return f"{per_s:,.0f} tokens/s" if per_s >= 100 else f"{per_s:.3g} tokens/s"


def format_seconds(seconds: float | None) -> str:
    """For example "12 ms", "3.42 s", "2 min 05 s"; a dash when it was not measured."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"
