"""Calls of `llama_cpp.Llama` whose arguments llama.cpp takes on trust, and would end the process over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import llama_cpp
import llama_cpp.llama_cpp as api
import numpy as np
from llama_cpp._internals import LlamaModel
from llama_cpp.llama_grammar import LlamaGrammar

from ..errors import LlamaError, UsageError
from ..native import runtime


class GuardedLlama(llama_cpp.Llama):
    """llama_cpp.Llama that looks at grammars, positions and saved states before llama.cpp does."""

    def sample(self, *args: Any, idx: int | None = None, **kwargs: Any) -> int:
        """The next token, after the one at `idx` of those evaluated. Raises UsageError where there are no logits."""
        offset = -1 if idx is None else idx - self.n_tokens
        if self.n_tokens == 0 or not -(1 << 31) <= offset < 0 or not api.llama_get_logits_ith(self.ctx, offset):
            raise UsageError(
                f"there are no logits to sample from: {self.n_tokens:,} tokens have been evaluated, and idx is {idx}",
                "Evaluate tokens first (eval). Those before the last have logits with logits_all=True.",
            )
        return int(super().sample(*args, idx=idx, **kwargs))  # type: ignore[misc]

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Go on from a state that save_state gave.

        Raises UsageError for what is no state of such a model. Raises LlamaError if llama.cpp cannot read it: then the
        context is empty.
        """
        self._check_state(state)
        try:
            super().load_state(state)
        except (RuntimeError, ValueError) as err:
            self.reset()  # type: ignore[no-untyped-call]
            self._ctx.kv_cache_clear()  # type: ignore[no-untyped-call]
            raise LlamaError(
                f"the state cannot be restored: {err}; the context is empty now",
                "It is damaged, or from another model, cache type or version of llama.cpp: compute it again.",
                runtime.log.problems(),
            ) from err
        if self.input_ids.shape != (self._n_ctx,):  # of a model with another context
            self.input_ids = np.resize(self.input_ids, self._n_ctx)

    def _check_state(self, state: Any) -> None:
        if not isinstance(state, llama_cpp.LlamaState):
            _no_state(f"{type(state).__name__}, not a llama_cpp.LlamaState")
        if not 0 <= state.n_tokens <= min(self._n_ctx, len(state.input_ids)):
            _no_state(f"of {state.n_tokens:,} tokens, and the context holds {self._n_ctx:,}")
        if state.llama_state_size != len(state.llama_state):
            _no_state(f"cut short: {len(state.llama_state):,} of {state.llama_state_size:,} bytes are there")
        if state.scores.shape != (min(state.n_tokens, len(self.scores)), self._n_vocab):
            _no_state(f"of a model with another vocabulary, batch or logits_all: its scores are {state.scores.shape}")

    def _init_sampler(self, *args: Any, grammar: Any = None, **kwargs: Any) -> Any:
        if grammar is not None:
            check_grammar(self._model.vocab, grammar)
        return super()._init_sampler(*args, grammar=grammar, **kwargs)  # type: ignore[misc]


class GuardedModel(LlamaModel):
    """What a tokenizer asks. An unknown token is a C++ exception in llama.cpp, which nobody catches."""

    def detokenize(self, tokens: Sequence[int], special: bool = False) -> bytes:
        for token in tokens:
            self._check(token)
        return bytes(super().detokenize(list(tokens), special))

    def token_to_piece(self, token: int, special: bool = False) -> bytes:
        self._check(token)
        return bytes(super().token_to_piece(token, special))

    def token_get_text(self, token: int) -> str:
        self._check(token)
        return str(super().token_get_text(token))

    def _check(self, token: int) -> None:
        if not 0 <= token < self.n_vocab():
            raise UsageError(
                f"token {token} is none of the model's vocabulary",
                f"Tokens are numbers from 0 to {self.n_vocab() - 1:,}.",
            )


def check_grammar(vocab: Any, grammar: Any) -> None:
    """Raise UsageError for a grammar that llama.cpp cannot parse: llama_cpp passes its null pointer on."""
    if not isinstance(grammar, LlamaGrammar):
        raise UsageError(
            f"grammar is {grammar!r}, which is no grammar", "Make one with llama_cpp.LlamaGrammar.from_string(...)."
        )
    runtime.log.clear()
    with runtime.log.quiet():
        sampler = api.llama_sampler_init_grammar(vocab, grammar._grammar.encode(), grammar._root.encode())
    if not sampler:
        reason = "; ".join(runtime.log.problems()) or "llama.cpp gave no reason"
        raise UsageError(
            f"the grammar cannot be used: {reason}", f"Give text in GBNF that defines a rule '{grammar._root}'."
        )
    api.llama_sampler_free(sampler)


def _no_state(what: str) -> NoReturn:
    raise UsageError(f"the state is {what}", "Give what save_state of the same model, with the same arguments, gave.")
