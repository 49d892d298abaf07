"""Bare llama.cpp contexts, on the stock CPU cache or on our device, for what the high-level class does not reach."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import llama_cpp
import numpy as np
import numpy.typing as npt

from kvtier.model.cachetypes import GGML_TYPES
from kvtier.native import binding, runtime

# cache types of llama.cpp, by ggml type number; the last three are no page formats
TYPES = {**GGML_TYPES, "q5_0": 6, "q5_1": 7, "iq4_nl": 20}


@dataclass(frozen=True)
class Context:
    """A context with its model; `domain` is None on the stock cache."""

    model: int
    ctx: int
    n_vocab: int
    domain: binding.Domain | None

    @property
    def memory(self) -> int:
        return llama_cpp.llama_get_memory(self.ctx)

    def tokenize(self, text: str, n_max: int) -> list[int]:
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        data = text.encode()
        out = (llama_cpp.llama_token * len(data))()
        n = llama_cpp.llama_tokenize(vocab, data, len(data), out, len(data), True, True)
        return list(out[: min(n, n_max)])

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[Sequence[int]],
        logits: bool = True,
    ) -> npt.NDArray[np.float32]:
        """Logits [len(tokens), n_vocab] of one batch; [0, n_vocab] without `logits`, which are half of the work."""
        batch = llama_cpp.llama_batch_init(len(tokens), 0, max(len(s) for s in sequences))
        try:
            batch.n_tokens = len(tokens)
            for i, (token, pos, seqs) in enumerate(zip(tokens, positions, sequences, strict=True)):
                batch.token[i] = token
                batch.pos[i] = pos
                batch.n_seq_id[i] = len(seqs)
                for j, seq in enumerate(seqs):
                    batch.seq_id[i][j] = seq
                batch.logits[i] = logits
            assert llama_cpp.llama_decode(self.ctx, batch) == 0, self.domain and self.domain.last_error()
        finally:
            llama_cpp.llama_batch_free(batch)
        rows = [
            np.array(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.ctx, i), (self.n_vocab,)))
            for i in range(len(tokens) if logits else 0)
        ]
        return np.stack(rows) if rows else np.empty((0, self.n_vocab), np.float32)

    def feed(self, tokens: Sequence[int], seq: int = 0, first: int = 0) -> npt.NDArray[np.float32]:
        """Tokens of one sequence at consecutive positions: logits of all of them."""
        return self.decode(tokens, range(first, first + len(tokens)), [[seq]] * len(tokens))

    def fill(self, tokens: Sequence[int], seq: int = 0, first: int = 0) -> None:
        """The same without logits."""
        self.decode(tokens, range(first, first + len(tokens)), [[seq]] * len(tokens), logits=False)


@contextmanager
def open_context(
    path: Path,
    *,
    ours: bool,
    settings: str = "",
    n_ctx: int = 1024,
    n_seq_max: int = 1,
    kv_unified: bool = False,
    type_k: str = "f16",
    flash_attn: bool = True,
    n_threads: int = 2,
    n_gpu_layers: int = 99,
) -> Iterator[Context]:
    """A context on the stock cache, or on our device with `settings` (the text of kvtier.h) and `n_gpu_layers`."""
    loaded = runtime.load()
    runtime.log.muted = True
    with ExitStack() as stack:
        domain = None
        devices = (ctypes.c_void_p * 1)(None)
        if ours:
            domain = binding.Domain(settings)
            stack.callback(domain.close)
            devices = runtime.device_array(loaded.device)
            stack.enter_context(runtime.bound(domain))
        model_params = llama_cpp.llama_model_default_params()
        model_params.devices = ctypes.cast(devices, ctypes.c_void_p)
        model_params.n_gpu_layers = n_gpu_layers if ours else 0
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        assert model
        stack.callback(llama_cpp.llama_model_free, model)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, 512, 256
        params.n_seq_max, params.kv_unified = n_seq_max, kv_unified
        params.n_threads = params.n_threads_batch = n_threads
        params.type_k = params.type_v = TYPES[type_k]
        params.flash_attn_type = 1 if flash_attn else 0
        params.offload_kqv = True
        params.swa_full = False  # sliding-window layers keep their window, in a cache of its own size
        ctx = llama_cpp.llama_init_from_model(model, params)
        assert ctx, domain and domain.last_error()
        stack.callback(llama_cpp.llama_free, ctx)
        n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        yield Context(model, ctx, n_vocab, domain)
