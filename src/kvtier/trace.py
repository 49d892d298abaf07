"""Traces of attention mass: which page of which layer got how much, step by step. docs/trace.md has the format.

A trace is what policies, the simulator and the scorer's training need of a run, in about one byte per entry. A file
that was cut short keeps everything up to its last whole frame.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

from .errors import OutputError, TraceError
from .outputs import aside, discard, settle, unwritable

MAGIC: Final = b"KVTTRACE"
VERSION: Final = 1
CHUNK_STEPS: Final = 16
FLOOR_LOG2: Final = -24.0  # mass below 2^-24 is code 0
_HEAD: Final = struct.Struct("<8sII")  # magic, version, bytes of the header
_FRAME: Final = struct.Struct("<4sIII")  # kind, bytes, bytes as packed, CRC-32 of the packed bytes
_MAX_FRAME: Final = 1 << 30

Codes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# code c > 0 stands for 2^(FLOOR_LOG2 * (255 - c) / 254): steps of 6.8 %, so at most 3.4 % off
MASS_OF_CODE: Final[Floats] = np.concatenate([[0.0], np.exp2(FLOOR_LOG2 * (255 - np.arange(1, 256)) / 254)]).astype(
    np.float32
)


def encode_mass(mass: Floats) -> Codes:
    """Codes of masses in 0..1, any shape; NaN and negative values count as 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        code = np.rint(255 - 254 * np.log2(mass) / np.float32(FLOOR_LOG2))
    codes: Codes = np.clip(np.nan_to_num(code, nan=0.0, posinf=0.0, neginf=0.0), 0, 255).astype(np.uint8)
    return codes


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What a trace is of.

    Attributes:
        model: name of the model's file.
        n_layers: layers of the model; layers: numbers of those recorded, which see the whole context.
        page_tokens: tokens of a page; page_bytes: bytes of a page in RAM.
        n_prefix: tokens in the cache before the first step; n_tokens: steps that were asked for.
        text: where the text came from.
    """

    model: str
    n_layers: int
    layers: tuple[int, ...]
    page_tokens: int
    page_bytes: int
    n_prefix: int
    n_tokens: int
    text: str = ""

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> TraceHeader:
        """Raises KeyError, TypeError or ValueError for what is no header."""
        numbers = {name: int(raw[name]) for name in ("n_layers", "page_tokens", "page_bytes", "n_prefix", "n_tokens")}
        layers = tuple(int(layer) for layer in raw["layers"])
        if (
            not layers
            or min(layers) < 0
            or max(layers) >= numbers["n_layers"]
            or min(numbers.values()) < 0
            or numbers["page_tokens"] < 1
        ):
            raise ValueError("its figures contradict each other")
        return cls(model=str(raw["model"]), text=str(raw.get("text", "")), layers=layers, **numbers)


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace in memory.

    Attributes:
        codes: uint8 [n_steps, n_layers recorded, n_pages at the end]; see MASS_OF_CODE. Pages not begun yet are 0.
        n_pages: int32 [n_steps], pages with content after each step.
        tokens: int32 [n_steps], the token fed at each step; prefix: int32 [n_prefix], those before (may be empty).
        features: float32 [n_layers recorded, n_pages known then] by name: prefill_mean, prefill_max, key_norm, ...
        is_whole: the recording ended as planned or was stopped in order; False for a file that was cut short.
    """

    header: TraceHeader
    codes: Codes
    n_pages: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    prefix: npt.NDArray[np.int32]
    features: Mapping[str, Floats] = field(default_factory=dict)
    is_whole: bool = True

    @property
    def n_steps(self) -> int:
        return len(self.n_pages)

    def mass(self, first: int, last: int | None = None) -> Floats:
        """Masses of steps first..last-1: float32 [steps, layers, pages]; of one step [layers, pages] without `last`."""
        mass: Floats = MASS_OF_CODE[self.codes[first] if last is None else self.codes[first:last]]
        return mass

    def feature(self, name: str) -> Floats:
        """[n_layers recorded, n_pages at the end]; zeros where it was not recorded."""
        out = np.zeros((self.codes.shape[1], self.codes.shape[2]), np.float32)
        known = self.features.get(name)
        if known is not None:
            n = min(out.shape[1], known.shape[1])
            out[:, :n] = known[:, :n]
        return out


