"""Files beside the model that arguments name: looked at here, so that llama.cpp gets none that it cannot use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from ..errors import GgufError, SettingsError
from .gguf import read_header
from .header import GgufHeader, TensorInfo

_ADAPTER_HINT: Final = "Name a LoRA adapter of this model, as llama.cpp's convert_lora_to_gguf.py writes them."
_PROJECTOR_HINT: Final = "Name the projector that is published beside the model, its mmproj GGUF file."
_ADAPTER_TYPE: Final = "adapter"
_LORA_ENDS: Final = (".lora_a", ".lora_b")
_NO_PAIR: Final = "_norm.weight"  # whole tensors that llama.cpp passes over
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
_NO_NUMBERS: Final = frozenset({"i8", "i16", "i32", "i64", "f64"})  # element types of no matrix product


def named_path(argument: str, value: Any) -> str:
    """The text of a path that llama.cpp can open. Raises SettingsError for what is no path, or is not UTF-8."""
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise SettingsError(f"{argument} is {value!r}, which is no path", "Take text, or a pathlib.Path.")
    text = os.fspath(value)
    if not text or "\0" in text:
        raise SettingsError(f"{argument} is {text!r}, which no file can have as its name", "Name a file.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SettingsError(
            f"{argument} is {text!r}, which is not UTF-8", "Rename it, or give a link to it that has a plain name."
        ) from None
    return text


def adapter_path(value: Any, model: Sequence[GgufHeader]) -> str | None:
    """The path of a LoRA adapter that fits the model of these headers; None for none.

    Raises SettingsError for what is no path, and GgufError for a file that is missing, damaged, no adapter, or one of
    another model.
    """
    if value is None:
        return None
    header = _read("lora_path", named_path("lora_path", value), _ADAPTER_HINT)
    _check_kind(header, model[0])
    tensors = {info.name: info for part in model for info in part.tensors}
    pairs = _pairs(header)
    for name, (a, b) in pairs.items():
        _check_pair(header, tensors.get(name), name, a, b)
    if _EMBEDDING in pairs and _OUTPUT not in tensors:  # llama.cpp would multiply by factors that are to be looked up
        _fail(header, f"changes tensor '{_EMBEDDING}', which is the output of this model too: llama.cpp cannot do that")
    return str(header.path)


def check_handler(handler: Any) -> None:
    """Raise GgufError or SettingsError if a chat handler names a projector of images that is none."""
    value = getattr(handler, "clip_model_path", None)
    if value is None:
        return
    header = _read("clip_model_path of chat_handler", named_path("clip_model_path", value), _PROJECTOR_HINT)
    if header.get_str("general.architecture") != "clip":
        _fail(header, f"is a GGUF file of the kind {_kind(header)}, not a projector of images", _PROJECTOR_HINT)


def _read(argument: str, path: str, hint: str) -> GgufHeader:
    try:
        return read_header(path)
    except GgufError as err:
        raise GgufError(err.path, err.off_bytes, f"{err.reason} (given as {argument})", hint) from None


def _fail(header: GgufHeader, reason: str, hint: str = _ADAPTER_HINT) -> NoReturn:
    raise GgufError(header.path, header.data_off_bytes, reason, hint)


def _kind(header: GgufHeader) -> str:
    return repr(header.get_str("general.type") or header.get_str("general.architecture") or "unknown")


def _check_kind(header: GgufHeader, model: GgufHeader) -> None:
    if header.get_str("general.type") != _ADAPTER_TYPE:
        _fail(header, f"is a GGUF file of the kind {_kind(header)}, not an adapter (given as lora_path)")
    kind = header.get_str("adapter.type")
    if kind != "lora":
        _fail(header, f"is an adapter of the kind {kind!r}; llama.cpp reads the kind 'lora'")
    architecture = header.get_str("general.architecture")
    if architecture != model.architecture:
        _fail(header, f"is an adapter for models of the kind {architecture!r}; {model.path} is {model.architecture!r}")
    alpha = header.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, float) or "adapter.lora.alpha" in header.wide_floats:
        _fail(header, f"key 'adapter.lora.alpha' should be a 32-bit number, but is {alpha!r}")


def _pairs(header: GgufHeader) -> dict[str, tuple[TensorInfo, TensorInfo]]:
    """The two factors of each tensor that the adapter changes, by the tensor's name."""
    found: dict[str, dict[str, TensorInfo]] = {}
    for info in header.tensors:
        end = next((end for end in _LORA_ENDS if info.name.endswith(end)), None)
        if end is not None:
            found.setdefault(info.name.removesuffix(end), {})[end] = info
        elif not info.name.endswith(_NO_PAIR):
            _fail(header, f"tensor '{info.name}' is no part of a LoRA adapter")
    for name, parts in found.items():
        if len(parts) != len(_LORA_ENDS):
            _fail(header, f"tensor '{name}' has only one of its two factors, {', '.join(parts)}")
    if not found:
        _fail(header, "holds no factor of any tensor, so it changes nothing")
    return {name: (parts[".lora_a"], parts[".lora_b"]) for name, parts in found.items()}


def _check_pair(header: GgufHeader, base: TensorInfo | None, name: str, a: TensorInfo, b: TensorInfo) -> None:
    """What llama.cpp asks of two factors, and what its matrix products end the process over."""
    if base is None:
        _fail(header, f"changes tensor '{name}', which the model does not have")
    for factor in (a, b):
        if factor.type.name in _NO_NUMBERS:
            _fail(header, f"tensor '{factor.name}' has the type {factor.type.name}, which cannot be multiplied")
    shape_a, shape_b, shape = (_padded(info.shape) for info in (a, b, base))
    is_embedding = name.endswith(_EMBEDDING)  # its rows are looked up, so the factors change places
    outer = (shape_b[1], shape_a[1]) if is_embedding else (shape_a[0], shape_b[1])
    ranks = (shape_a[0], shape_b[0]) if is_embedding else (shape_a[1], shape_b[0])
    if outer != shape[:2] or ranks[0] != ranks[1] or not shape_a[2:] == shape_b[2:] == shape[2:]:
        _fail(
            header, f"tensor '{name}' is {base.shape} in the model, which factors of {a.shape} and {b.shape} do not fit"
        )


def _padded(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape + (1,) * (4 - len(shape))
