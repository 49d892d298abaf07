"""The formats that pages are stored in, and what a page takes in them: csrc/store/format.h has the layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

HEAD_ALIGN_BYTES: Final = 64  # heads of a page begin at multiples of it
VALUE_ALIGN: Final = 16  # channels: values that are not quantized are padded to a multiple of it


@dataclass(frozen=True, slots=True)
class Format:
    """ggml's type of the same name: `ggml_type` is its number, `block_items` numbers take `block_bytes` bytes."""

    name: str
    ggml_type: int
    block_items: int
    block_bytes: int

    @property
    def bits(self) -> float:
        """Bits of one number."""
        return 8 * self.block_bytes / self.block_items


BY_NAME: Final[Mapping[str, Format]] = MappingProxyType(
    {
        known.name: known
        for known in (  # in the order of the native library
            Format("f32", 0, 1, 4),
            Format("f16", 1, 1, 2),
            Format("bf16", 30, 1, 2),
            Format("q8_0", 8, 32, 34),
            Format("q4_0", 2, 32, 18),
            Format("q4_1", 3, 32, 20),
        )
    }
)
FORMATS: Final = tuple(BY_NAME)
WIDE_FORMATS: Final = tuple(known.name for known in BY_NAME.values() if known.block_items == 1)
QUANTIZED: Final = tuple(known.name for known in BY_NAME.values() if known.block_items > 1)


class Heads(Protocol):
    """The heads of one layer's cache: how many, and the channels of a key and of a value."""

    @property
    def n_head_kv(self) -> int: ...
    @property
    def d_k(self) -> int: ...
    @property
    def d_v(self) -> int: ...


def row_bytes(fmt: str, n_items: int) -> int | None:
    """Bytes of a row of `n_items` numbers, None if that is not a multiple of the format's block."""
    known = BY_NAME[fmt]
    return n_items // known.block_items * known.block_bytes if n_items % known.block_items == 0 else None


def page_bytes(heads: Heads, fmt_k: str, fmt_v: str, page_tokens: int) -> int | None:
    """Bytes of one page, None if the head size does not allow the format."""
    d_v = heads.d_v if fmt_v in QUANTIZED else -(-heads.d_v // VALUE_ALIGN) * VALUE_ALIGN
    k, v = row_bytes(fmt_k, heads.d_k), row_bytes(fmt_v, d_v)
    if k is None or v is None:
        return None
    return heads.n_head_kv * (-(-page_tokens * (k + v) // HEAD_ALIGN_BYTES) * HEAD_ALIGN_BYTES)
