"""The cache types that llama.cpp is told, where nobody asked for one.

Pages are stored in formats of their own, so the type is only a name; but llama.cpp rotates queries, keys and values
(Walsh-Hadamard, by head) if and only if it takes the cache for a quantized one. No channel of rotated numbers stands
out, and rounding them to Q8_0 or Q4_0 costs up to three times less KL (docs/recall.md, docs/lossy.md). So the name is a
quantized one wherever pages are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ..errors import SettingsError
from ..formats import BY_NAME, WIDE_FORMATS
from ..settings import KVSettings
from .header import GgufHeader
from .shape import AttentionLayer, ModelShape, shape_of

AUTO: Final = "auto"
GGML_TYPES: Final = {known.name: known.ggml_type for known in BY_NAME.values()}  # numbers in ggml's enum ggml_type
_ROTATED_HEAD: Final = 64  # llama.cpp rotates heads whose size is a multiple of it
_WIDE: Final = "f16"


def type_name(argument: str, value: int | str | None) -> str | None:
    """The name of a cache type that is also a storage format of ours; None if it was not given."""
    if value is None:
        return None
    names = {number: name for name, number in GGML_TYPES.items()}
    name = value.lower() if isinstance(value, str) else names.get(int(value))
    if name not in GGML_TYPES:
        raise SettingsError(
            f"{argument} is {value!r}, which is not a type that the cache can have",
            f"Take one of {', '.join(GGML_TYPES)}.",
        )
    return name


def cache_types(settings: KVSettings, header: GgufHeader, type_k: str | None, type_v: str | None) -> tuple[str, str]:
    """The types of keys and values for llama.cpp: what was asked for (F32 as F16), else what suits the pages.

    `settings` has every format filled in; `header` is that of the model's (first) file. An F32 cache goes under a
    nominal F16: llama.cpp would cast it as a whole to F16 at every step. Raises GgufError where the sizes of heads
    decide and the header does not give them.
    """
    k = _cache_type(type_k, settings.host_type_k, settings, lambda layer: layer.d_k, header)
    v = _cache_type(type_v, settings.host_type_v, settings, lambda layer: layer.d_v, header)
    return k, v


def _cache_type(
    asked: str | None, host: str | None, settings: KVSettings, size: Callable[[AttentionLayer], int], header: GgufHeader
) -> str:
    if asked is not None and asked != AUTO:
        return _WIDE if asked == "f32" else asked
    quantized = (
        host if host is not None and host not in WIDE_FORMATS else "q8_0" if settings.fidelity == "lossy" else None
    )  # lossy: later
    return quantized if quantized is not None and _rotates(shape_of(header), size) else _WIDE


def _rotates(shape: ModelShape, size: Callable[[AttentionLayer], int]) -> bool:
    layers = [layer for layer in shape.attention if not layer.indexer]
    sizes = {size(layer) for layer in layers}
    return (
        len(sizes) == 1 and sizes.pop() % _ROTATED_HEAD == 0 and all(layer.d_v > 0 for layer in layers)
    )  # no values: a view of the keys
