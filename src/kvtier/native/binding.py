"""The native library: the only module that touches it.

Its interface is read from `kvtier.h` at run time (cffi's ABI mode), so the header and this module cannot drift. The
library is at the same time a ggml backend: `runtime` loads it into llama.cpp, here the same image is opened for its own
functions.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import cffi
import numpy as np
import numpy.typing as npt

from ..errors import ClosedError, InvalidArgumentError, LibraryError, NativeError, from_code
from ..figures import GONE, TIERS, UNLIMITED, Figures, LayerFigures, TierFigures
from ..formats import FORMATS
from .summary import Summary, SummaryCells, SummaryGroup

LIBRARY_ENV: Final = "KVTIER_LIBRARY"
_LIBRARY_NAME: Final = "libkvtier.so"
_BEGIN, _END = "// CFFI-BEGIN", "// CFFI-END"

# on_leave and on_return: array, page, layer, tier, bytes (valid only during the call), format of K, format of V
OffloadHook = Callable[[int, int, int, str, memoryview, str, str], None]

_lock = threading.Lock()
_ffi: Any = None
_lib: Any = None


def library_path() -> Path:
    """The library's file: what KVTIER_LIBRARY names, else the one that the installation brought.

    Raises LibraryError if there is none.
    """
    named = os.environ.get(LIBRARY_ENV)
    if named:
        path = Path(named).absolute()
        if not path.is_file():
            raise LibraryError(
                f"{LIBRARY_ENV} names {path}, which is no file", "Correct it, or unset it to use the installed library."
            )
        return path
    for folder in _package_folders():
        path = folder / "lib" / _LIBRARY_NAME
        if path.is_file():
            return path
    raise LibraryError(
        f"the native library {_LIBRARY_NAME} is not installed",
        f"Install the package again (pip install .), or name a built library with {LIBRARY_ENV}.",
    )


def header_path(library: Path) -> Path:
    """The header that describes `library`. Raises LibraryError if there is none."""
    source_tree = Path(__file__).resolve().parents[3] / "csrc" / "include"
    folders = [
        library.parent.parent / "include",
        library.parent / "include",
        *(f / "include" for f in _package_folders()),
        source_tree,
    ]
    for folder in folders:
        path = folder / "kvtier.h"
        if path.is_file():
            return path
    raise LibraryError(
        f"the header kvtier.h of {library} was not found", "Install the package again: its files are incomplete."
    )


def _package_folders() -> list[Path]:
    package = sys.modules[__name__.partition(".")[0]]
    return [Path(folder) for folder in package.__path__]


def declarations(header: str) -> str:
    """The part of kvtier.h that Python reads. Raises LibraryError if its markers are missing."""
    start, end = header.find(_BEGIN), header.find(_END)
    if start < 0 or end < start:
        raise LibraryError(
            "kvtier.h has no declarations for Python", "Install the package again: its files do not belong together."
        )
    return "typedef struct kvt_domain kvt_domain;\n" + header[start:end]


def load() -> None:
    """Open the library. Its ggml symbols must already be in the process: see `runtime.load`. Raises LibraryError."""
    global _ffi, _lib
    with _lock:
        if _lib is not None:
            return
        path = library_path()
        ffi = cffi.FFI()
        ffi.cdef(declarations(header_path(path).read_text(encoding="utf-8")))
        try:
            _lib = ffi.dlopen(str(path))
        except OSError as err:
            raise LibraryError(
                f"the native library {path} cannot be loaded: {err}", "Install the package again for this machine."
            ) from err
        _ffi = ffi


def is_loaded() -> bool:
    return _lib is not None


def version() -> str:
    """The version of the native library."""
    return _text(_loaded().kvt_version())


def ggml_version() -> str:
    """The ggml that the library runs on; empty if it is not loaded as a backend."""
    return _text(_loaded().kvt_ggml_version())


def isa() -> str:
    """The instruction set that the kernels use."""
    return _text(_loaded().kvt_isa())


def set_isa(name: str) -> None:
    """Use the kernels of another instruction set. Raises NativeError if the machine or the library lacks it."""
    _check(_loaded().kvt_isa_set(name.encode()))


def error_message(code: int) -> str:
    """What the native library says about a code."""
    return _text(_loaded().kvt_error_message(code))


def last_error() -> str:
    """The text of this thread's last failing call; empty if there was none."""
    return _text(_loaded().kvt_last_error())


