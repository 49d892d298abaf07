"""The rows of the quality table, and the file that keeps finished ones."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..measuring.config import Configuration
from ..measuring.errors import MeasuringError
from ..settings import KVSettings
from .divergence import Divergence, summarise

STOCK_TYPES = ("f16", "q8_0", "q4_0")
PAGE_FORMATS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")

# Attention without flash attention over an F32 cache: matrix products and softmax in F32, in llama.cpp's own code.
REFERENCE = Configuration("stock f32, flash attention off", type_k="f32", type_v="f32", flash_attn=False)


def stock_row(kind: str) -> Configuration:
    return Configuration(f"stock {kind}", type_k=kind, type_v=kind)


def kvtier_row(fmt: str) -> Configuration:
    """Pages of one format, everything in RAM. The nominal type is the same, as `kvtier run -ctk fmt` has it.

    F32 pages are the exception: llama.cpp casts a nominal F32 cache to F16 before flash attention sees it, so theirs is
    F16. The rows reach us in F32 either way.
    """
    settings = KVSettings(host_type_k=fmt, host_type_v=fmt).to_native()
    nominal = "f16" if fmt == "f32" else fmt
    return Configuration(f"kvtier {fmt}", "kvtier", nominal, nominal, settings=settings)


def default_rows() -> list[Configuration]:
    return [*map(stock_row, STOCK_TYPES), *map(kvtier_row, PAGE_FORMATS)]


@dataclass(frozen=True, slots=True)
class RowResult:
    """Per-token figures of one configuration; `divergence` sums them up."""

    name: str
    kl: tuple[float, ...]
    same_top: tuple[bool, ...]
    nll: tuple[float, ...]
    prefill_s: float
    decode_s: float

    @property
    def divergence(self) -> Divergence:
        return summarise(self.kl, self.same_top, self.nll)

    @classmethod
    def from_answer(cls, name: str, answer: dict[str, Any]) -> RowResult:
        return cls(
            name,
            tuple(float(x) for x in answer["kl"]),
            tuple(bool(x) for x in answer["same_top"]),
            tuple(float(x) for x in answer["nll"]),
            float(answer["prefill_s"]),
            float(answer["decode_s"]),
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kl": list(self.kl),
            "same_top": list(self.same_top),
            "nll": list(self.nll),
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
        }


def row_key(config: Configuration, context: dict[str, Any]) -> str:
    """A hash of everything that a row's figures depend on: configuration, model, text, lengths, engine builds."""
    text = json.dumps({"config": config.to_dict(), **context}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class RowFile:
    """Finished rows, one JSON line each: what an interrupted run finds again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make_folder(self) -> None:
        """Make the file's folder where there is none. Raises MeasuringError."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._refusal(error) from None

    def _refusal(self, error: OSError) -> MeasuringError:
        return MeasuringError(f"cannot write {self.path}: {error}", "Name another file with --rows FILE.")

    def _lines(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # the last line of a run that was killed while writing it
            if isinstance(entry, dict) and "key" in entry and "row" in entry:
                yield entry

    def find(self, key: str) -> RowResult | None:
        """The newest row of this key."""
        found = None
        for entry in self._lines():
            if entry["key"] == key:
                found = RowResult.from_answer(entry["row"]["name"], entry["row"])
        return found

    def add(self, key: str, row: RowResult) -> None:
        """Append a row, on disk when this returns. Raises MeasuringError."""
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
