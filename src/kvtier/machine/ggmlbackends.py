"""The backends of the ggml that llama.cpp runs on: loading those that are libraries of their own, and their GPUs.

A llama.cpp that was built with GGML_BACKEND_DL=ON has no backend in it, not even the CPU's: somebody has to load them
from files, and llama_cpp itself does not. Only ctypes is used, on the ggml that is handed in, so that a probe process
can run this.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any, Final

_CPU, _GPU, _INTEGRATED_GPU = 0, 1, 2  # ggml's device types
OUR_DEVICE: Final = "KVT0"  # says that it is a GPU, for llama.cpp to put caches on it

_POINTER: Final = ctypes.c_void_p
_SIGNATURES: Final[dict[str, tuple[Any, list[Any]]]] = {
    "ggml_backend_load_all_from_path": (None, [ctypes.c_char_p]),
    "ggml_backend_dev_by_type": (_POINTER, [ctypes.c_int]),
    "ggml_backend_dev_count": (ctypes.c_size_t, []),
    "ggml_backend_dev_get": (_POINTER, [ctypes.c_size_t]),
    "ggml_backend_dev_type": (ctypes.c_int, [_POINTER]),
    "ggml_backend_dev_name": (ctypes.c_char_p, [_POINTER]),
    "ggml_backend_dev_description": (ctypes.c_char_p, [_POINTER]),
}


def folders(library: Path) -> list[Path]:
    """Where the backends of an installed llama-cpp-python are, if they are files of their own.

    `library` is its libllama. Some of its builds install them beside that, others in `bin` of site-packages.
    """
    beside = library.parent
    return [folder for folder in (beside, beside.parent.parent / "bin") if folder.is_dir()]


def load(ggml: Any, libllama: Any) -> bool:
    """Load the backends of this ggml, if it has no CPU backend yet. Returns whether it has one now."""
    for folder in folders(Path(libllama._name)):
        if has_cpu(ggml):
            break
        _call(ggml, "ggml_backend_load_all_from_path", os.fsencode(folder))
    return has_cpu(ggml)


def has_cpu(ggml: Any) -> bool:
    """Whether a CPU backend is loaded."""
    return bool(_call(ggml, "ggml_backend_dev_by_type", _CPU))


def gpus(ggml: Any) -> list[str]:
    """Names of the GPUs that llama.cpp can compute on ("CUDA0"); ours, which only says that it is one, is left out."""
    names = []
    for i in range(_call(ggml, "ggml_backend_dev_count")):
        device = _call(ggml, "ggml_backend_dev_get", i)
        name = str(_call(ggml, "ggml_backend_dev_name", device).decode("utf-8", "replace"))
        if _call(ggml, "ggml_backend_dev_type", device) in (_GPU, _INTEGRATED_GPU) and name != OUR_DEVICE:
            names.append(name)
    return names


def devices(ggml: Any) -> list[dict[str, str]]:
    """Name and description of every device that is registered."""
    found = []
    for i in range(_call(ggml, "ggml_backend_dev_count")):
        device = _call(ggml, "ggml_backend_dev_get", i)
        name, text = (_call(ggml, f"ggml_backend_dev_{what}", device) for what in ("name", "description"))
        found.append({"name": name.decode(), "description": text.decode("utf-8", "replace")})
    return found


def _call(ggml: Any, name: str, *arguments: Any) -> Any:
    """Through a function object of its own: restype and argtypes of the library's shared one belong to others."""
    result, types = _SIGNATURES[name]
    address = ctypes.cast(getattr(ggml, name), ctypes.c_void_p).value
    return ctypes.CFUNCTYPE(result, *types)(address or 0)(*arguments)