class Domain:
    """One set of tiers with its budgets and its store. Not safe to close while another thread uses it."""

    def __init__(self, settings: str) -> None:
        """Open a domain with "key=value" settings (see kvtier.h). Raises NativeError."""
        lib = _loaded()
        self._handle: Any = None
        self._hooks: tuple[Any, ...] = ()
        out = _ffi.new("kvt_domain **")
        _check(lib.kvt_domain_open(settings.encode(), out))
        self._handle = out[0]

    @property
    def is_open(self) -> bool:
        return self._handle is not None

    def close(self) -> None:
        """Close the domain; caches that still exist keep its store until they are freed. No hook runs any more.

        May be called twice.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            _lib.kvt_domain_close(handle)

    def bind(self) -> None:
        """Caches that this thread allocates from now on belong to this domain."""
        _check(_lib.kvt_domain_bind(self._open()))

    @staticmethod
    def unbind() -> None:
        """Caches that this thread allocates from now on belong to the default domain."""
        _check(_loaded().kvt_domain_bind(_ffi.NULL))

    def figures(self) -> Figures:
        """What was counted so far."""
        raw = _ffi.new("kvt_figures *")
        _check(_lib.kvt_domain_figures(self._open(), raw))
        counts = {name: getattr(raw, name) for name, _ in _ffi.typeof("kvt_figures").fields if name != "tier"}
        return Figures(tiers={tier: _tier_figures(raw.tier[i]) for i, tier in enumerate(TIERS)}, **counts)

    def n_layers(self) -> int:
        """Layers that have a paged cache."""
        out = _ffi.new("uint32_t *")
        _check(_lib.kvt_domain_n_layers(self._open(), out))
        return int(out[0])

    def layer(self, index: int) -> LayerFigures:
        """The cache of one layer. `index` counts the layers that have one, from 0."""
        raw = _ffi.new("kvt_layer_figures *")
        _check(_lib.kvt_domain_layer(self._open(), index, raw))
        names = (
            "array",
            "layer",
            "n_head_kv",
            "d_k",
            "d_v",
            "page_tokens",
            "n_streams",
            "cells_per_stream",
            "n_pages",
            "n_mass_steps",
            "last_seen",
            "last_read",
            "last_omitted",
        )
        counts = {name: getattr(raw, name) for name in names}
        arrays = {
            f"{name}_address": int(_ffi.cast("uintptr_t", getattr(raw, name)))
            for name in ("token_mean", "token_max", "page_mean", "page_max")
        }
        return LayerFigures(**counts, **arrays)

    def pages(
        self, index: int
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], npt.NDArray[np.uint8], npt.NDArray[np.uint64]]:
        """Of every page of a layer: tier (index into TIERS), formats of K and of V (into FORMATS), clock of its last
        use; [n_pages].

        Raises NativeError if the caches change meanwhile and the layer at `index` with them.
        """
        layer = self.layer(index)
        n = layer.n_pages
        tier, fmt_k, fmt_v = (np.zeros(n, np.uint8) for _ in range(3))
        last_use = np.zeros(n, np.uint64)
        _check(
            _lib.kvt_domain_pages(
                self._open(),
                index,
                layer.array,
                n,
                _ffi.from_buffer("uint8_t[]", tier),
                _ffi.from_buffer("uint8_t[]", fmt_k),
                _ffi.from_buffer("uint8_t[]", fmt_v),
                _ffi.from_buffer("uint64_t[]", last_use),
            )
        )
        return tier, fmt_k, fmt_v, last_use

    def last_error(self) -> NativeError | None:
        """What went wrong in the last step on this domain's caches, or since; None if nothing did."""
        code = int(_lib.kvt_domain_last_code(self._open()))
        if code == 0:
            return None
        buf = _ffi.new("char[]", 1024)
        _lib.kvt_domain_last_error(self._open(), buf, 1024)
        return from_code(code, _text(buf) or error_message(code))

    def set_offload(self, on_leave: OffloadHook | None, on_return: OffloadHook | None) -> None:
        """Call `on_leave` before a page leaves RAM, `on_return` after one came back, from any thread. None: no call.

        Returns once the old hooks run no more. One thread at a time; raises NativeError from inside a hook.
        """
        leave, back = _hook(on_leave), _hook(on_return)
        _check(_lib.kvt_domain_set_offload(self._open(), leave, back, _ffi.NULL))
        self._hooks = (leave, back)  # the old ones may be dropped only now

    def move(self, array: int, pages: Sequence[int], to_tier: str) -> int:
        """Move pages to a tier; returns how many were moved. Raises NativeError if one could not be."""
        n_done = _ffi.new("size_t *")
        _check(
            _lib.kvt_domain_move(
                self._open(), array, _ffi.new("uint32_t[]", list(pages)), len(pages), _tier_index(to_tier), n_done
            )
        )
        return int(n_done[0])

    def reencode(self, array: int, pages: Sequence[int], fmt_k: str, fmt_v: str) -> int:
        """Pages in RAM change their formats there; returns how many did. Raises NativeError if one could not be."""
        n_done = _ffi.new("size_t *")
        raw = _ffi.new("uint32_t[]", list(pages))
        _check(
            _lib.kvt_domain_reencode(
                self._open(), array, raw, len(pages), FORMATS.index(fmt_k), FORMATS.index(fmt_v), n_done
            )
        )
        return int(n_done[0])

    def set_keep(self, array: int, scores: npt.NDArray[np.float32]) -> None:
        """How much each page of an array is wanted, [n_pages]: the lowest scores leave first. Raises NativeError."""
        scores = np.ascontiguousarray(scores, np.float32)
        _check(_lib.kvt_domain_set_keep(self._open(), array, _ffi.from_buffer("float[]", scores), scores.size))

    def read_page(self, array: int, page: int, part: int, out: npt.NDArray[np.float32]) -> None:
        """Keys (0) or values (1) of a page into `out`, contiguous [page_tokens, n_head_kv, d]. Raises NativeError."""
        _check(
            _lib.kvt_domain_read_page(
                self._open(), array, page, part, _ffi.from_buffer("float[]", out, require_writable=True), out.size
            )
        )

    def set_summary(self, layer: LayerFigures, summary: Summary | None) -> None:
        """What stands in for the dropped cells of a layer from the next step on. Raises NativeError."""
        if summary is None:
            _check(_lib.kvt_domain_set_summary(self._open(), layer.array, _ffi.NULL))
            return
        kept: list[Any] = []  # what the structs point to
        raw = _ffi.new("kvt_summary *")
        if summary.cells is not None:
            _put_cells(raw, summary.cells, layer, kept)
        raw.n_groups = len(summary.groups)
        raw.groups = _ffi.NULL
        if summary.groups:
            groups = _ffi.new("kvt_summary_group[]", len(summary.groups))
            kept.append(groups)
            for i, group in enumerate(summary.groups):
                _put_group(groups[i], group, layer, kept)
            raw.groups = groups
        _check(_lib.kvt_domain_set_summary(self._open(), layer.array, raw))

    def summary_mass(self, array: int, n_max: int) -> npt.NDArray[np.float32]:
        """Decayed mean attention mass of an array's summary: its cells, then each group. Raises NativeError."""
        out = np.zeros(n_max, np.float32)
        n = int(_lib.kvt_domain_summary_mass(self._open(), array, _ffi.from_buffer("float[]", out), n_max))
        _check(n)
        return out[:n]

    def set_host_budget(self, n_bytes: int) -> None:
        """Change the budget of the host tier; pages leave at once if it shrinks. Raises NativeError."""
        _check(_lib.kvt_domain_set_host_budget(self._open(), n_bytes))

    def reserve(self, n_bytes: int) -> None:
        """Take a part of the host budget away from pages. Raises NativeError."""
        _check(_lib.kvt_domain_reserve(self._open(), n_bytes))

    def compact(self) -> None:
        """Move pages together, so that memory that is only sparsely filled goes back to the system."""
        _check(_lib.kvt_domain_compact(self._open()))

    def evict_every_step(self, on: bool) -> None:
        """A switch for tests: every page that may leave RAM does so after each step."""
        _check(_lib.kvt_domain_evict_every_step(self._open(), int(on)))

    def _open(self) -> Any:
        if self._handle is None:
            raise ClosedError("the KV cache is closed", "Read its figures before closing the model.")
        return self._handle