class TraceWriter:
    """Writes a trace frame by frame, beside its place, which it takes when it is closed with at least one step; a
    context manager.

    What is written stays readable whatever happens: of a process that was killed it lies in `path`.part.
    """

    def __init__(self, path: Path, header: TraceHeader, prefix: Sequence[int] = ()) -> None:
        """Raises OutputError if the file cannot be written."""
        self._path = path
        self._aside = aside(path)
        self._rows: list[Codes] = []
        self._tokens: list[int] = []
        self.n_steps = 0
        self._first = 0  # step of the next frame: so many are in the file
        self._has_failed = False
        try:
            self._file: IO[bytes] = self._aside.open("wb")
        except OSError as err:
            raise self._failure(err) from err
        text = json.dumps(asdict(header), ensure_ascii=False).encode()
        self._write(_HEAD.pack(MAGIC, VERSION, len(text)) + text + struct.pack("<I", zlib.crc32(text)))
        self._frame(b"TOKN", np.asarray(prefix, np.int32).tobytes())

    def add(self, token: int, mass: Floats) -> None:
        """One step: the token that was fed and the mass [n_layers recorded, n_pages with content]."""
        self._rows.append(encode_mass(mass))
        self._tokens.append(token)
        self.n_steps += 1
        if len(self._rows) == CHUNK_STEPS:
            self._flush()

    def feature(self, name: str, values: Floats) -> None:
        """A figure per page that does not change: [n_layers recorded, n_pages]."""
        head = struct.pack("<24sII", name.encode(), *values.shape)
        self._frame(b"PAGE", head + np.ascontiguousarray(values, np.float16).tobytes())

    def close(self) -> None:
        """Write what is left and the end mark, and put the trace in its place; nothing is left of one without steps.

        May be called twice.
        """
        if self._file.closed:
            return
        try:
            if not self._has_failed:
                self._flush()
                self._frame(b"LAST", struct.pack("<I", self.n_steps))
        finally:
            with suppress(OSError):  # everything is flushed, or has failed to be
                self._file.close()
            self._drop_if_empty()
        if self._first and not self._has_failed:
            self._settle()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """After an exception the trace is one that was cut short, and stays beside its place."""
        if kind is not None and not self._has_failed:
            with suppress(OutputError):
                self._flush()
            self._has_failed = True
        self.close()

    def _drop_if_empty(self) -> None:
        if self._first == 0:
            discard(self._aside, self._path)

    def _settle(self) -> None:
        try:
            settle(self._aside, self._path)
        except OSError as err:
            raise self._failure(err) from err

    def _flush(self) -> None:
        if not self._rows:
            return
        width = max(row.shape[1] for row in self._rows)
        block = np.zeros((len(self._rows), self._rows[0].shape[0], width), np.uint8)
        for i, row in enumerate(self._rows):
            block[i, :, : row.shape[1]] = row
        block[1:] -= block[:-1].copy()  # steps are alike: differences (modulo 256) pack better
        head = struct.pack("<IIII", self._first, *block.shape)
        counts = np.array([row.shape[1] for row in self._rows], np.int32)
        self._frame(b"MASS", head + np.array(self._tokens, np.int32).tobytes() + counts.tobytes() + block.tobytes())
        self._first += len(self._rows)
        self._rows.clear()
        self._tokens.clear()

    def _frame(self, kind: bytes, data: bytes) -> None:
        packed = zlib.compress(data, 6)
        self._write(_FRAME.pack(kind, len(data), len(packed), zlib.crc32(packed)) + packed)

    def _write(self, data: bytes) -> None:
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as err:
            self._has_failed = True
            self._drop_if_empty()
            raise self._failure(err) from err

    def _failure(self, err: OSError) -> OutputError:
        error = unwritable(f"the trace {self._path}", err)
        if self._first:
            error.hint += f" What was recorded before is in {self._aside}: --partial reads it."
        return error


def read_trace(path: Path, partial: bool = False) -> Trace:
    """Read a trace.

    Raises TraceError for what is none, and, unless `partial`, for one that was cut short or is damaged.

    With `partial` everything up to the last whole frame is given.
    """
    try:
        data = path.read_bytes()
    except OSError as err:
        raise TraceError(
            f"the trace {path} cannot be read: {err.strerror}", "Record one with `kvtier trace record`."
        ) from err
    header, off_bytes = _read_header(path, data)
    parts = _Parts(header)
    reason = ""
    while not parts.is_ended and not reason:
        off_bytes, reason = _read_frame(data, off_bytes, parts)
    if reason and not partial:
        raise TraceError(
            f"the trace {path} {reason}: its last whole step is number {parts.n_steps:,} of {header.n_tokens:,}",
            "Record it again, or use the steps that are there with --partial." if parts.n_steps else "Record it again.",
        )
    if parts.n_steps == 0:
        raise TraceError(f"the trace {path} has no steps", "Record it again, with --tokens of at least 1.")
    return parts.trace(is_whole=not reason)


