"""Brings the native library into llama.cpp: loads the plug-in, hands its device to a model load, keeps llama.cpp's log.

Order matters. `llama_cpp` comes first: it brings ggml into the process. Then ggml loads our library as a backend, and
only then its own functions are opened (the same image).
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import llama_cpp
import llama_cpp.llama_cpp as api

from ..errors import KvtierError, LibraryError, LlamaError
from ..machine import buildargs, ggmlbackends, hardware
from . import binding

DEVICE_NAME: Final = b"KVT0"
LOG_LINES: Final = 200
SHOWN_LOG_LINES: Final = 8
_WARN, _ERROR, _CONTINUED = 3, 4, 5  # ggml's log levels

_load_lock = threading.Lock()
_runtime: Runtime | None = None


@dataclass(frozen=True, slots=True)
class Runtime:
    """What is loaded: the library's file and its device as a ggml handle."""

    library: Path
    device: int


class LogTail:
    """Keeps the last lines that llama.cpp and ggml logged, and passes them on unless `muted`."""

    def __init__(self) -> None:
        self.muted = False
        self._lines: deque[tuple[int, str]] = deque(maxlen=LOG_LINES)
        self._partial = ""
        self._level = 0
        self._lock = threading.Lock()  # ggml logs from any thread
        self._forward: Any = None
        self._user_data = ctypes.c_void_p()
        self._callback = api.llama_log_callback(self._receive)  # must outlive every use of ggml
        self._installed = False

    def install(self) -> None:
        """Become llama.cpp's log callback; the one before still gets everything unless `muted`."""
        if self._installed:
            return
        forward = api.llama_log_callback()
        api.llama_log_get(ctypes.byref(forward), ctypes.byref(self._user_data))
        self._forward = forward if ctypes.cast(forward, ctypes.c_void_p).value else None
        api.llama_log_set(self._callback, ctypes.c_void_p())
        self._installed = True

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Nothing is passed on while the block runs."""
        before, self.muted = self.muted, True
        try:
            yield
        finally:
            self.muted = before

    def clear(self) -> None:
        with self._lock:
            self._lines.clear()
            self._partial = ""

    def problems(self) -> tuple[str, ...]:
        """The last warnings and errors, oldest first; the last lines of any kind if there were none."""
        with self._lock:
            serious = [line for level, line in self._lines if level in (_WARN, _ERROR)]
            lines = serious or [line for _, line in self._lines]
        return tuple(lines[-SHOWN_LOG_LINES:])

    def _receive(self, level: int, text: bytes | None, _user_data: Any) -> None:
        with self._lock:
            self._level = self._level if level == _CONTINUED else level
            *whole, self._partial = (self._partial + (text or b"").decode("utf-8", "replace")).split("\n")
            self._lines.extend((self._level, line.rstrip()) for line in whole if line.strip(" ."))
        if not self.muted and self._forward is not None:
            self._forward(level, text, self._user_data)


log: Final = LogTail()

# ggml as libllama itself is linked to it. `llama_cpp._ggml.libggml` can be a second copy with a registry of its own:
# wheels hold libggml.so and libggml.so.0 as two files.
libggml: Final = api._lib


def load() -> Runtime:
    """Load the plug-in into llama.cpp, once per process. Raises LibraryError with the reason if it cannot be."""
    global _runtime
    with _load_lock:
        if _runtime is None:
            log.install()
            _refuse_the_amx_trap()
            api.llama_backend_init()
            with log.quiet():
                load_backends()
                _runtime = _load_plugin(binding.library_path())
        return _runtime


def load_backends() -> None:
    """Load llama.cpp's own backends where they are libraries of their own. Raises LibraryError if none is the CPU's."""
    if not ggmlbackends.load(libggml, api._lib):
        folders = " and ".join(map(str, ggmlbackends.folders(Path(api._lib._name))))
        raise LibraryError(
            f"llama-cpp-python {llama_cpp.__version__} has no CPU backend: it was built to load it from a file of its "
            f"own, and there is none in {folders} that this processor can run",
            "Install one that has it: pip install --force-reinstall --no-cache-dir llama-cpp-python",
        )


def _refuse_the_amx_trap() -> None:
    """Raise LibraryError where llama.cpp would be killed at its first matrix product, by instructions that only seem
    there."""
    if not built_with_amx() or hardware.amx_state() != "faults":
        return
    args = buildargs.named_args(hardware.cpu_flags(), "faults", buildargs.compiler_takes)
    raise LibraryError(
        "this machine advertises AMX, but its instructions kill the process, and llama.cpp was built to use them",
        f"Build it again without: {buildargs.install_command(args, llama_cpp.__version__)}",
    )


def built_with_amx() -> bool:
    """Whether the CPU backend of llama.cpp uses AMX."""
    try:
        return bool(libggml.ggml_cpu_has_amx_int8())
    except AttributeError:  # a build that loads its CPU backends at run time, each for one kind of processor
        return False


def _load_plugin(path: Path) -> Runtime:
    libggml.ggml_backend_load.argtypes = [ctypes.c_char_p]
    libggml.ggml_backend_load.restype = ctypes.c_void_p
    libggml.ggml_backend_dev_by_name.argtypes = [ctypes.c_char_p]
    libggml.ggml_backend_dev_by_name.restype = ctypes.c_void_p
    # A program may have loaded it already, through GGML_BACKEND_PATH.
    device = libggml.ggml_backend_dev_by_name(DEVICE_NAME)
    if not device:
        log.clear()
        libggml.ggml_backend_load(str(path).encode())
        device = libggml.ggml_backend_dev_by_name(DEVICE_NAME)
    if not device:
        reason = _refusal() or "\n".join(log.problems()) or "ggml gave no reason"
        raise LibraryError(
            f"llama-cpp-python {llama_cpp.__version__} did not accept the native library {path}: {reason}",
            "Install a llama-cpp-python that this version of kvtier supports (`kvtier doctor` says which).",
        )
    binding.load()
    return Runtime(path, int(device))


def _refusal() -> str:
    """Why the library refused this ggml, if it can be opened at all."""
    try:
        binding.load()
        return binding.last_error()
    except LibraryError as err:
        return err.message


_default_model_params: Final = api.llama_model_default_params
_assigned = threading.local()  # for the model that this thread is loading: .devices, an array, and .repack


def _model_default_params() -> Any:
    params = _default_model_params()
    devices = getattr(_assigned, "devices", None)
    if devices is not None:
        params.devices = ctypes.cast(devices, ctypes.c_void_p)
        params.use_extra_bufts = _assigned.repack
    return params


@contextmanager
def loading_onto(devices: ctypes.Array[ctypes.c_void_p], repack: bool = True) -> Iterator[None]:
    """Models that this thread loads in the block get `devices`, a NULL-ended array that must outlive the model.

    With `repack` off their weights keep the file's layout, and the CPU backend multiplies with them as they are.

    `llama_cpp.Llama` has no argument for it, but takes its model parameters from `llama_model_default_params`: that one
    function is replaced by one that answers differently in a thread inside such a block, and the same elsewhere.
    """
    api.llama_model_default_params = _model_default_params
    _assigned.devices, _assigned.repack = devices, repack
    try:
        yield
    finally:
        _assigned.devices = None


def device_array(device: int) -> ctypes.Array[ctypes.c_void_p]:
    """A NULL-ended array of one device."""
    return (ctypes.c_void_p * 2)(device, None)


@contextmanager
def bound(domain: binding.Domain) -> Iterator[None]:
    """Caches that this thread allocates in the block belong to `domain`."""
    domain.bind()
    try:
        yield
    finally:
        binding.Domain.unbind()


def llama_error(what: str, domain: binding.Domain | None) -> KvtierError:
    """The typed error for a failure of llama.cpp: the native library's own if there is one, else what was logged."""
    error = domain.last_error() if domain is not None and domain.is_open else None
    if error is not None:
        return error
    return LlamaError(what, "The last lines of llama.cpp's log say why.", log.problems())
