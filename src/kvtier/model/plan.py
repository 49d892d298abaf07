"""What a model with a given context takes in memory, from its GGUF header alone, and what of it fits on this machine.

Sizes of caches follow llama.cpp at the pinned version (`src/llama-kv-cache*.cpp`), sizes of pages
`csrc/store/format.h`, those of bounded fidelity `csrc/store/keys.cpp` and `csrc/attention/digests.cpp`.
The compute buffer is an estimate with the shape of llama.cpp's own graph reservation, checked against what it prints.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ..errors import UsageError
from ..formats import BY_NAME, HEAD_ALIGN_BYTES, page_bytes, row_bytes
from ..settings import COMPACT, SUB_PAGE_TOKENS
from .header import GgufHeader, TensorInfo
from .shape import AttentionLayer, ModelShape, shape_of

CELL_ALIGN: Final = 256  # llama.cpp rounds contexts and sliding caches up to this many cells
KEY_ALIGN_BYTES: Final = 4096  # keys of a head that are kept apart
KEY_SLACK_BYTES: Final = 16384
PROCESS_BYTES: Final = 512 << 20  # left for Python, llama.cpp's own tables and the rest of the machine
LEAST_PAGES_PER_LAYER: Final = 8  # a host budget below this many pages per layer only moves pages to and fro
SLAB_PERCENT: Final = 103  # of a cache's pages: what the store's slabs take for them
MAX_TOKENS: Final = 1 << 24
LONG_TOKENS: Final = 8192  # from here on bounded fidelity pays, whatever room there is
LEAST_LOSSY_PERCENT: Final = 20  # of the cache, measured to be usable (docs/lossy.md)
LOSSY_TYPE: Final = "f16"  # pages of lossy fidelity begin as
SHOWN_TYPES: Final = ("f16", "q8_0", "q4_0", "q4_1")


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is asked for.

    `n_ctx` is in tokens, 0 for the model's own; the rest as llama.cpp's parameters of the same names.
    """

    n_ctx: int = 0
    type_k: str = "f16"
    type_v: str = "f16"
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    kv_unified: bool = False
    swa_full: bool = False
    page_tokens: int = 32


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """The KV cache in one pair of formats: `cache_bytes` as stock llama.cpp allocates it, `page_bytes` as pages of
    ours.

    Both are None where the head sizes do not allow the format. `n_ctx_in_ram` is the longest context whose pages fit in
    the memory that was available, None without a machine.
    """

    type_k: str
    type_v: str
    cache_bytes: int | None
    page_bytes: int | None
    n_ctx_in_ram: int | None = None


@dataclass(frozen=True, slots=True)
class BoundedBytes:
    """A cache for bounded fidelity in Q8_0: `always_bytes`, keys and means of sub-pages, which stay in RAM, and
    `page_bytes`, the pages of values."""

    always_bytes: int
    page_bytes: int
    n_ctx_in_ram: int | None = None  # the longest context of which both fit in RAM, None without a machine

    @property
    def held_bytes(self) -> int:
        """What RAM has to have for all of it."""
        return self.always_bytes + _held(self.page_bytes)


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory and disk at hand, in bytes. `disk_dir` is where pages would go."""

    ram_bytes: int
    ram_available_bytes: int
    disk_dir: Path
    disk_free_bytes: int


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run the model here. `kv_host` and `kv_disk` are budgets in bytes, None for no limit and no disk tier.

    `fidelity` is exact, bounded or lossy, as the option of `kvtier run`; with bounded, types are its own.
    """

    text: str
    type_k: str
    type_v: str
    kv_host: int | None
    kv_disk: int | None
    fidelity: str = "exact"


@dataclass(frozen=True, slots=True)
class Plan:
    """All figures of one model and one request, in bytes where not said otherwise."""

    shape: ModelShape
    request: PlanRequest
    n_ctx: int  # tokens, rounded up as llama.cpp does
    n_cells: int  # of a full layer, per stream
    n_cells_sliding: int  # of a sliding-window layer, per stream; 0 without one
    n_streams: int
    n_pages: int
    file_bytes: int
    weight_bytes: int
    repack_bytes: int  # weights that llama.cpp keeps a second time in an order that suits this CPU
    state_bytes: int
    compute_bytes: int
    output_bytes: int
    chosen: CacheBytes
    caches: tuple[CacheBytes, ...]
    bounded: BoundedBytes | None  # None: head sizes that Q8_0 cannot hold, or no values of their own (MLA)
    machine: Machine | None
    options: tuple[Option, ...]
    warnings: tuple[str, ...]

    @property
    def fixed_bytes(self) -> int:
        """Everything in RAM but the KV cache."""
        return self.weight_bytes + self.state_bytes + self.compute_bytes + self.output_bytes