def _read_header(path: Path, data: bytes) -> tuple[TraceHeader, int]:
    if len(data) < _HEAD.size or not data.startswith(MAGIC):
        raise TraceError(f"{path} is no trace", "Give a file that `kvtier trace record` wrote.")
    _, version, n_bytes = _HEAD.unpack_from(data)
    if version != VERSION:
        raise TraceError(
            f"the trace {path} has version {version}, and this program reads version {VERSION}", "Record it again."
        )
    end = _HEAD.size + n_bytes
    text = data[_HEAD.size : end]
    if len(data) < end + 4 or zlib.crc32(text) != struct.unpack_from("<I", data, end)[0]:
        raise TraceError(f"the trace {path} has a damaged header, or was cut short in it", "Record it again.")
    try:
        return TraceHeader.from_json(json.loads(text)), end + 4
    except (KeyError, TypeError, ValueError) as err:
        raise TraceError(f"the trace {path} has a header that cannot be used: {err}", "Record it again.") from err


def _read_frame(data: bytes, off_bytes: int, parts: _Parts) -> tuple[int, str]:
    """Where the next frame begins, and what is wrong with this one, empty if nothing is."""
    if len(data) < off_bytes + _FRAME.size:
        return off_bytes, "was cut short"
    kind, n_raw, n_packed, crc = _FRAME.unpack_from(data, off_bytes)
    start = off_bytes + _FRAME.size
    packed = data[start : start + n_packed]
    if len(packed) < n_packed:
        return off_bytes, "was cut short"
    if zlib.crc32(packed) != crc or n_raw > _MAX_FRAME:
        return off_bytes, f"is damaged at byte {off_bytes:,}"
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(packed, n_raw)
        if len(raw) != n_raw or not unpacker.eof:
            raise ValueError("size")
        parts.add(kind, raw)
    except (ValueError, struct.error, zlib.error):
        return off_bytes, f"is damaged at byte {off_bytes:,}"
    return start + n_packed, ""


class _Parts:
    """Frames put together. Raises ValueError or struct.error for what does not fit."""

    def __init__(self, header: TraceHeader) -> None:
        self.header = header
        self.n_steps = 0
        self.is_ended = False
        self._blocks: list[Codes] = []
        self._tokens: list[npt.NDArray[np.int32]] = []
        self._counts: list[npt.NDArray[np.int32]] = []
        self._prefix = np.zeros(0, np.int32)
        self._features: dict[str, Floats] = {}

    def add(self, kind: bytes, raw: bytes) -> None:
        if kind == b"MASS":
            self._add_mass(raw)
        elif kind == b"PAGE":
            name, n_layers, n_pages = struct.unpack_from("<24sII", raw)
            values = np.frombuffer(raw, np.float16, offset=32).reshape(n_layers, n_pages)
            if n_layers != len(self.header.layers):
                raise ValueError("layers")
            self._features[name.rstrip(b"\0").decode()] = values.astype(np.float32)
        elif kind == b"TOKN":
            self._prefix = np.frombuffer(raw, np.int32).copy()
        elif kind == b"LAST":
            (n_steps,) = struct.unpack("<I", raw)
            if n_steps != self.n_steps:
                raise ValueError("steps")
            self.is_ended = True
        # other kinds are of later versions that this one can do without

    def _add_mass(self, raw: bytes) -> None:
        first, n_steps, n_layers, width = struct.unpack_from("<IIII", raw)
        if first != self.n_steps or n_layers != len(self.header.layers) or n_steps == 0:
            raise ValueError("order")
        numbers = np.frombuffer(raw, np.int32, 2 * n_steps, 16)
        block = np.frombuffer(raw, np.uint8, offset=16 + 8 * n_steps).reshape(n_steps, n_layers, width)
        counts = numbers[n_steps:]
        if counts.min() < 1 or counts.max() != width:
            raise ValueError("pages")
        self._blocks.append(np.cumsum(block, axis=0, dtype=np.uint8))
        self._tokens.append(numbers[:n_steps])
        self._counts.append(counts)
        self.n_steps += n_steps

    def trace(self, is_whole: bool) -> Trace:
        width = max(block.shape[2] for block in self._blocks)
        codes = np.zeros((self.n_steps, len(self.header.layers), width), np.uint8)
        at = 0
        for block in self._blocks:
            codes[at : at + len(block), :, : block.shape[2]] = block
            at += len(block)
        return Trace(
            self.header,
            codes,
            np.concatenate(self._counts),
            np.concatenate(self._tokens),
            self._prefix,
            self._features,
            is_whole,
        )
