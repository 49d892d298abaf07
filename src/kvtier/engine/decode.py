"""Each call of llama.cpp that computes: watched before and after, and its failure a typed error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llama_cpp.llama_cpp as api

from ..errors import CancelledError, LlamaError
from ..native import binding, runtime
from .pace import Pace

_NO_SLOT, _ABORTED = 1, 2  # what llama_decode answers when the context is full, and when it was stopped


class Decode:
    """LlamaContext.decode with typed errors."""

    def __init__(self, context: Any, domain: binding.Domain, pace: Pace) -> None:
        self._context = context
        self._domain = domain
        self._pace = pace
        self.on_tokens: Callable[[Sequence[int]], None] | None = None  # told which tokens each successful call decoded
        self.before: Callable[[int], None] | None = None  # told how many tokens the next call decodes

    def __call__(self, batch: Any) -> None:
        if self.before is not None:
            self.before(int(batch.batch.n_tokens))
        n_tokens = int(batch.batch.n_tokens)
        self._pace.before(n_tokens)
        code = api.llama_decode(self._context.ctx, batch.batch)
        if code == 0:
            self._pace.after(n_tokens)
            if self.on_tokens is not None:
                self.on_tokens(batch.batch.token[: batch.batch.n_tokens])
            return
        if code == _ABORTED:
            raise CancelledError("the computation was stopped")
        n_ctx = int(self._context.n_ctx())
        if code == _NO_SLOT:
            raise LlamaError(
                f"no free place in the cache for {batch.batch.n_tokens} tokens: the context holds {n_ctx:,}",
                "Take a larger context (n_ctx), or remove sequences that are no longer needed.",
                runtime.log.problems(),
            )
        raise runtime.llama_error(
            f"llama.cpp could not compute a batch of {batch.batch.n_tokens} tokens (llama_decode returned {code})",
            self._domain,
        )