def make_plan(
    headers: Sequence[GgufHeader],
    request: PlanRequest,
    machine: Machine | None = None,
    cpu_flags: frozenset[str] = frozenset(),
) -> Plan:
    """The plan for a model given by the headers of its files (see gguf.read_model).

    `cpu_flags` are the instruction sets as in /proc/cpuinfo; they decide which weights llama.cpp repacks. Raises
    GgufError for a file that is no language model, UsageError for a request that makes no sense.
    """
    shape = shape_of(headers[0])
    request = _checked(request, shape)
    tensors = [t for h in headers for t in h.tensors]
    n_ctx, n_cells, n_streams = cells(request)
    n_sliding = sliding_cells(request, shape.n_swa, n_cells) if shape.n_swa else 0
    types = [(t, t) for t in SHOWN_TYPES]
    if (request.type_k, request.type_v) not in types:
        types.insert(0, (request.type_k, request.type_v))
    plan = Plan(
        shape=shape,
        request=request,
        n_ctx=n_ctx,
        n_cells=n_cells,
        n_cells_sliding=n_sliding,
        n_streams=n_streams,
        n_pages=sum(_n_pages(layer, request, n_cells, n_sliding, n_streams) for layer in shape.attention),
        file_bytes=sum(h.file_bytes for h in headers),
        weight_bytes=sum(t.n_bytes for t in tensors),
        repack_bytes=_repacked(tensors, cpu_flags),
        state_bytes=4 * shape.state_items * request.n_seq_max,
        compute_bytes=compute_buffer(shape, request, n_cells),
        output_bytes=4 * shape.n_vocab * request.n_seq_max,
        chosen=cache_bytes(shape, request, request.type_k, request.type_v),
        caches=tuple(cache_bytes(shape, request, k, v) for k, v in types),
        bounded=bounded_bytes(shape, request),
        machine=machine,
        options=(),
        warnings=_warnings(shape, request, n_ctx),
    )
    if plan.chosen.cache_bytes is None:
        raise UsageError(
            f"keys as {request.type_k} and values as {request.type_v} need head sizes that are multiples of 32, "
            "which this model has not",
            "Take -ctk f16 -ctv f16.",
        )
    return plan if machine is None else _with_machine(plan, machine)


def _checked(request: PlanRequest, shape: ModelShape) -> PlanRequest:
    for name in ("type_k", "type_v"):
        value = getattr(request, name)
        if value not in BY_NAME:
            raise UsageError(f"unknown cache type '{value}'", f"Known are {', '.join(BY_NAME)}.")
    if not 0 <= request.n_ctx <= MAX_TOKENS:
        raise UsageError(
            f"a context of {request.n_ctx:,} tokens is not possible", f"Take 0 (the model's own) to {MAX_TOKENS:,}."
        )
    if request.n_ctx == 0 and shape.n_ctx_train <= 0:
        raise UsageError("the file does not say which context the model was trained for", "Name one with --ctx.")
    if min(request.n_batch, request.n_ubatch, request.n_seq_max) < 1:
        raise UsageError("batch sizes and the number of sequences must be at least 1")
    if request.page_tokens < 1 or request.page_tokens % SUB_PAGE_TOKENS:
        raise UsageError(
            f"pages of {request.page_tokens} tokens are not possible", f"Take a multiple of {SUB_PAGE_TOKENS}."
        )
    n_ctx = request.n_ctx or min(shape.n_ctx_train, MAX_TOKENS)
    n_batch = min(request.n_batch, n_ctx)
    return replace(request, n_ctx=n_ctx, n_batch=n_batch, n_ubatch=min(request.n_ubatch, n_batch))


def _warnings(shape: ModelShape, request: PlanRequest, n_ctx: int) -> tuple[str, ...]:
    warnings = [f"{note}." for note in shape.notes]
    if not shape.attention:
        warnings.append("This model has no attention layer: there is no KV cache to place, it runs as it is.")
    if shape.n_ctx_train and request.n_ctx > shape.n_ctx_train:
        warnings.append(
            f"The model was trained for {shape.n_ctx_train:,} tokens; {n_ctx:,} need RoPE scaling, for example "
            f"{' '.join(rope_words(shape, request))}."
        )
    return tuple(warnings)


