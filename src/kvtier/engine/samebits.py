"""`same_bits`: one answer end to end, however it was computed, and the check that llama.cpp can give it.

Our exact attention gives the same bits for a query whether it comes alone (decode) or in a batch (prefill). The rest of
a model is matrix products, which ggml adds up in one order for one row and in another for several, depending on weight
type, processor and build (docs/same-bits.md). Two settings of llama.cpp make most of them equal; this finds out, with a
few rows of every kind of weight in the model, which are needed and whether they are enough.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from ..errors import SameBitsError, SettingsError
from ..machine import buildargs, hardware
from ..model import gguf
from ..model.header import TENSOR_TYPES, GgufHeader, TensorInfo
from ..model.shape import shape_of
from ..native.products import Products, Weight
from ..settings import KVSettings

# ggml multiplies many rows with weights in blocks of 256 on another path ("tiled"); it reads this variable once.
TILES_VARIABLE: Final = "GGML_CPU_TILED_MM"
_TILED_BLOCK: Final = 256
_ROWS: Final = 64  # of a weight that are tried
_TYPE_IDS: Final = {kind.name: type_id for type_id, kind in TENSOR_TYPES.items()}
_ONLY_LOOKED_UP: Final = ("position_embd.weight", "token_types.weight", "rope_freqs.weight")


def check_settings(settings: KVSettings) -> None:
    """Raise SettingsError for settings whose answer depends on what was computed or evicted before."""
    if (settings.fidelity or "exact") != "exact":
        raise SettingsError(
            f"same_bits is asked for with fidelity {settings.fidelity}, which leaves out at decode what prefill reads",
            "Take fidelity exact.",
        )
    in_ram, on_disk = (settings.host_type_k, settings.host_type_v), (settings.disk_type_k, settings.disk_type_v)
    if settings.disk is not None and in_ram != on_disk:
        raise SettingsError(
            f"same_bits is asked for with pages in {'/'.join(map(str, in_ram))} in RAM and "
            f"{'/'.join(map(str, on_disk))} on disk: an answer would depend on what has been on disk",
            "Give both tiers the same formats.",
        )


def check_windows(header: GgufHeader, swa_full: bool | None) -> None:
    """Raise SettingsError for caches of a sliding window's size: which cell a token gets follows from the micro-batch.

    Sums are ordered by cell. `swa_full` None is llama.cpp's own default, the full size.
    """
    window = shape_of(header).n_swa
    if window and swa_full is not None and not swa_full:
        raise SettingsError(
            f"same_bits is asked for with swa_full {swa_full}: in a cache of only the sliding window ({window:,} "
            "tokens) sums are ordered by the size of the micro-batch",
            "Leave swa_full out.",
        )


def extra_buffers_allowed(headers: Iterable[GgufHeader], lora: str | Path | None = None) -> bool:
    """Whether the model may have repacked weights (llama.cpp's `use_extra_bufts`) and still give the same bits.

    Sets GGML_CPU_TILED_MM=0 for this process, which counts unless something was multiplied before.

    Raises:
        SameBitsError: the model or this llama.cpp cannot do it; says which weights and what to do.
        GgufError: the adapter's file is no usable GGUF.
    """
    headers = tuple(headers)
    if shape_of(headers[0]).n_state_layers:
        raise SameBitsError(
            f"{headers[0].path.name} has layers with a recurrent state, which llama.cpp computes differently for one "
            "token and for several",
            "Run it without same_bits.",
        )
    files = headers if lora is None else (*headers, gguf.read_header(lora))
    weights = [pair for header in files for pair in sample_weights(header)]
    os.environ[TILES_VARIABLE] = "0"
    with Products() as products:
        accelerator = products.accelerator()
        if accelerator is not None:
            raise SameBitsError(
                f"llama.cpp gives products of many rows to {accelerator}, and those of one row to the CPU",
                f"Build it without, and with:\n{_build_command()}",
            )
        for repacked in (True, False):
            unequal = [tensor for tensor, weight in weights if not products.rows_are_independent(weight, repacked)]
            if not unequal:
                return repacked
    raise _refusal(unequal)


def sample_weights(header: GgufHeader) -> Iterator[tuple[TensorInfo, Weight]]:
    """A few rows of every kind of weight that the model multiplies with: by type, length, and rows beyond groups."""
    seen = set()
    names = {tensor.name for tensor in header.tensors}
    with header.path.open("rb") as file:
        for tensor in header.tensors:
            shape = _matrix_shape(tensor)
            if shape is None or tensor.name in _ONLY_LOOKED_UP or tensor.type.name not in _TYPE_IDS:
                continue
            if tensor.name == "token_embd.weight" and "output.weight" in names:
                continue
            n_in, n_out, n_expert = shape
            taken = min(n_out, _ROWS + n_out % _ROWS)  # what is left over after groups of rows goes another way
            kind = (tensor.type.name, n_in, taken, n_expert > 0)
            if kind in seen:
                continue
            seen.add(kind)
            row_bytes = n_in // tensor.type.block_items * tensor.type.block_bytes
            parts = []
            for expert in range(max(1, n_expert)):
                file.seek(header.data_off_bytes + tensor.off_bytes + expert * n_out * row_bytes)
                parts.append(file.read(taken * row_bytes))
            yield tensor, Weight(_TYPE_IDS[tensor.type.name], n_in, taken, n_expert, b"".join(parts))


def _matrix_shape(tensor: TensorInfo) -> tuple[int, int, int] | None:
    """Row length, rows, and (two of the) experts of a weight matrix; None for what is no matrix."""
    dims = (*tensor.shape, 1, 1, 1)[:4]
    if dims[1] == 1 or dims[3] != 1 or dims[0] % tensor.type.block_items:
        return None
    return dims[0], dims[1], 0 if dims[2] == 1 else 2


def _is_tiled(tensor: TensorInfo) -> bool:
    return tensor.type.block_items == _TILED_BLOCK


def _refusal(unequal: list[TensorInfo]) -> SameBitsError:
    kinds = sorted({tensor.type.name for tensor in unequal})
    message = (
        f"this llama.cpp adds products of one row and of several up in different orders for weights in "
        f"{', '.join(kinds)} ({unequal[0].name})"
    )
    if all(_is_tiled(tensor) for tensor in unequal):
        hint = (
            f"Perhaps this process computed with another model before: start it with {TILES_VARIABLE}=0 in its "
            "environment, or make the Llama with same_bits first."
        )
    else:
        hint = f"Build it without llamafile's products, or take a model in q8_0, q4_0 or q4_K_M:\n{_build_command()}"
    return SameBitsError(message, hint)


def _build_command() -> str:
    """The command that builds llama.cpp with products that do not depend on the number of rows."""
    flags = hardware.cpu_flags()
    switches = buildargs.best_args(flags, hardware.amx_state(flags), buildargs.compiler_takes)
    return buildargs.install_command(" ".join(filter(None, (switches, "-DGGML_LLAMAFILE=OFF"))))
