"""The bytes of a GGUF header, read with distrust: what is not there is never asked for.

Large arrays (vocabularies, merges, scores) are walked, not loaded: their value is an `ArrayInfo`. Whatever the bytes
are, the only exception that leaves this module is `GgufError`, memory stays bounded, and every count is checked against
what the file could hold before anything is read for it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Final, NoReturn

from ..errors import GgufError
from .header import TENSOR_TYPES, ArrayInfo, GgufHeader, Scalar, TensorInfo, Value

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_KEYS: Final = 65_536
MAX_TENSORS: Final = 262_144
MAX_DIMS: Final = 4
MAX_NAME_BYTES: Final = 65_535  # of a key or a tensor name
MAX_STRING_BYTES: Final = 16 << 20  # of a string that is kept (chat templates are the longest)
MAX_KEPT_ITEMS: Final = 4_096  # arrays longer than this are only described
MAX_KEPT_ITEM_BYTES: Final = 65_536  # an array with a longer string is only described
MAX_ARRAY_ITEMS: Final = 1 << 30
MAX_STRINGS: Final = 1 << 23  # in all arrays together: walking them takes time (vocabularies have some 500,000)
DEFAULT_ALIGNMENT: Final = 32

AGAIN: Final = "Fetch the file again, or check it against the SHA-256 its publisher gives."

# value type id -> (name, struct code); strings and arrays are handled apart
_SCALARS: Final[dict[int, tuple[str, str]]] = {
    0: ("uint8", "B"),
    1: ("int8", "b"),
    2: ("uint16", "H"),
    3: ("int16", "h"),
    4: ("uint32", "I"),
    5: ("int32", "i"),
    6: ("float32", "f"),
    7: ("bool", "B"),
    10: ("uint64", "Q"),
    11: ("int64", "q"),
    12: ("float64", "d"),
}
_BOOL: Final = 7
_STRING: Final = 8
_ARRAY: Final = 9


class Reader:
    """A window over the file. Every read is checked against the file's size first."""

    WINDOW: Final = 1 << 20

    def __init__(self, path: Path, file: BinaryIO, n_bytes: int) -> None:
        self.path = path
        self.file = file
        self.n_bytes = n_bytes
        self.off = 0  # position in the file
        self.n_strings = 0  # in arrays, so far
        self._buf = b""
        self._buf_off = 0  # position of _buf[0] in the file

    def fail(self, reason: str, hint: str = AGAIN, off: int | None = None) -> NoReturn:
        raise GgufError(self.path, self.off if off is None else off, reason, hint)

    @property
    def remaining(self) -> int:
        return self.n_bytes - self.off

    def need(self, n: int, what: str) -> None:
        if n > self.remaining:
            self.fail(
                f"the file ends inside {what}: {n:,} bytes needed, {self.remaining:,} left; the file is truncated or "
                "damaged"
            )

    def take(self, n: int, what: str) -> bytes:
        self.need(n, what)
        start = self.off - self._buf_off
        if start < 0 or start + n > len(self._buf):
            self.file.seek(self.off)
            self._buf = self.file.read(max(n, self.WINDOW))
            self._buf_off = self.off
            start = 0
            if len(self._buf) < n:
                self.fail(f"the file became shorter while {what} was read")
        self.off += n
        return self._buf[start : start + n]

    def skip(self, n: int, what: str) -> None:
        self.need(n, what)
        self.off += n

    def u32(self, what: str) -> int:
        value: int = struct.unpack("<I", self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = struct.unpack("<Q", self.take(8, what))[0]
        return value

    def name(self, what: str) -> str:
        at = self.off
        n = self.u64(f"the length of {what}")
        if not 0 < n <= MAX_NAME_BYTES:
            self.fail(f"{what} has an impossible length ({n:,} bytes)", off=at)
        raw = self.take(n, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8", off=at)

    def text(self, what: str) -> str:
        at = self.off
        n = self.u64(f"the length of {what}")
        if n > MAX_STRING_BYTES:
            self.fail(f"{what} has an impossible length ({n:,} bytes; at most {MAX_STRING_BYTES:,})", off=at)
        return self.take(n, what).decode("utf-8", "replace")


def parse(r: Reader) -> GgufHeader:
    version, n_tensors, n_keys = _parse_preamble(r)
    metadata: dict[str, Value] = {}
    wide: set[str] = set()
    for i in range(n_keys):
        at = r.off
        key = r.name(f"key {i + 1} of {n_keys}")
        if key in metadata:
            r.fail(f"key '{key}' occurs twice", off=at)
        off_type = r.off
        metadata[key] = _parse_value(r, key)
        if isinstance(metadata[key], float) and r.off - off_type > 8:  # its type takes 4 bytes
            wide.add(key)
    alignment = _alignment(r, metadata)
    infos = tuple(_parse_tensors(r, n_tensors, alignment))
    data_off = -(-r.off // alignment) * alignment if infos else r.off
    _check_data(r, infos, data_off, alignment)
    keys = MappingProxyType(metadata)
    return GgufHeader(r.path, version, keys, infos, alignment, data_off, r.n_bytes, frozenset(wide))


def _parse_preamble(r: Reader) -> tuple[int, int, int]:
    """Version, number of tensors, number of keys."""
    if r.n_bytes == 0:
        r.fail("the file is empty", "Fetch it again: the download left nothing.")
    magic = r.take(min(4, r.n_bytes), "the magic number")
    if magic != MAGIC:
        r.fail(f"is not a GGUF file (it starts with {magic!r}, not {MAGIC!r})", _what_is_it(magic), off=0)
    version = r.u32("the version")
    if version in (v << 24 for v in VERSIONS):
        r.fail(
            "is a big-endian GGUF file; only little-endian ones are read",
            "Take the little-endian file of the same model.",
            off=4,
        )
    if version == 1:
        r.fail(
            "is a GGUF file of version 1, which llama.cpp no longer reads",
            "Convert the model again with a current llama.cpp.",
            off=4,
        )
    if version not in VERSIONS:
        r.fail(
            f"has GGUF version {version}; known are {VERSIONS[0]} and {VERSIONS[1]}",
            "Update kvtier, or fetch the file again if it is damaged.",
            off=4,
        )
    n_tensors, n_keys = r.u64("the number of tensors"), r.u64("the number of keys")
    # the shortest tensor description takes 8+1+4+8+4+8 bytes, the shortest key with its value 8+1+4+1
    if n_tensors > min(MAX_TENSORS, r.remaining // 33):
        r.fail(
            f"claims {n_tensors:,} tensors, which a file of {r.n_bytes:,} bytes cannot describe; it is truncated or "
            "damaged",
            off=8,
        )
    if n_keys > min(MAX_KEYS, r.remaining // 14):
        r.fail(
            f"claims {n_keys:,} keys, which a file of {r.n_bytes:,} bytes cannot hold; it is truncated or damaged",
            off=16,
        )
    return version, n_tensors, n_keys


def _what_is_it(magic: bytes) -> str:
    if magic[:2] == b"PK":
        return (
            "This looks like a zip archive (a wheel, or a PyTorch checkpoint). Unpack it, or convert the model to GGUF."
        )
    if magic in (b"lmgg", b"ggml", b"tjgg", b"fmgg", b"algg"):
        return "This is one of the formats before GGUF. Convert the model again with a current llama.cpp."
    if magic[:4] == b"vers":
        return "This looks like a Git LFS pointer, not the model. Fetch the real file (`git lfs pull`)."
    if magic[:1] in (b"<", b"{"):
        return "This looks like a web page or an error message that was saved as the model. Fetch the file again."
    return "Name a .gguf file; other formats must be converted with llama.cpp's convert_hf_to_gguf.py."


def _parse_value(r: Reader, key: str) -> Value:
    at = r.off
    type_id = r.u32(f"the type of '{key}'")
    if type_id == _STRING:
        return r.text(f"the text of '{key}'")
    if type_id == _ARRAY:
        return _parse_array(r, key)
    if type_id not in _SCALARS:
        r.fail(f"key '{key}' has the unknown value type {type_id}", off=at)
    return next(_scalars(r, type_id, 1, f"the value of '{key}'"))


def _scalars(r: Reader, type_id: int, n: int, what: str) -> Iterator[Scalar]:
    code = _SCALARS[type_id][1]
    raw = r.take(n * struct.calcsize("<" + code), what)
    for value in struct.unpack(f"<{n}{code}", raw):
        yield value != 0 if type_id == _BOOL else value


def _parse_array(r: Reader, key: str) -> Value:
    at = r.off
    what = f"the array '{key}'"
    item_id = r.u32(what)
    n = r.u64(what)
    if item_id == _STRING:
        least = 8
    elif item_id in _SCALARS:
        least = struct.calcsize("<" + _SCALARS[item_id][1])
    else:
        r.fail(
            f"{what} has {'nested arrays' if item_id == _ARRAY else f'the unknown item type {item_id}'}, which "
            "llama.cpp does not read",
            off=at,
        )
    if n > MAX_ARRAY_ITEMS or n * least > r.remaining:
        r.fail(
            f"{what} claims {n:,} items, which do not fit in the {r.remaining:,} bytes left; the file is truncated "
            "or damaged",
            off=at,
        )
    if item_id == _STRING:
        return _parse_strings(r, n, what)
    if n > MAX_KEPT_ITEMS:
        r.skip(n * least, what)
        return ArrayInfo(_SCALARS[item_id][0], n)
    return tuple(_scalars(r, item_id, n, what))


def _parse_strings(r: Reader, n: int, what: str) -> Value:
    start = r.off
    r.n_strings += n
    if r.n_strings > MAX_STRINGS:
        r.fail(f"{what} has {n:,} strings; a header holds at most {MAX_STRINGS:,} in all", off=start)
    lengths_ok = True
    for _ in range(n):
        n_bytes = r.u64(what)
        lengths_ok = lengths_ok and n_bytes <= MAX_KEPT_ITEM_BYTES
        r.skip(n_bytes, what)
    if n > MAX_KEPT_ITEMS or not lengths_ok or r.off - start > MAX_STRING_BYTES:
        return ArrayInfo("string", n)
    r.off = start
    return tuple(r.text(what) for _ in range(n))


def _alignment(r: Reader, metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0 or value & (value - 1) or value > 1 << 20:
        r.fail(f"general.alignment is {value!r}, not a power of two")
    return value


def _parse_tensors(r: Reader, n_tensors: int, alignment: int) -> Iterator[TensorInfo]:
    names: set[str] = set()
    expected_off = 0
    for i in range(n_tensors):
        at = r.off
        name = r.name(f"the name of tensor {i + 1} of {n_tensors}")
        if name in names:
            r.fail(f"tensor '{name}' occurs twice", off=at)
        names.add(name)
        info = _parse_tensor(r, name, at)
        if info.off_bytes != expected_off:
            r.fail(
                f"tensor '{name}' starts at {info.off_bytes:,} of the data, but the tensors before it end at "
                f"{expected_off:,}",
                off=at,
            )
        expected_off += -(-info.n_bytes // alignment) * alignment
        yield info


def _parse_tensor(r: Reader, name: str, at: int) -> TensorInfo:
    what = f"the description of tensor '{name}'"
    n_dims = r.u32(what)
    if not 1 <= n_dims <= MAX_DIMS:
        r.fail(f"tensor '{name}' has {n_dims} dimensions; 1 to {MAX_DIMS} are possible", off=at)
    shape = tuple(r.u64(what) for _ in range(n_dims))
    type_id = r.u32(what)
    off_bytes = r.u64(what)
    tensor_type = TENSOR_TYPES.get(type_id)
    if tensor_type is None:
        r.fail(
            f"tensor '{name}' has the unknown type {type_id}",
            "If the file is whole, it needs a newer llama.cpp than this kvtier knows: take another quantization, or "
            "update.",
            off=at,
        )
    n_items = 1
    for dim in shape:
        n_items *= dim
    if not 0 < n_items < 1 << 63:
        r.fail(f"tensor '{name}' has the impossible shape {shape}", off=at)
    if shape[0] % tensor_type.block_items:
        r.fail(
            f"tensor '{name}' has rows of {shape[0]:,}, not a multiple of {tensor_type.name}'s block of "
            f"{tensor_type.block_items}",
            off=at,
        )
    return TensorInfo(name, shape, tensor_type, off_bytes, n_items // tensor_type.block_items * tensor_type.block_bytes)


def _check_data(r: Reader, infos: tuple[TensorInfo, ...], data_off: int, alignment: int) -> None:
    if not infos:
        return
    last = infos[-1]
    end = data_off + last.off_bytes + last.n_bytes
    if end > r.n_bytes:
        cut = next(t for t in infos if data_off + t.off_bytes + t.n_bytes > r.n_bytes)
        r.fail(
            f"the file ends inside tensor '{cut.name}': {end:,} bytes expected, {r.n_bytes:,} there; the download is "
            "not complete",
            off=r.n_bytes,
        )
