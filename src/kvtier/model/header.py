"""What the header of a GGUF file holds: metadata, and descriptions of tensors.

Format: ggml's docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, NoReturn

from ..errors import GgufError
from ..formats import BY_NAME


@dataclass(frozen=True, slots=True)
class TensorType:
    """A ggml element type: `block_items` elements take `block_bytes` bytes."""

    name: str
    block_items: int
    block_bytes: int


TENSOR_TYPES: Final[Mapping[int, TensorType]] = MappingProxyType(
    {
        type_id: TensorType(name, items, n_bytes)
        for type_id, name, items, n_bytes in (
            *((f.ggml_type, f.name, f.block_items, f.block_bytes) for f in BY_NAME.values()),
            (6, "q5_0", 32, 22),
            (7, "q5_1", 32, 24),
            (9, "q8_1", 32, 36),
            (10, "q2_K", 256, 84),
            (11, "q3_K", 256, 110),
            (12, "q4_K", 256, 144),
            (13, "q5_K", 256, 176),
            (14, "q6_K", 256, 210),
            (15, "q8_K", 256, 292),
            (16, "iq2_xxs", 256, 66),
            (17, "iq2_xs", 256, 74),
            (18, "iq3_xxs", 256, 98),
            (19, "iq1_s", 256, 50),
            (20, "iq4_nl", 32, 18),
            (21, "iq3_s", 256, 110),
            (22, "iq2_s", 256, 82),
            (23, "iq4_xs", 256, 136),
            (24, "i8", 1, 1),
            (25, "i16", 1, 2),
            (26, "i32", 1, 4),
            (27, "i64", 1, 8),
            (28, "f64", 1, 8),
            (29, "iq1_m", 256, 56),
            (34, "tq1_0", 256, 54),
            (35, "tq2_0", 256, 66),
            (39, "mxfp4", 32, 17),
            (40, "nvfp4", 64, 36),
            (41, "q1_0", 128, 18),
            (42, "q2_0", 64, 18),
        )
    }
)


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """An array too large to keep: its element type and length."""

    item_type: str
    n_items: int


Scalar = str | int | float | bool
Value = Scalar | tuple[Scalar, ...] | ArrayInfo


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of the file.

    `shape` is in ggml's order (fastest first); `off_bytes` counts from the start of the data.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    off_bytes: int
    n_bytes: int

    @property
    def n_items(self) -> int:
        n = 1
        for dim in self.shape:
            n *= dim
        return n


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What the header of one GGUF file says.

    `data_off_bytes` is where the tensors' data starts, `file_bytes` the size of the file. `wide_floats` are the keys
    whose number has 64 bits: llama.cpp ends the process over one where it expects 32.
    """

    path: Path
    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]
    alignment: int
    data_off_bytes: int
    file_bytes: int
    wide_floats: frozenset[str] = frozenset()

    @property
    def architecture(self) -> str:
        """Raises GgufError if the file names none (it is then no model)."""
        return self.require_str("general.architecture")

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(t.n_bytes for t in self.tensors)

    def arch_key(self, suffix: str) -> str:
        return f"{self.architecture}.{suffix}"

    def get_str(self, key: str, default: str | None = None) -> str | None:
        value = self.metadata.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            self._wrong_type(key, value, "a string")
        return value

    def get_int(self, key: str, default: int | None = None) -> int | None:
        value = self.metadata.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self._wrong_type(key, value, "an integer")
        return value

    def get_float(self, key: str, default: float | None = None) -> float | None:
        value = self.metadata.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._wrong_type(key, value, "a number")
        return float(value)

    def get_bool(self, key: str, default: bool = False) -> bool:
        value = self.metadata.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._wrong_type(key, value, "a boolean")
        return value

    def get_ints(self, key: str) -> tuple[int, ...] | None:
        """An array of integers or booleans (as 0 and 1); a single integer is an array of one."""
        value = self.metadata.get(key)
        if value is None:
            return None
        items = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(item, int) for item in items):
            self._wrong_type(key, value, "an array of integers")
        return tuple(int(item) for item in items if isinstance(item, int))

    def require_str(self, key: str) -> str:
        value = self.get_str(key)
        if value is None:
            self._missing(key)
        return value

    def require_int(self, key: str) -> int:
        value = self.get_int(key)
        if value is None:
            self._missing(key)
        return value

    def _missing(self, key: str) -> NoReturn:
        raise GgufError(
            self.path,
            self.data_off_bytes,
            f"the header has no key '{key}'",
            "This is not a language model that llama.cpp can run; take a GGUF made by llama.cpp's converter.",
        )

    def _wrong_type(self, key: str, value: Value, expected: str) -> NoReturn:
        shown = f"an array of {value.n_items}" if isinstance(value, ArrayInfo) else repr(value)[:60]
        raise GgufError(
            self.path,
            self.data_off_bytes,
            f"key '{key}' should be {expected}, but is {shown}",
            "Take a GGUF made by llama.cpp's converter.",
        )
