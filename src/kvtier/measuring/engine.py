"""A model and a context through llama.cpp's own C API, as thin as a measurement needs it."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..model.cachetypes import GGML_TYPES
from ..settings import KVSettings
from . import state as states
from .config import Configuration, Opening
from .errors import MeasuringError, StateLayoutError

_TEMPLATE_TOKENS = 256  # real tokens whose cells fill a longer context

_PLAN_S = 60.0  # that a plan may take on a machine with too much to do
_CELL_HEAD_BYTES = 12  # position, number of sequences and sequence of a cell in a saved state


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of all layers, one after another, by layer and page number; arrays of [n_pages of all layers].

    Attributes:
        layer: int32, number of the layer; mass: float32, decayed mean attention mass; tier: uint8, index into
            kvtier.figures.TIERS.
    """

    layer: NDArray[np.int32]
    mass: NDArray[np.float32]
    tier: NDArray[np.uint8]


class Engine:
    """An open model. One sequence, one batch at a time.

    kvtier's pages belong to a domain of the engine's own, opened with the configuration's settings.
    """

    def __init__(self, opening: Opening) -> None:
        import llama_cpp

        from ..native.runtime import load_backends

        self._lib: Any = llama_cpp
        self._opening = opening
        self.n_past = 0
        self._log = _quiet_log()
        llama_cpp.llama_backend_init()
        load_backends()
        self._domain: Any = None
        self._placement: Any = None
        self._lossy: Any = None
        self._model: Any = None
        self._ctx: Any = None
        try:
            self._model = self._load(opening)
            self._ctx = self._context(opening)
        except BaseException:
            self._free()
            raise
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.vocab = vocab
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(vocab))
        self._memory = llama_cpp.llama_get_memory(self._ctx)
        self.n_batch = int(llama_cpp.llama_n_batch(self._ctx))  # llama.cpp cuts it down to the context
        self._batch = llama_cpp.llama_batch_init(self.n_batch, 0, 1)

    def _load(self, opening: Opening) -> Any:
        lib = self._lib
        if not Path(opening.model).is_file():
            raise MeasuringError(f"no such model file: {opening.model}")
        params = lib.llama_model_default_params()
        handles: list[int | None] = [None]
        if opening.config.engine == "kvtier":
            handles = [self._kvtier_device(opening), None]
        self._devices = (ctypes.c_void_p * len(handles))(*handles)  # must outlive the load
        params.devices = ctypes.cast(self._devices, ctypes.c_void_p)
        params.n_gpu_layers = 99 if opening.config.engine == "kvtier" else 0
        model = lib.llama_model_load_from_file(os.fsencode(opening.model), params)
        if not model:
            raise self._failure(f"llama.cpp could not load {opening.model}")
        return model

    def _kvtier_device(self, opening: Opening) -> int:
        from ..native import binding, runtime

        device = runtime.load().device
        opening.config.make_directory()
        self._domain = binding.Domain(opening.config.settings)
        if opening.config.policy:
            self._start_policy(opening.config)
        return device

    def _start_policy(self, config: Configuration) -> None:
        """A policy that makes its plans between steps rather than beside them: the same run gives the same figures."""
        from ..lossy.memory import LossyEngine
        from ..lossy.settings import memory_for
        from ..native.kv import CacheLease, KVCache
        from ..placement.kvengine import KVEngine
        from ..placement.placement import Placement
        from ..policies.registry import create

        settings, policy = KVSettings.from_native(config.settings), create(config.policy)
        cache = KVCache(self._domain, CacheLease(lambda: None), settings)
        self._lossy = (
            LossyEngine(cache, config.memory or memory_for(policy.name), self.text)
            if settings.fidelity == "lossy"
            else None
        )
        self._pages = self._lossy or KVEngine(cache, self.text)
        self._placement = Placement(self._pages, policy, report=lambda _text: None)

    def _failure(self, what: str) -> Exception:
        """The error for a failed call: with what the native library or llama.cpp's log has to say."""
        reason = self._domain.last_error() if self._domain is not None else ""
        return MeasuringError(f"{what}: {reason or '; '.join(self._log.problems()) or 'no reason given'}")

    def _context(self, opening: Opening) -> Any:
        lib, config = self._lib, opening.config
        params = lib.llama_context_default_params()
        params.n_ctx = opening.n_ctx
        params.n_batch = params.n_ubatch = opening.n_batch
        params.n_seq_max = 1
        params.n_threads = params.n_threads_batch = opening.n_threads
        params.type_k, params.type_v = GGML_TYPES[config.type_k], GGML_TYPES[config.type_v]
        params.flash_attn_type = 1 if config.flash_attn else 0
        params.offload_kqv = True
        params.swa_full = False
        params.no_perf = True
        params.rope_freq_base = opening.rope.freq_base
        params.rope_freq_scale = opening.rope.freq_scale
        if opening.rope.freq_scale:
            params.rope_scaling_type = lib.LLAMA_ROPE_SCALING_TYPE_LINEAR
        if self._domain is not None:
            self._domain.bind()
        ctx = lib.llama_init_from_model(self._model, params)
        if not ctx:
            raise self._failure(f"llama.cpp could not make a context of {opening.n_ctx} tokens for {config.name}")
        return ctx

    def close(self) -> None:
        """Free everything, files of the disk tier included. Safe to call twice."""
        if self._ctx is not None:
            self._lib.llama_batch_free(self._batch)
        self._free()

    def _free(self) -> None:
        if self._placement is not None:
            self._placement.stop()
        if self._ctx is not None:
            self._lib.llama_free(self._ctx)
        if self._model is not None:
            self._lib.llama_model_free(self._model)
        if self._domain is not None:
            self._domain.unbind()
            self._domain.close()
        self._ctx = self._model = self._domain = self._placement = None

    # what the model is

    def model_bytes(self) -> int:
        return int(self._lib.llama_model_size(self._model))

    def disk_read_bytes(self) -> int:
        """Bytes that kvtier read from its disk tier so far; 0 for stock."""
        return int(self._domain.figures().disk_read_bytes) if self._domain is not None else 0

    def kv_read_bytes(self) -> int:
        """Bytes of keys and values that kvtier's attention read so far; 0 for stock, which counts nothing."""
        if self._domain is None:
            return 0
        figures = self._domain.figures()
        return int(figures.k_bytes_read + figures.v_bytes_read)

    def n_plans(self) -> int:
        """Plans of the policy that were carried out so far; 0 without one."""
        return int(self._placement.figures.n_plans) if self._placement is not None else 0

    def counts(self) -> dict[str, Any]:
        """kvtier's figures so far, tiers left out; empty for stock."""
        if self._domain is None:
            return {}
        return {name: value for name, value in asdict(self._domain.figures()).items() if name != "tiers"}

    def pages(self) -> Pages | None:
        """Every page of every layer as it is now: a copy; None for stock."""
        if self._domain is None:
            return None
        parts = []
        for i in range(self._domain.n_layers()):
            layer = self._domain.layer(i)
            address = layer.page_mean_address
            mass = np.zeros(layer.n_pages, np.float32)
            if address:
                mass[:] = np.ctypeslib.as_array((ctypes.c_float * layer.n_pages).from_address(address))
            tier = self._domain.pages(i)[0]
            parts.append((layer.layer, mass, tier))
        parts.sort(key=lambda part: part[0])
        if not parts:
            return Pages(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.uint8))
        layers = np.concatenate([np.full(mass.size, layer, np.int32) for layer, mass, _ in parts])
        return Pages(
            layers, np.concatenate([mass for _, mass, _ in parts]), np.concatenate([tier for _, _, tier in parts])
        )

    def cell_bytes(self) -> int:
        """Bytes of all cells that the next token sees, in the format of the cache that llama.cpp knows."""
        return max(0, self.state_bytes() - _CELL_HEAD_BYTES * self.n_past)

    def n_ctx_train(self) -> int:
        return int(self._lib.llama_model_n_ctx_train(self._model))

    def tokenize(self, text: bytes) -> list[int]:
        """Token ids of UTF-8 text, with the model's start token where it wants one."""
        lib = self._lib
        room = len(text) + 16
        out = (lib.llama_token * room)()
        n = lib.llama_tokenize(self.vocab, text, len(text), out, room, True, False)
        if n < 0:
            raise MeasuringError("llama.cpp could not tokenise the text")
        return list(out[:n])

    def is_end(self, token: int) -> bool:
        """Whether the model ends a text with this token."""
        return bool(self._lib.llama_vocab_is_eog(self.vocab, token))

    def text(self, tokens: Iterable[int]) -> str:
        """The text of tokens; control tokens have none, and bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self._piece(token) for token in tokens).decode("utf-8", "replace")

    def _piece(self, token: int) -> bytes:
        size = 64
        while True:
            room = ctypes.create_string_buffer(size)
            n = int(self._lib.llama_token_to_piece(self.vocab, token, room, size, 0, False))
            if n >= 0:
                return room.raw[:n]
            size = -n

    # computing

    def set_threads(self, n_threads: int) -> None:
        self._lib.llama_set_n_threads(self._ctx, n_threads, n_threads)

    def _decode(self, tokens: Sequence[int], logits: bool) -> None:
        batch, n = self._batch, len(tokens)
        if n > 1 and self._lossy is not None:
            from ..lossy.memory import make_room

            self._must_settle(make_room(self._lossy, self._placement, n))
        batch.n_tokens = n
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = self.n_past + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = 0
        batch.logits[n - 1] = 1 if logits else 0
        rc = self._lib.llama_decode(self._ctx, batch)
        if rc != 0:
            raise self._failure(f"llama_decode answered {rc} at position {self.n_past} of {self._opening.n_ctx}")
        self._lib.llama_synchronize(self._ctx)
        self.n_past += n
        if self._placement is not None:
            self._pages.advance(tokens)
            self._placement.advance(n)
            self._must_settle(self._placement.settle(_PLAN_S))

    def _must_settle(self, settled: bool) -> None:
        """Figures of a policy that failed, or of steps that did not wait for its plan, would be another's."""
        name, problem = self._opening.config.policy, self._placement.figures.problem
        if problem or not settled:
            raise MeasuringError(f"the policy {name} failed: {problem or f'no plan within {_PLAN_S:.0f} s'}")

    def prefill(self, tokens: Sequence[int]) -> float:
        """Process `tokens` in batches of `n_batch`; seconds. Only the very last has logits."""
        n_batch = self.n_batch
        start = time.perf_counter()
        for i in range(0, len(tokens), n_batch):
            self._decode(tokens[i : i + n_batch], logits=i + n_batch >= len(tokens))
        return time.perf_counter() - start

    def decode(self, tokens: Iterable[int]) -> float:
        """Process tokens one by one, with logits each; seconds."""
        start = time.perf_counter()
        for token in tokens:
            self._decode((token,), logits=True)
        return time.perf_counter() - start

    def logits(self) -> NDArray[np.float32]:
        """Logits of the last token processed: a copy, float32 [n_vocab]."""
        pointer = self._lib.llama_get_logits_ith(self._ctx, -1)
        return np.ctypeslib.as_array(pointer, shape=(self.n_vocab,)).astype(np.float32, copy=True)

    # the cache

    def clear(self) -> None:
        """Forget everything; a policy starts anew, too."""
        if self._placement is not None:
            self._placement.stop()
            self._start_policy(self._opening.config)
        self._lib.llama_memory_clear(self._memory, True)
        self.n_past = 0

    def rewind(self, n_tokens: int) -> bool:
        """Forget all tokens from position `n_tokens` on. False where the model's memory cannot (recurrent states)."""
        if n_tokens < self.n_past and not self._lib.llama_memory_seq_rm(self._memory, 0, n_tokens, -1):
            return False
        self.n_past = min(self.n_past, n_tokens)
        return True

    def state_bytes(self) -> int:
        """Size of the sequence's saved state: the bytes of all cells it can see, and 12 more for each."""
        return int(self._lib.llama_state_seq_get_size(self._ctx, 0))

    def save_state(self) -> NDArray[np.uint8]:
        """The sequence's saved state, uint8 [n_bytes]."""
        lib = self._lib
        size = self.state_bytes()
        data = np.empty(size, np.uint8)
        n = int(lib.llama_state_seq_get_data(self._ctx, data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)), size, 0))
        if n == 0:
            raise StateLayoutError("llama.cpp could not save the state of the sequence")
        return data[:n]

    def load_state(self, data: NDArray[np.uint8], n_tokens: int) -> None:
        """Restore a saved state of `n_tokens` tokens."""
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if int(self._lib.llama_state_seq_set_data(self._ctx, pointer, data.size, 0)) == 0:
            raise StateLayoutError("llama.cpp did not take the lengthened state")
        self.n_past = n_tokens

    def fill(self, tokens: Sequence[int], n_tokens: int) -> str:
        """Bring the context to `n_tokens` tokens; "repeated" cells if that can be done, else "computed".

        `tokens` are real tokens, used round and round.
        """
        self.clear()
        if n_tokens <= _TEMPLATE_TOKENS:
            self.prefill(_cycle(tokens, n_tokens))
            return "computed"
        self.prefill(_cycle(tokens, _TEMPLATE_TOKENS))
        try:
            template = states.parse(self.save_state())
            n_window = int(self._lib.llama_model_n_swa(self._model))
            self.load_state(states.serialise(states.lengthen(template, n_tokens, n_window)), n_tokens)
            return "repeated"
        except StateLayoutError:
            self.clear()
            self.prefill(_cycle(tokens, n_tokens))
            return "computed"


def _cycle(tokens: Sequence[int], n: int) -> list[int]:
    return [tokens[i % len(tokens)] for i in range(n)]


def _quiet_log() -> Any:
    """llama.cpp's log, kept for error messages and not printed."""
    from ..native import runtime

    runtime.log.install()
    runtime.log.muted = True
    return runtime.log
