"""Records a trace: a text fed to a model one token at a time, and the attention mass of every page at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ..native.kv import LayerMass
from ..native.pagekeys import PageKeys
from ..policies.base import GONE
from ..settings import MASS_DECAY, KVSettings
from ..trace import TraceHeader, TraceWriter
from .llama import Llama

PAGE_FEATURES: Final = ("key_norm", "value_norm", "key_novelty")
_UBATCH: Final = 512

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Recording:
    """What to record: tokens first..first+n_prefix of `text` in batches, then `n_tokens` one at a time."""

    model: Path
    text: str
    source: str
    n_prefix: int
    n_tokens: int
    first: int = 0
    n_threads: int = 2
    page_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was recorded. `is_stopped`: on request, before the end."""

    n_steps: int
    n_layers: int
    n_pages: int
    n_bytes: int
    is_stopped: bool


class Recorder:
    """One open model with a cache of its own, for any number of recordings of at most `n_ctx` tokens. Close it."""

    def __init__(self, model: Path, n_ctx: int, n_threads: int = 2, page_tokens: int | None = None) -> None:
        self._llm: Final = Llama(
            str(model),
            n_ctx=n_ctx,
            n_batch=_UBATCH,
            n_ubatch=_UBATCH,
            n_threads=n_threads,
            n_threads_batch=n_threads,
            kv_settings=KVSettings(page_tokens=page_tokens, mass_decay=0.0),
            swa_full=False,
            verbose=False,
        )
        self._model: Final = model

    def close(self) -> None:
        self._llm.close()

    def tokenize(self, text: str) -> list[int]:
        return list(self._llm.tokenize(text.encode(), add_bos=True, special=False))

    def record(
        self,
        path: Path,
        tokens: Sequence[int],
        n_prefix: int,
        source: str,
        progress: Callable[[str, int, int], None] = lambda _phase, _done, _total: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Recorded:
        """Feed `tokens`, the first `n_prefix` of them in batches, and write the rest's masses to `path`.

        `stop` ends it between steps; what is there by then is a whole trace, and without a step there is none. Raises
        NativeError, LlamaError, OutputError; UsageError if the model has no layer that sees the whole context.
        """
        llm = self._llm
        llm.reset()  # type: ignore[no-untyped-call]
        llm._ctx.kv_cache_clear()  # type: ignore[no-untyped-call]
        prefill = self._prefill(tokens[:n_prefix], progress, stop)
        if prefill is None:
            return Recorded(0, 0, 0, 0, True)
        indices = self._layers()
        n_done, n_total = 0, len(tokens) - n_prefix
        with TraceWriter(path, self._header(indices, n_prefix, n_total, source), tokens[:n_prefix]) as writer:
            for name, values in prefill.features().items():
                writer.feature(name, values)
            for token in tokens[n_prefix:]:
                if stop():
                    break
                llm.eval([token])
                n_pages = -(-llm.n_tokens // self._page_tokens())
                writer.add(token, _shares([llm.kv.layer(i).page_mean[:n_pages] for i in indices]))
                n_done += 1
                progress("recording", n_done, n_total)
            self._write_features(writer, indices)
        if n_done == 0:
            return Recorded(0, 0, 0, 0, True)
        n_pages = -(-llm.n_tokens // self._page_tokens())
        return Recorded(n_done, len(indices), n_pages, path.stat().st_size, n_done < n_total)

    def _prefill(
        self, tokens: Sequence[int], progress: Callable[[str, int, int], None], stop: Callable[[], bool]
    ) -> _Prefill | None:
        prefill: _Prefill | None = None
        for i in range(0, len(tokens), _UBATCH):
            if stop():
                return None
            self._llm.eval(tokens[i : i + _UBATCH])
            layers = [self._llm.kv.layer(index) for index in self._layers()]
            if prefill is None:
                prefill = _Prefill(layers)
            prefill.add(layers)
            progress("reading the prefix", min(i + _UBATCH, len(tokens)), len(tokens))
        return prefill

    def _layers(self) -> list[int]:
        """Indices of the layers that see the whole context, by layer."""
        found = [(self._llm.kv.layer(i).figures, i) for i in range(self._llm.kv.n_layers)]
        if not found:
            raise UsageError(f"{self._model} has no attention layer with a KV cache, so there is nothing to trace")
        cells = max(figures.cells_per_stream for figures, _ in found)
        whole = [(figures.layer, i) for figures, i in found if figures.cells_per_stream == cells]
        return [i for _, i in sorted(whole)]

    def _page_tokens(self) -> int:
        return self._llm.kv.layer(0).figures.page_tokens

    def _header(self, indices: Sequence[int], n_prefix: int, n_tokens: int, source: str) -> TraceHeader:
        kv = self._llm.kv
        layers = [kv.layer(i).figures for i in indices]
        host = kv.figures.tiers["host"]
        return TraceHeader(
            model=self._model.name,
            n_layers=1 + max(kv.layer(i).figures.layer for i in range(kv.n_layers)),
            layers=tuple(figures.layer for figures in layers),
            page_tokens=layers[0].page_tokens,
            page_bytes=host.used_bytes // max(1, host.n_pages),
            n_prefix=n_prefix,
            n_tokens=n_tokens,
            text=source,
        )

    def _write_features(self, writer: TraceWriter, indices: Sequence[int]) -> None:
        kv = self._llm.kv
        keys = PageKeys(kv, reads_per_look=1 << 30)
        rows = [keys.look(kv.layer(i).figures, kv.pages(i).tier) for i in indices]
        n_pages = int(np.count_nonzero(kv.pages(indices[0]).tier != GONE))
        for name, values in zip(PAGE_FEATURES, zip(*rows, strict=True), strict=True):
            writer.feature(name, np.stack([of_layer[:n_pages] for of_layer in values]))


def _shares(masses: Sequence[Floats]) -> Floats:
    """Masses of layers as shares: the engine sums over query heads."""
    now = np.stack(masses)
    shares: Floats = now / np.maximum(now.sum(axis=1, keepdims=True), np.float32(1e-12))
    return shares


class _Prefill:
    """The decayed mean and the maximum that an engine has at the end of a prefill: of the last query of each batch."""

    def __init__(self, layers: Sequence[LayerMass]) -> None:
        self._mean: Floats = np.zeros((len(layers), len(layers[0].page_mean)), np.float32)
        self._max = self._mean

    def add(self, layers: Sequence[LayerMass]) -> None:
        now = _shares([layer.page_mean for layer in layers])
        self._mean = MASS_DECAY * self._mean + (1 - MASS_DECAY) * now
        self._max = np.maximum(self._max, now)

    def features(self) -> dict[str, Floats]:
        n_pages = int(np.flatnonzero(self._max.any(axis=0)).max(initial=0)) + 1
        return {"prefill_mean": self._mean[:, :n_pages], "prefill_max": self._max[:, :n_pages]}


def record(
    job: Recording,
    path: Path,
    progress: Callable[[str, int, int], None] = lambda _phase, _done, _total: None,
    stop: Callable[[], bool] = lambda: False,
) -> Recorded:
    """Record one trace with a model of its own. Raises UsageError if the text is too short; nothing is written then."""
    n_needed = job.n_prefix + job.n_tokens
    recorder = Recorder(job.model, n_needed + 64, job.n_threads, job.page_tokens)
    try:
        tokens = recorder.tokenize(job.text)[job.first :]
        if len(tokens) < n_needed:
            raise UsageError(
                f"the text has {len(tokens):,} tokens from number {job.first:,} on; {n_needed:,} are needed",
                "Give a longer text, or ask for less with --prefix and --tokens.",
            )
        return recorder.record(path, tokens[:n_needed], job.n_prefix, job.source, progress, stop)
    finally:
        recorder.close()