def rope_words(shape: ModelShape, request: PlanRequest) -> list[str]:
    """Options of `kvtier run` that stretch the model's positions over the context; none if it was trained for as
    much."""
    if not shape.n_ctx_train or request.n_ctx <= shape.n_ctx_train:
        return []
    return ["--rope-scaling", "yarn", "--rope-scale", str(-(-request.n_ctx // shape.n_ctx_train))]


def _up(n: int, align: int) -> int:
    return -(-n // align) * align


def cells(request: PlanRequest) -> tuple[int, int, int]:
    """Tokens of the context, cells of one stream, and streams, as llama.cpp rounds them. `n_ctx` must not be 0."""
    n_ctx = _up(request.n_ctx, CELL_ALIGN)
    if request.kv_unified:
        return n_ctx, n_ctx, 1
    per_seq = _up(n_ctx // request.n_seq_max, CELL_ALIGN)
    return per_seq * request.n_seq_max, per_seq, request.n_seq_max


def sliding_cells(request: PlanRequest, n_swa: int, n_cells: int) -> int:
    """Cells of one stream of a sliding-window layer: the window (of every sequence that shares the stream) and one
    micro-batch."""
    if request.swa_full:
        return n_cells
    return _up(min(n_cells, n_swa * (request.n_seq_max if request.kv_unified else 1) + request.n_ubatch), CELL_ALIGN)


def _n_pages(layer: AttentionLayer, request: PlanRequest, n_cells: int, n_sliding: int, n_streams: int) -> int:
    return n_streams * -(-(n_sliding if layer.slides else n_cells) // request.page_tokens)


def cache_bytes(shape: ModelShape, request: PlanRequest, type_k: str, type_v: str) -> CacheBytes:
    """The KV cache in these formats, for a request whose `n_ctx` is not 0."""
    _, n_cells, n_streams = cells(request)
    n_sliding = sliding_cells(request, shape.n_swa, n_cells) if shape.n_swa else 0
    stock = pages = 0
    for layer in shape.attention:
        k, v = row_bytes(type_k, layer.d_k), row_bytes(type_v, layer.d_v)
        page = page_bytes(layer, type_k, type_v, request.page_tokens)
        if k is None or v is None or page is None:
            return CacheBytes(type_k, type_v, None, None)
        stock += layer.n_head_kv * (k + v) * n_streams * (n_sliding if layer.slides else n_cells)
        pages += page * _n_pages(layer, request, n_cells, n_sliding, n_streams)
    return CacheBytes(type_k, type_v, stock, pages)


def bounded_bytes(shape: ModelShape, request: PlanRequest) -> BoundedBytes | None:
    """The KV cache for bounded fidelity, for a request whose `n_ctx` is not 0; None where a layer cannot have it."""
    _, n_cells, n_streams = cells(request)
    n_sliding = sliding_cells(request, shape.n_swa, n_cells) if shape.n_swa else 0
    always = pages = 0
    for layer in shape.attention:
        k, v = row_bytes(COMPACT, layer.d_k), row_bytes(COMPACT, layer.d_v)
        if not k or not v:
            return None
        n_pages = _n_pages(layer, request, n_cells, n_sliding, n_streams)
        n_subs = n_pages * request.page_tokens // SUB_PAGE_TOKENS
        n_groups = -(-n_subs // SUB_PAGE_TOKENS)
        keys = layer.n_head_kv * _up(n_subs * SUB_PAGE_TOKENS * k, KEY_ALIGN_BYTES) + KEY_SLACK_BYTES
        n_errors = (-(-layer.d_k // 32) + 1) * (n_subs // SUB_PAGE_TOKENS + 2) * SUB_PAGE_TOKENS
        errors = 4 * layer.n_head_kv * (n_errors + layer.d_k)
        means = layer.n_head_kv * _up((n_groups + 1) * SUB_PAGE_TOKENS * v, HEAD_ALIGN_BYTES) + n_subs
        always += keys + errors + means
        pages += n_pages * layer.n_head_kv * _up(request.page_tokens * v, HEAD_ALIGN_BYTES)
    return BoundedBytes(always, pages) if shape.attention else None


def compute_buffer(shape: ModelShape, request: PlanRequest, n_cells: int) -> int:
    """Estimate of llama.cpp's compute buffer on the CPU with flash attention, for one micro-batch.

    The buffer is as large as the fuller of two moments: at the end, the logits of every token with two rows of hidden
    state; in the middle of a layer, the mask (F16, a row of all cells per token) with the rows that the feed-forward
    part holds.
    """
    per_token_end = 4 * (shape.n_vocab + 2 * shape.n_embd)
    mask = 2 * n_cells if shape.attention else 0
    per_token_layer = mask + 4 * (3 * shape.n_ff + 4 * shape.n_embd)
    return request.n_ubatch * max(per_token_end, per_token_layer)


def _repacked(tensors: Sequence[TensorInfo], cpu_flags: frozenset[str]) -> int:
    """Bytes of the matrices that the CPU backend copies into an interleaved order (ggml-cpu/repack.cpp), on x86."""
    types = {"q4_0", "q4_K", "iq4_nl", "mxfp4"} if "avx2" in cpu_flags else set()
    if "avx512f" in cpu_flags:
        types |= {"q2_K"}
    tied = not any(t.name == "output.weight" for t in tensors)
    return sum(
        t.n_bytes
        for t in tensors
        if t.type.name in types
        and len(t.shape) >= 2
        and t.shape[1] % 8 == 0
        and (t.name != "token_embd.weight" or tied)
    )


def _with_machine(plan: Plan, machine: Machine) -> Plan:
    room = machine.ram_available_bytes - PROCESS_BYTES - plan.fixed_bytes
    caches = tuple(replace(c, n_ctx_in_ram=_longest_exact(plan, machine, c)) for c in plan.caches)
    bounded = plan.bounded and replace(
        plan.bounded,
        n_ctx_in_ram=_longest(plan, machine, lambda r: b.held_bytes if (b := bounded_bytes(plan.shape, r)) else 0),
    )
    warnings = list(plan.warnings)
    if plan.fixed_bytes + PROCESS_BYTES > machine.ram_available_bytes:
        warnings.append(
            "Weights and buffers alone are more than the memory available: they would be read from the file again "
            "for every token."
        )
    return replace(
        plan,
        machine=machine,
        caches=caches,
        bounded=bounded,
        options=_options(plan, machine, room),
        warnings=tuple(warnings),
    )


def _held(n_bytes: int) -> int:
    return n_bytes * SLAB_PERCENT // 100


def _longest_exact(plan: Plan, machine: Machine, cache: CacheBytes) -> int | None:
    if cache.page_bytes is None:
        return None
    return _longest(
        plan, machine, lambda r: _held(cache_bytes(plan.shape, r, cache.type_k, cache.type_v).page_bytes or 0)
    )


def _longest(plan: Plan, machine: Machine, held: Callable[[PlanRequest], int]) -> int:
    """The longest context (a multiple of 256 tokens) of which what is `held` fits in RAM, 0 if none does."""

    def fits(n_ctx: int) -> bool:
        request = replace(plan.request, n_ctx=n_ctx)
        n_cells = cells(request)[1]
        fixed = plan.fixed_bytes - plan.compute_bytes + compute_buffer(plan.shape, request, n_cells)
        return held(request) + fixed + PROCESS_BYTES <= machine.ram_available_bytes

    low, high = 0, MAX_TOKENS // CELL_ALIGN
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * CELL_ALIGN) else (low, middle - 1)
    return low * CELL_ALIGN


def _options(plan: Plan, machine: Machine, room: int) -> tuple[Option, ...]:
    """Ways to run: in RAM with the asked formats or smaller ones, then RAM with disk; each exact, then bounded.

    Last, without a disk, lossy.
    """
    asked = plan.chosen.page_bytes or 0
    candidates = [plan.chosen, *(c for c in plan.caches if c.page_bytes is not None and c.page_bytes < asked)]
    in_ram = next((c for c in candidates if _held(c.page_bytes or 0) <= room), None)
    ways = [] if in_ram is None else [Option("all in RAM", in_ram.type_k, in_ram.type_v, None, None)]
    bounded = plan.bounded if plan.n_ctx >= LONG_TOKENS or in_ram is not plan.chosen else None
    if bounded and bounded.held_bytes <= room:
        ways.append(Option("all in RAM, reading what matters", COMPACT, COMPACT, None, None, "bounded"))
        bounded = None
    if in_ram is plan.chosen:
        return tuple(ways)
    ways += [way for c in candidates if _held(c.page_bytes or 0) > room and (way := _split(plan, machine, room, c))][:1]
    ways += [way] if bounded and (way := _split_bounded(plan, machine, room, bounded)) else []
    ways += [way] if (way := _lossy(plan, room)) else []
    return tuple(ways)


def _host_budget(room: int, least: int) -> int | None:
    """Of this room, in whole MiB; None if that is less than the `least` or too little to work in."""
    host = room * 9 // 10 >> 20 << 20
    return host if host >= max(least, 1 << 20) else None


def _working_bytes(plan: Plan, type_k: str, type_v: str) -> int:
    """Pages that a host budget holds if it does more than move pages to and fro."""
    pages = (page_bytes(layer, type_k, type_v, plan.request.page_tokens) or 0 for layer in plan.shape.attention)
    return LEAST_PAGES_PER_LAYER * plan.n_streams * sum(pages)


def _disk_budget(n_bytes: int, machine: Machine) -> int | None:
    disk = _up(n_bytes * 21 // 20, 1 << 20)  # slots are a little larger than pages
    return disk if disk <= machine.disk_free_bytes else None


def _split(plan: Plan, machine: Machine, room: int, cache: CacheBytes) -> Option | None:
    """RAM and disk with this format, or None if the disk is too small, or RAM too small to work in."""
    host = _host_budget(room, _working_bytes(plan, cache.type_k, cache.type_v))
    disk = host and _disk_budget((cache.page_bytes or 0) - host, machine)
    return Option("RAM and disk", cache.type_k, cache.type_v, host, disk) if disk else None


def _split_bounded(plan: Plan, machine: Machine, room: int, bounded: BoundedBytes) -> Option | None:
    host = _host_budget(room, bounded.always_bytes + _working_bytes(plan, COMPACT, COMPACT))
    disk = host and _disk_budget(bounded.always_bytes + bounded.page_bytes - host, machine)
    return Option("RAM and disk, reading what matters", COMPACT, COMPACT, host, disk, "bounded") if disk else None


def _lossy(plan: Plan, room: int) -> Option | None:
    """RAM alone, with part of the cache.

    None if that were less than a fifth of it in F16: less has not been measured.
    """
    whole = next(c.page_bytes for c in plan.caches if c.type_k == c.type_v == LOSSY_TYPE)
    if not whole:
        return None
    layer_bytes = (
        page_bytes(layer, LOSSY_TYPE, LOSSY_TYPE, plan.request.page_tokens) or 0
        for layer in plan.shape.attention
        if layer.slides
    )
    windows = (
        plan.n_streams * -(-plan.n_cells_sliding // plan.request.page_tokens) * sum(layer_bytes)
    )  # are never given up
    host = _host_budget(
        room, max(windows + _working_bytes(plan, LOSSY_TYPE, LOSSY_TYPE), whole * LEAST_LOSSY_PERCENT // 100)
    )
    if host is None:
        return None
    share = f"{host * 100 // whole} %" if host < whole else "all"
    return Option(
        f"in RAM alone, in {share} of the bytes: what is wanted least goes", LOSSY_TYPE, LOSSY_TYPE, host, None, "lossy"
    )


def command_line(
    model: Sequence[str], plan: Plan, option: Option, kv_dir: Path | None = None, extra: Sequence[str] = ()
) -> str:
    """The command that runs the model in this way; `model` are the words that name it, `kv_dir` the disk tier's own
    directory, if any, `extra` more options."""
    parts = ["kvtier", "run", *model, "-c", str(plan.request.n_ctx)]
    if (option.type_k, option.type_v) != ("f16", "f16") and option.fidelity != "bounded":
        parts += ["-ctk", option.type_k, "-ctv", option.type_v]
    if option.fidelity != "exact":
        parts += ["--fidelity", option.fidelity]
    if option.kv_host is not None:
        parts += ["--kv-host", f"{option.kv_host >> 20}MiB"]
    if option.kv_disk is not None:
        parts += ["--kv-disk", f"{option.kv_disk >> 20}MiB"]
        parts += ["--kv-dir", str(kv_dir)] if kv_dir is not None else []
    return shlex.join([*parts, *extra])
