"""What ggml's CPU backend was compiled for, and how fast its own attention over an F16 cache is.

Only ctypes is used, on the ggml that is handed in, so that a probe process can run this.
"""

from __future__ import annotations

import ctypes
import struct
import time
from typing import Any, Final

HEAD_SIZES: Final = (64, 128)
N_CELLS: Final = 2048
N_RUNS: Final = 12
_F32, _F16 = 0, 1  # ggml's types
_CPU: Final = 0  # ggml's device type
_CONTEXT_BYTES: Final = 16 << 20


class _Feature(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("value", ctypes.c_char_p))


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


_POINTER: Final = ctypes.c_void_p
_SIGNATURES: Final[dict[str, tuple[Any, list[Any]]]] = {
    "ggml_version": (ctypes.c_char_p, []),
    "ggml_init": (_POINTER, [_InitParams]),
    "ggml_free": (None, [_POINTER]),
    "ggml_new_tensor_4d": (_POINTER, [_POINTER, ctypes.c_int, *[ctypes.c_int64] * 4]),
    "ggml_get_data": (_POINTER, [_POINTER]),
    "ggml_nbytes": (ctypes.c_size_t, [_POINTER]),
    "ggml_flash_attn_ext": (_POINTER, [*[_POINTER] * 5, *[ctypes.c_float] * 3]),
    "ggml_new_graph": (_POINTER, [_POINTER]),
    "ggml_build_forward_expand": (None, [_POINTER, _POINTER]),
    "ggml_backend_reg_by_name": (_POINTER, [ctypes.c_char_p]),
    "ggml_backend_dev_by_type": (_POINTER, [ctypes.c_int]),
    "ggml_backend_dev_backend_reg": (_POINTER, [_POINTER]),
    "ggml_backend_reg_get_proc_address": (_POINTER, [_POINTER, ctypes.c_char_p]),
    "ggml_backend_dev_init": (_POINTER, [_POINTER, ctypes.c_char_p]),
    "ggml_backend_graph_compute": (ctypes.c_int, [_POINTER, _POINTER]),
    "ggml_backend_free": (None, [_POINTER]),
}


def version(ggml: ctypes.CDLL) -> str:
    """ggml's version, for example "0.25.3"; "unknown" if it does not say."""
    try:
        text = _bind(ggml, "ggml_version")()
    except AttributeError:
        return "unknown"
    return (text or b"unknown").decode("utf-8", "replace")


def features(ggml: ctypes.CDLL) -> dict[str, str]:
    """The instruction sets that ggml's CPU backend was compiled with, in its words ("AVX2": "1"); empty if it does not
    say.

    AVX512_FP16 is not among them, whatever the build.
    """
    try:
        calls = {name: _bind(ggml, name) for name in ("ggml_backend_reg_by_name", "ggml_backend_reg_get_proc_address")}
    except AttributeError:
        return {}
    registry = calls["ggml_backend_reg_by_name"](b"CPU")
    address = calls["ggml_backend_reg_get_proc_address"](registry, b"ggml_backend_get_features") if registry else None
    if not address:
        return {}
    listed = ctypes.CFUNCTYPE(ctypes.POINTER(_Feature), ctypes.c_void_p)(address)(registry)
    found: dict[str, str] = {}
    i = 0
    while listed and listed[i].name:
        found[listed[i].name.decode()] = (listed[i].value or b"").decode()
        i += 1
    return found


def attention_ns(ggml: ctypes.CDLL, head_sizes: tuple[int, ...] = HEAD_SIZES, n_runs: int = N_RUNS) -> dict[int, float]:
    """Nanoseconds per cell of a decode step of one head over an F16 cache, by the head's channels.

    One thread; the best of `n_runs`, in which the sizes take turns; a few milliseconds in all. A good build takes about
    half as long for 64 channels as for 128; `machine/buildargs.py` says which does not. Empty if this ggml lacks a
    function or refuses.
    """
    try:
        calls = {name: _bind(ggml, name) for name in _SIGNATURES}
    except AttributeError:
        return {}
    device = calls["ggml_backend_dev_by_type"](_CPU)
    backend = calls["ggml_backend_dev_init"](device, None) if device else None
    if not backend:
        return {}
    contexts: list[int] = []
    try:
        _use_one_thread(calls, device, backend)
        graphs = {size: _attention(calls, contexts, size) for size in head_sizes}
        compute = calls["ggml_backend_graph_compute"]
        best: dict[int, float] = {}
        for _ in range(n_runs):
            for size, graph in graphs.items():
                start_ns = time.perf_counter_ns()
                if compute(backend, graph) != 0:
                    return {}
                best[size] = min(best.get(size, float("inf")), (time.perf_counter_ns() - start_ns) / N_CELLS)
        return best
    finally:
        for context in contexts:
            calls["ggml_free"](context)
        calls["ggml_backend_free"](backend)


def _bind(ggml: ctypes.CDLL, name: str) -> Any:
    """A function object of its own: restype and argtypes of the library's shared one belong to others."""
    result, arguments = _SIGNATURES[name]
    address = ctypes.cast(getattr(ggml, name), ctypes.c_void_p).value
    return ctypes.CFUNCTYPE(result, *arguments)(address or 0)


def _use_one_thread(calls: dict[str, Any], device: int, backend: int) -> None:
    registry = calls["ggml_backend_dev_backend_reg"](device)
    address = calls["ggml_backend_reg_get_proc_address"](registry, b"ggml_backend_set_n_threads")
    if address:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(address)(backend, 1)


def _attention(calls: dict[str, Any], contexts: list[int], size: int) -> int:
    """A graph of one FLASH_ATTN_EXT: one query of one head against `N_CELLS` cells of F16."""
    context = calls["ggml_init"](_InitParams(_CONTEXT_BYTES, None, False))
    contexts.append(context)
    query = calls["ggml_new_tensor_4d"](context, _F32, size, 1, 1, 1)
    keys, values = (calls["ggml_new_tensor_4d"](context, _F16, size, N_CELLS, 1, 1) for _ in range(2))
    # Ordinary numbers of both signs, the same in every run; 61 of them, so that no two neighbouring rows are alike.
    numbers = [((i * 37) % 61 - 30) / 32 for i in range(61)]
    for tensor, code in ((query, "f"), (keys, "e"), (values, "e")):
        n_bytes = calls["ggml_nbytes"](tensor)
        pattern = struct.pack(f"<61{code}", *numbers)
        data = (pattern * (n_bytes // len(pattern) + 1))[:n_bytes]
        ctypes.memmove(calls["ggml_get_data"](tensor), data, n_bytes)
    attention = calls["ggml_flash_attn_ext"](context, query, keys, values, None, size**-0.5, 0.0, 0.0)
    graph = calls["ggml_new_graph"](context)
    calls["ggml_build_forward_expand"](graph, attention)
    return int(graph)
