"""Matrix products of ggml's CPU backend, one at a time: does a row's result depend on how many rows come with it?

For some weight types, processors and builds ggml multiplies one row (a token of decode) and several (a batch of
prefill) with different kernels, which add the same numbers up in different orders. Nothing that a library says about
itself tells which, so this multiplies a few rows of real weights both ways and compares bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import LlamaError, OutOfMemoryError
from .runtime import libggml, load, log

# Rows of the products that are compared with one row's: kernels change at 2, 3, 4, 8 and 16 rows, and what is left over
# after groups of 4 goes another way again.
ROWS: Final = (2, 3, 4, 8, 23)
_DEVICE_CPU, _DEVICE_ACCEL = 0, 3  # enum ggml_backend_dev_type
_F32, _I32 = 0, 26
_CONTEXT_BYTES: Final = 1 << 20

_P, _Z, _I, _I64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", _Z), ("mem_buffer", _P), ("no_alloc", ctypes.c_bool))


_FUNCTIONS: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "ggml_init": (_P, (_InitParams,)),
    "ggml_free": (None, (_P,)),
    "ggml_new_tensor_2d": (_P, (_P, _I, _I64, _I64)),
    "ggml_new_tensor_3d": (_P, (_P, _I, _I64, _I64, _I64)),
    "ggml_mul_mat": (_P, (_P, _P, _P)),
    "ggml_mul_mat_id": (_P, (_P, _P, _P, _P)),
    "ggml_new_graph": (_P, (_P,)),
    "ggml_build_forward_expand": (None, (_P, _P)),
    "ggml_backend_dev_by_type": (_P, (_I,)),
    "ggml_backend_dev_name": (ctypes.c_char_p, (_P,)),
    "ggml_backend_dev_init": (_P, (_P, ctypes.c_char_p)),
    "ggml_backend_dev_buffer_type": (_P, (_P,)),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, (_P, _P)),
    "ggml_backend_dev_backend_reg": (_P, (_P,)),
    "ggml_backend_reg_get_proc_address": (_P, (_P, ctypes.c_char_p)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, (_P, _P)),
    "ggml_backend_buffer_free": (None, (_P,)),
    "ggml_backend_tensor_set": (None, (_P, _P, _Z, _Z)),
    "ggml_backend_tensor_get": (None, (_P, _P, _Z, _Z)),
    "ggml_backend_graph_compute": (_I, (_P, _P)),
    "ggml_backend_free": (None, (_P,)),
}


@dataclass(frozen=True, slots=True)
class Weight:
    """A few rows of a weight matrix, as they are in the file.

    `type_id` is ggml's number of the type, `n_in` the row's length, `n_out` the number of rows. With `n_expert` > 0 the
    rows of so many experts follow each other, and the product is the one that picks an expert for each token.
    """

    type_id: int
    n_in: int
    n_out: int
    n_expert: int
    data: bytes


class Products:
    """ggml's CPU backend, as far as it multiplies. Close it after use; not for two threads at once."""

    def __init__(self) -> None:
        load()
        # a handle of its own: prototypes that others set on `libggml` stay theirs
        self._g = ctypes.CDLL(libggml._name)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self._g, name)
            function.restype, function.argtypes = result, arguments
        self._device = self._g.ggml_backend_dev_by_type(_DEVICE_CPU)
        self._backend = self._g.ggml_backend_dev_init(self._device, None)
        self._plain = self._g.ggml_backend_dev_buffer_type(self._device)

    def close(self) -> None:
        self._g.ggml_backend_free(self._backend)

    def __enter__(self) -> Products:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def accelerator(self) -> str | None:
        """The name of a device that takes products of many rows from the CPU backend (BLAS), None without one."""
        device = self._g.ggml_backend_dev_by_type(_DEVICE_ACCEL)
        return self._g.ggml_backend_dev_name(device).decode() if device else None

    def rows_are_independent(self, weight: Weight, repacked: bool) -> bool:
        """Whether each row of a product of many rows equals, bit for bit, the product of that row alone.

        `repacked`: the weights lie where llama.cpp puts them by default, in a layout for this processor if there is
        one; else as they are in the file (llama.cpp's `use_extra_bufts` off).
        """
        rng = np.random.default_rng(20)
        rows = rng.standard_normal((max(ROWS), weight.n_in), dtype=np.float32)
        rows[:, :: max(1, weight.n_in // 3)] *= 20  # some channels stand out, as in real activations
        with self._placed(weight, repacked) as tensor:
            ones = [self._product(weight, tensor, rows[i : i + 1], i, n_threads=1) for i in range(len(rows))]
            one_by_one = np.concatenate(ones)
            together = [self._product(weight, tensor, rows[:n], 0, n_threads=1) for n in ROWS]
            together.append(self._product(weight, tensor, rows, 0, n_threads=2))
        return all(np.array_equal(many.view(np.int32), one_by_one[: len(many)].view(np.int32)) for many in together)

    @contextmanager
    def _placed(self, weight: Weight, repacked: bool) -> Iterator[int]:
        """The weight as a tensor, in the first buffer type that can multiply it, in llama.cpp's order."""
        homes = [*self._extra_types(), self._plain] if repacked else [self._plain]
        data = np.frombuffer(weight.data, np.uint8)
        for home in homes:
            with self._context() as context:
                shape = (weight.n_in, weight.n_out)
                tensor = (
                    self._g.ggml_new_tensor_3d(context, weight.type_id, *shape, weight.n_expert)
                    if weight.n_expert
                    else self._g.ggml_new_tensor_2d(context, weight.type_id, *shape)
                )
                with log.quiet(), self._allocated(context, home):
                    if home != self._plain and not self._can_multiply(weight, tensor):
                        continue
                    self._g.ggml_backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)
                    yield tensor
                    return

    def _can_multiply(self, weight: Weight, tensor: int) -> bool:
        with self._context() as context:
            return bool(
                self._g.ggml_backend_dev_supports_op(self._device, self._operation(context, weight, tensor, 1)[0])
            )

    def _operation(self, context: int, weight: Weight, tensor: int, n_rows: int) -> tuple[int, int, int]:
        """The product, its rows, and the experts of the rows (0 without experts)."""
        if not weight.n_expert:
            rows = self._g.ggml_new_tensor_2d(context, _F32, weight.n_in, n_rows)
            return self._g.ggml_mul_mat(context, tensor, rows), rows, 0
        rows = self._g.ggml_new_tensor_3d(context, _F32, weight.n_in, 1, n_rows)
        chosen = self._g.ggml_new_tensor_2d(context, _I32, 1, n_rows)
        return self._g.ggml_mul_mat_id(context, tensor, rows, chosen), rows, chosen

    def _product(
        self, weight: Weight, tensor: int, values: npt.NDArray[np.float32], first: int, n_threads: int
    ) -> npt.NDArray[np.float32]:
        """The product [n, n_out] of values [n, n_in]; row i goes to expert (first + i) modulo their number."""
        g = self._g
        with self._context() as context:
            product, rows, chosen = self._operation(context, weight, tensor, len(values))
            graph = g.ggml_new_graph(context)
            g.ggml_build_forward_expand(graph, product)
            with self._allocated(context, self._plain):
                g.ggml_backend_tensor_set(rows, values.ctypes.data, 0, values.nbytes)
                if chosen:
                    experts = ((np.arange(len(values)) + first) % weight.n_expert).astype(np.int32)
                    g.ggml_backend_tensor_set(chosen, experts.ctypes.data, 0, experts.nbytes)
                self._set_threads(n_threads)
                if g.ggml_backend_graph_compute(self._backend, graph) != 0:
                    raise LlamaError("ggml could not compute a matrix product", "", log.problems())
                out = np.empty((len(values), weight.n_out), np.float32)
                g.ggml_backend_tensor_get(product, out.ctypes.data, 0, out.nbytes)
        return out

    @contextmanager
    def _context(self) -> Iterator[int]:
        context = self._g.ggml_init(_InitParams(_CONTEXT_BYTES, None, True))
        try:
            yield context
        finally:
            self._g.ggml_free(context)

    @contextmanager
    def _allocated(self, context: int, buffer_type: int) -> Iterator[None]:
        """Memory for the context's tensors. Raises OutOfMemoryError."""
        buffer = self._g.ggml_backend_alloc_ctx_tensors_from_buft(context, buffer_type)
        if not buffer:
            raise OutOfMemoryError("no memory for a few rows of a weight matrix")
        try:
            yield
        finally:
            self._g.ggml_backend_buffer_free(buffer)

    def _extra_types(self) -> list[int]:
        """The CPU backend's buffer types with layouts of their own, best first (AMX, KleidiAI, repacked)."""
        address = self._proc(b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return []
        types = ctypes.CFUNCTYPE(ctypes.POINTER(_P), _P)(address)(self._device)
        found: list[int] = []
        while types and types[len(found)]:
            found.append(types[len(found)])
        return found

    def _set_threads(self, n_threads: int) -> None:
        address = self._proc(b"ggml_backend_set_n_threads")
        if address:
            ctypes.CFUNCTYPE(None, _P, _I)(address)(self._backend, n_threads)

    def _proc(self, name: bytes) -> int | None:
        registry = self._g.ggml_backend_dev_backend_reg(self._device)
        address: int | None = self._g.ggml_backend_reg_get_proc_address(registry, name)
        return address
