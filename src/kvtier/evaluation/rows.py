"""The rows of the quality table, and the file that keeps finished ones."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..errors import OutputError
from ..measuring.config import Configuration
from ..measuring.spec import SpecError, parse_spec
from .divergence import Divergence, summarise
from .readings import Readings, readings

STOCK_TYPES = ("f16", "q8_0", "q4_0")
PAGE_FORMATS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")
EXACT = "exact"  # the exact step of our own engine, by this name or by "kvtier f16"

# Attention without flash attention over an F32 cache: matrix products and softmax in F32, in llama.cpp's own code.
REFERENCE = Configuration("stock f32, flash attention off", type_k="f32", type_v="f32", flash_attn=False)


def stock_row(kind: str) -> Configuration:
    return replace(parse_spec(f"stock:{kind}"), name=f"stock {kind}")


def kvtier_row(fmt: str) -> Configuration:
    """Pages of one format, everything in RAM. The nominal type is the same, as `kvtier run -ctk fmt` has it."""
    return replace(parse_spec(f"kvtier:{fmt}"), name=f"kvtier {fmt}")


def default_rows() -> list[Configuration]:
    return [*map(stock_row, STOCK_TYPES), *map(kvtier_row, PAGE_FORMATS)]


def find_rows(names: Sequence[str]) -> list[Configuration]:
    """The configurations of these names or specs, each once. Raises SpecError."""
    known = {row.name: row for row in (REFERENCE, *default_rows())}
    known[EXACT] = replace(kvtier_row("f16"), name=EXACT)
    rows: dict[str, Configuration] = {}
    for name in names:
        if name not in known and ":" not in name:
            raise SpecError(
                f"no row is called {name!r}",
                f"Rows: {', '.join(repr(n) for n in known)}, or a configuration such as "
                "kvtier:q8_0,host=64MiB,disk=1GiB.",
            )
        rows[name] = known[name] if name in known else parse_spec(name)
    return list(rows.values())


@dataclass(frozen=True, slots=True)
class RowResult:
    """Per-token figures of one configuration; `divergence` sums them up.

    `reading` holds what the tokens that were fed one at a time cost: see `readings`.
    """

    name: str
    kl: tuple[float, ...]
    same_top: tuple[bool, ...]
    nll: tuple[float, ...]
    prefill_s: float
    decode_s: float
    reading: Mapping[str, float] = field(default_factory=dict)

    @property
    def divergence(self) -> Divergence:
        return summarise(self.kl, self.same_top, self.nll)

    @property
    def readings(self) -> Readings:
        return readings(self.reading, len(self.nll), self.decode_s)

    @classmethod
    def from_answer(cls, name: str, answer: dict[str, Any]) -> RowResult:
        """Raises KeyError, TypeError or ValueError where the answer is not one of `score`'s."""
        return cls(
            name,
            tuple(float(x) for x in answer["kl"]),
            tuple(bool(x) for x in answer["same_top"]),
            tuple(float(x) for x in answer["nll"]),
            float(answer["prefill_s"]),
            float(answer["decode_s"]),
            {str(key): float(value) for key, value in answer["reading"].items()},
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kl": list(self.kl),
            "same_top": list(self.same_top),
            "nll": list(self.nll),
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "reading": dict(self.reading),
        }


def row_key(config: Configuration, context: dict[str, Any]) -> str:
    """A hash of everything that a row's figures depend on: configuration, model, text, lengths, engine builds.

    What the row is called is no part of it.
    """
    settings = {key: value for key, value in config.to_dict().items() if key != "name"}
    text = json.dumps({"config": settings, **context}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


R = TypeVar("R")


class Row(Protocol):
    """What a file of finished rows can keep."""

    def to_dict(self) -> dict[str, Any]: ...


class RowFile:
    """Finished rows, one JSON line each: what an interrupted run finds again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make_folder(self) -> None:
        """Make the file's folder where there is none. Raises OutputError."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._refusal(error) from None

    def _refusal(self, error: OSError) -> OutputError:
        return OutputError(
            f"the file of finished rows {self.path} cannot be written: {error.strerror}",
            "Name another file with --rows FILE.",
        )

    def _lines(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # the last line of a run that was killed while writing it
            if isinstance(entry, dict) and "key" in entry and "row" in entry:
                yield entry

    def find(self, key: str) -> RowResult | None:
        """The newest row of this key."""
        return self.find_all([key], lambda entry: RowResult.from_answer(entry["name"], entry)).get(key)

    def find_all(self, keys: Sequence[str], read: Callable[[dict[str, Any]], R]) -> dict[str, R]:
        """The newest row of each of these keys, of any kind; `read` makes it from what `to_dict` gave."""
        wanted, found = set(keys), dict[str, R]()
        for entry in self._lines():
            if entry["key"] in wanted:
                with suppress(
                    KeyError, TypeError, ValueError, AttributeError
                ):  # one that was damaged is measured again
                    found[entry["key"]] = read(entry["row"])
        return found

    def add(self, key: str, row: Row) -> None:
        """Append a row, on disk when this returns. Raises OutputError."""
        line = json.dumps({"key": key, "row": row.to_dict()})
        self.make_folder()
        try:
            torn = self.path.exists() and self.path.stat().st_size > 0 and not self.path.read_bytes().endswith(b"\n")
            with self.path.open("a", encoding="utf-8") as out:
                out.write(("\n" if torn else "") + line + "\n")
                out.flush()
                os.fsync(out.fileno())
        except OSError as error:
            raise self._refusal(error) from None
