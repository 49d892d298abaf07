"""A model with the same weights in F32."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from .errors import MeasuringError


def widen(source: Path, target: Path) -> None:
    """Write `source` to `target` with every weight in F32: 4 bytes each. Raises MeasuringError.

    The numbers stay what they are. What changes is that llama.cpp no longer rounds the other factor of each matrix
    product to 8 bits, as it does beside quantized weights.
    """
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_ALL_F32
    params.allow_requantize = True
    code = llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params))
    if code != 0 or not target.is_file():
        target.unlink(missing_ok=True)
        raise MeasuringError(f"llama.cpp could not write {source.name} with F32 weights to {target.parent} ({code})")