def _tier_figures(raw: Any) -> TierFigures:
    budget = int(raw.budget_bytes)
    formats = {name: int(raw.bytes_by_format[i]) for i, name in enumerate(FORMATS)}
    return TierFigures(
        None if budget == UNLIMITED else budget, int(raw.used_bytes), int(raw.held_bytes), int(raw.n_pages), formats
    )


def _floats(array: npt.NDArray[np.float32], shape: tuple[int, ...], what: str, kept: list[Any]) -> Any:
    array = np.ascontiguousarray(array, np.float32)
    if array.shape != shape:
        raise InvalidArgumentError(f"{what} of a summary has shape {array.shape}, not {shape}")
    pointer = _ffi.from_buffer("float[]", array)
    kept.append(pointer)
    return pointer


def _put_cells(raw: Any, cells: SummaryCells, layer: LayerFigures, kept: list[Any]) -> None:
    n = cells.key.shape[1]
    keys, values = (layer.n_head_kv, n, layer.d_k), (layer.n_head_kv, n, layer.d_v)
    raw.n_cells = n
    raw.fmt_cells = FORMATS.index(cells.fmt)
    raw.key = _floats(cells.key, keys, "key", kept)
    raw.value = _floats(cells.value, values, "value", kept)
    raw.log_count = _floats(cells.log_count, keys[:2], "log_count", kept)
    raw.key_var = _ffi.NULL if cells.key_var is None else _floats(cells.key_var, keys, "key_var", kept)


