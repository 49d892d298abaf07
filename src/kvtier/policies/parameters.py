"""Parameters of a policy in text: `sink_window:sink-tokens=256`, `delta:scorer=mine.npz:forecast-share=1`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import KvtierError, UsageError
from ..sizes import parse_share

Parse = Callable[[str], object]  # raises ValueError or KvtierError


def split(text: str) -> tuple[str, dict[str, str]]:
    """The name of a policy, and its parameters as they are written. Raises UsageError."""
    name, *parts = (part.strip() for part in text.split(":"))
    pairs: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        key, value = key.strip().lower().replace("-", "_"), value.strip()
        if not equals or not key or not value:
            raise UsageError(
                f"policy '{text}': '{part}' is no parameter",
                "Write NAME:PARAMETER=VALUE, such as sink_window:sink-tokens=256.",
            )
        if key in pairs:
            raise UsageError(f"policy '{text}': {key} is given twice", "Leave one of them out.")
        pairs[key] = value
    return name, pairs


def parse(name: str, factory: Any, pairs: Mapping[str, str]) -> dict[str, object]:
    """The values of `pairs` for a policy's class, which says in `parameters` what it takes. Raises UsageError."""
    known: Mapping[str, Parse] = getattr(factory, "parameters", {}) if pairs else {}
    values: dict[str, object] = {}
    for key, text in pairs.items():
        if key not in known:
            allowed = ", ".join(known) or "it takes none"
            raise UsageError(f"the policy '{name}' has no parameter '{key}'", f"Parameters: {allowed}.")
        try:
            values[key] = known[key](text)
        except KvtierError as err:
            raise UsageError(f"the policy '{name}': {key}: {err.message}", err.hint) from err
        except ValueError as err:
            raise UsageError(f"the policy '{name}': {key} is '{text}': {err}") from err
    return values


def files_of(text: str) -> list[Path]:
    """Files that the parameters of a policy name."""
    return [Path(value) for value in split(text)[1].values() if Path(value).is_file()]


def share(text: str) -> float:
    """A number from 0 to 1."""
    value = parse_share(text)
    if not 0.0 <= value <= 1.0:
        raise ValueError("it must lie between 0 and 1")
    return value
