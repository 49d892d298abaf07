"""One generation, timed: prefill in micro-batches that can be watched and stopped, then tokens one by one."""

from __future__ import annotations

import codecs
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import llama_cpp
import llama_cpp.llama_cpp as api

from ..errors import CancelledError, ContextLengthError

Finish = Literal["stop", "length", "context", "interrupted"]
RANDOM_SEED: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.

    `temp` 0 takes the most probable one; `n_predict` -1 goes on until the model ends or the context is full.
    """

    n_predict: int = -1
    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = RANDOM_SEED


@dataclass(frozen=True, slots=True)
class Timing:
    """What one generation took. Rates are in tokens per second, None where too little was done to tell.

    Attributes:
        n_prompt: tokens of the prompt; n_reused of them were in the cache already.
        n_generated: tokens of the answer, without the one that ended it.
        ttft_s: from the start of the prefill to the first token.
        finish: "stop" (the model ended), "length" (n_predict), "context" (full), "interrupted".
    """

    n_prompt: int
    n_reused: int
    n_generated: int
    prefill_s: float
    ttft_s: float | None
    prefill_per_s: float | None
    decode_per_s: float | None
    finish: Finish


@dataclass(slots=True)
class _Clock:
    start: float = field(default_factory=time.perf_counter)
    prefilled: float | None = None
    first: float | None = None
    last: float | None = None


class Generation:
    """Runs one prompt on a model.

    `stop` is asked between micro-batches and tokens, in prefill between operations too.
    """

    def __init__(
        self, llm: llama_cpp.Llama, prompt: Sequence[int], sampling: Sampling, stop: Callable[[], bool]
    ) -> None:
        """Raises ContextLengthError if the prompt does not leave room for one token of answer."""
        self._llm: Final = llm
        self._prompt: Final = list(prompt)
        self._sampling: Final = sampling
        self._stop: Final = stop
        self._clock = _Clock()
        self._n_reused = 0
        self._n_generated = 0
        self._finish: Finish = "length"
        n_ctx = llm.n_ctx()
        if len(self._prompt) >= n_ctx:
            raise ContextLengthError(len(self._prompt), n_ctx)

    def prefill(self, on_progress: Callable[[int, int], None]) -> bool:
        """Evaluate what of the prompt is not in the cache; `on_progress(done, total)` after each micro-batch.

        Returns False if it was stopped. Raises NativeError or LlamaError.
        """
        self._clock = _Clock()
        self._n_reused = _reuse_prefix(self._llm, self._prompt)
        todo = self._prompt[self._n_reused :]
        n_step = max(1, int(self._llm.context_params.n_ubatch))
        on_progress(0, len(todo))
        try:
            with _Stoppable(self._llm, self._stop):
                for i in range(0, len(todo), n_step):
                    if self._stop():
                        raise CancelledError("stopped during prefill")
                    self._llm.eval(todo[i : i + n_step])
                    on_progress(min(i + n_step, len(todo)), len(todo))
        except CancelledError:
            self._finish = "interrupted"
            return False
        self._clock.prefilled = time.perf_counter()
        return True

    def decode(self) -> Iterator[str]:
        """The text of the answer, piece by piece, never cut inside a character. Raises NativeError or LlamaError."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in self._tokens():
            text = decoder.decode(piece(self._llm, token))
            if text:
                yield text
        rest = decoder.decode(b"", final=True)
        if rest:
            yield rest

    def _tokens(self) -> Iterator[int]:
        s = self._sampling
        if s.n_predict == 0:
            return
        self._llm.set_seed(s.seed)
        n_ctx = self._llm.n_ctx()
        # The prompt is in the cache as a whole, so this samples at once and evaluates one token per step.
        for token in self._llm.generate(self._prompt, temp=s.temp, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p):
            self._clock.last = time.perf_counter()
            if self._clock.first is None:
                self._clock.first = self._clock.last
            if api.llama_vocab_is_eog(self._llm._model.vocab, token):
                self._finish = "stop"
                return
            self._n_generated += 1
            yield token
            if self._n_generated == s.n_predict:
                self._finish = "length"
                return
            if self._llm.n_tokens >= n_ctx:
                self._finish = "context"
                return
            if self._stop():
                self._finish = "interrupted"
                return

    def timing(self) -> Timing:
        """What was measured so far."""
        c = self._clock
        prefill_s = (c.prefilled if c.prefilled is not None else time.perf_counter()) - c.start
        n_prefilled = len(self._prompt) - self._n_reused
        n_steps = (
            self._n_generated - 1 + (self._finish == "stop")
        )  # steps after the first token, the ending one included
        decode_s = (c.last or 0.0) - (c.first or 0.0)
        return Timing(
            n_prompt=len(self._prompt),
            n_reused=self._n_reused,
            n_generated=self._n_generated,
            prefill_s=prefill_s,
            ttft_s=None if c.first is None else c.first - c.start,
            prefill_per_s=n_prefilled / prefill_s if c.prefilled is not None and prefill_s > 0 else None,
            decode_per_s=n_steps / decode_s if n_steps > 0 and decode_s > 0 else None,
            finish=self._finish,
        )


def piece(llm: llama_cpp.Llama, token: int) -> bytes:
    """The bytes of one token's text; empty for control tokens."""
    size = 64
    while True:
        buf = ctypes.create_string_buffer(size)
        n = int(api.llama_token_to_piece(llm._model.vocab, token, buf, size, 0, False))
        if n >= 0:
            return buf.raw[:n]
        size = -n


def _reuse_prefix(llm: llama_cpp.Llama, prompt: Sequence[int]) -> int:
    """Keep the part of the cache that `prompt` starts with, drop the rest; returns how many tokens are kept.

    At least one token is left to evaluate, so that there are logits to sample from.
    """
    n = 0
    for cached, wanted in zip(llm.input_ids[: llm.n_tokens].tolist(), prompt[:-1], strict=False):
        if cached != wanted:
            break
        n += 1
    if n > 0 and llm._ctx.kv_cache_seq_rm(-1, n, -1):
        llm.n_tokens = n
        return n
    llm.reset()  # type: ignore[no-untyped-call]
    return 0


class _Stoppable:
    """Lets `stop` end a running llama_decode.

    Only for prefill: the question is asked before every graph operation, too often for a decode step.
    """

    def __init__(self, llm: llama_cpp.Llama, stop: Callable[[], bool]) -> None:
        self._context = llm._ctx
        self._callback = api.ggml_abort_callback(lambda _data: stop())

    def __enter__(self) -> None:
        api.llama_set_abort_callback(self._context.ctx, self._callback, None)

    def __exit__(self, *_: object) -> None:
        api.llama_set_abort_callback(self._context.ctx, api.ggml_abort_callback(), None)