def _put_group(raw: Any, group: SummaryGroup | int, layer: LayerFigures, kept: list[Any]) -> None:
    if isinstance(group, int):
        raw.stays = group
        return
    raw.stays = -1
    raw.mass = group.mass
    raw.n = group.k_coord.shape[1]
    raw.fmt_coord = FORMATS.index(group.fmt_coord)
    raw.fmt_basis = FORMATS.index(group.fmt_basis)
    for part, d in (("k", layer.d_k), ("v", layer.d_v)):
        r = getattr(group, f"{part}_basis").shape[1]
        setattr(raw, f"r_{part}", r)
        shapes = {
            "mean": (layer.n_head_kv, d),
            "basis": (layer.n_head_kv, r, d),
            "coord": (layer.n_head_kv, int(raw.n), r),
        }
        for name, shape in shapes.items():
            setattr(raw, f"{part}_{name}", _floats(getattr(group, f"{part}_{name}"), shape, f"{part}_{name}", kept))


def _tier_index(name: str) -> int:
    return TIERS.index("none" if name == GONE else name)


def _hook(hook: OffloadHook | None) -> Any:
    if hook is None:
        return _ffi.NULL

    def call(
        _user: Any, array: int, page: int, layer: int, tier: int, data: Any, n_bytes: int, fmt_k: int, fmt_v: int
    ) -> None:
        # Leaving the block releases the view: a caller that kept it gets a ValueError later instead of freed memory.
        with memoryview(_ffi.buffer(data, n_bytes)).toreadonly() as view:
            hook(array, page, layer, TIERS[tier], view, FORMATS[fmt_k], FORMATS[fmt_v])

    return _ffi.callback("kvt_offload_fn", call)


def _loaded() -> Any:
    if _lib is None:
        raise LibraryError("the native library is not loaded yet", "Call kvtier.native.runtime.load() first.")
    return _lib


def _text(raw: Any) -> str:
    return "" if raw == _ffi.NULL else bytes(_ffi.string(raw)).decode("utf-8", "replace")


def _check(code: int) -> None:
    if code < 0:
        raise from_code(code, last_error() or error_message(code))
