"""The measuring process: reads one JSON command a line, answers one JSON line each.

    python -m kvtier.measuring.worker

Commands: open, tokenize, count_tokens, fill, size, threads, decode, prefill, rewind, widen, bandwidth,
disk, build, close; other rooms add their own (`serve`). An error is answered as ``{"error": "..."}``; whatever
llama.cpp prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from .bandwidth import disk_bandwidth, read_bandwidth
from .config import Opening
from .engine import Engine
from .errors import MeasuringError
from .weights import widen

Answer = dict[str, Any]


class Worker:
    """The state of one measuring process: at most one open engine."""

    def __init__(self, report: Callable[[Answer], None]) -> None:
        self._report = report
        self._engine: Engine | None = None
        self._tokens: list[int] = []

    def progress(self, phase: str, done: int, total: int) -> None:
        """Tell the parent how far a command is."""
        self._report({"progress": [phase, done, total]})

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise MeasuringError("no model is open")
        return self._engine

    def open(self, opening: Answer, tokens: list[int]) -> Answer:
        self._engine = Engine(Opening.from_dict(opening))
        self._tokens = tokens
        return {
            "model_bytes": self.engine.model_bytes(),
            "n_ctx_train": self.engine.n_ctx_train(),
            "n_vocab": self.engine.n_vocab,
        }

    def tokenize(self, text: str) -> Answer:
        return {"tokens": self.engine.tokenize(text.encode())}

    def count_tokens(self, text: str) -> Answer:
        return {"n_tokens": len(self.engine.tokenize(text.encode()))}

    def fill(self, n_tokens: int) -> Answer:
        how = self.engine.fill(self._tokens, n_tokens)
        return {"how": how, "kv_bytes": self.engine.state_bytes()}

    def compute(self, n_tokens: int, n_threads: int) -> Answer:
        """Fill the context with the text itself."""
        engine = self.engine
        engine.set_threads(n_threads)
        engine.clear()
        engine.prefill(self._take(n_tokens))
        return {"how": "computed", "kv_bytes": engine.state_bytes()}

    def save(self, path: str) -> Answer:
        self.engine.save_state().tofile(path)
        return {}

    def load(self, path: str, n_tokens: int) -> Answer:
        """Fill the context with what another process has saved."""
        engine = self.engine
        engine.clear()
        engine.load_state(np.memmap(path, np.uint8, "r"), n_tokens)
        return {"how": "computed", "kv_bytes": engine.state_bytes()}

    def size(self) -> Answer:
        return {"kv_bytes": self.engine.state_bytes(), "n_past": self.engine.n_past}

    def threads(self, n_threads: int) -> Answer:
        self.engine.set_threads(n_threads)
        return {}

    def decode(self, n_tokens: int) -> Answer:
        """Time `n_tokens` steps, then forget them, so that every round has the same context."""
        engine, before = self.engine, self.engine.n_past
        tokens, read_before, kv_before = self._take(n_tokens), engine.disk_read_bytes(), engine.kv_read_bytes()
        cpu_before = time.process_time()
        seconds = engine.decode(tokens)
        cpu_seconds = time.process_time() - cpu_before
        read = engine.disk_read_bytes() - read_before
        kv_read = engine.kv_read_bytes() - kv_before
        engine.rewind(before)
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, "disk_read_bytes": read, "kv_read_bytes": kv_read}

    def prefill(self, n_tokens: int) -> Answer:
        tokens, cpu_before = self._take(n_tokens), time.process_time()
        seconds = self.engine.prefill(tokens)
        return {"seconds": seconds, "cpu_seconds": time.process_time() - cpu_before, "n_past": self.engine.n_past}

    def rewind(self, n_tokens: int) -> Answer:
        if n_tokens == 0:
            self.engine.clear()
        return {"done": self.engine.rewind(n_tokens)}

    def bandwidth(self, n_threads: int) -> Answer:
        return {"bytes_per_s": read_bandwidth(n_threads)}

    def disk(self, directory: str) -> Answer:
        return {"bytes_per_s": disk_bandwidth(Path(directory))}

    def build(self) -> Answer:
        """How the installed llama.cpp was built, and how fast its own attention is; no model need be open."""
        import llama_cpp

        from ..machine import ggmlcpu
        from ..native.runtime import libggml, load_backends

        llama_cpp.llama_backend_init()
        load_backends()
        return {
            "version": llama_cpp.__version__,
            "ggml": ggmlcpu.version(libggml),
            "features": ggmlcpu.features(libggml),
            "attention_ns": ggmlcpu.attention_ns(libggml),
        }

    def widen(self, source: str, target: str) -> Answer:
        widen(Path(source), Path(target))
        return {}

    def close(self) -> Answer:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        return {}

    def _take(self, n_tokens: int) -> list[int]:
        at = self.engine.n_past
        return [self._tokens[(at + i) % len(self._tokens)] for i in range(n_tokens)]


COMMANDS: Final = frozenset(
    [
        "open",
        "tokenize",
        "count_tokens",
        "fill",
        "compute",
        "save",
        "load",
        "size",
        "threads",
        "decode",
        "prefill",
        "rewind",
        "bandwidth",
        "disk",
        "build",
        "widen",
        "close",
    ]
)


def serve(make: Callable[[Callable[[Answer], None]], Worker] = Worker, commands: frozenset[str] = COMMANDS) -> None:
    """Serve `commands` until stdin ends, each by the method of that name of the worker that `make` makes."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # llama.cpp and its libraries print to stdout now and then: keep that channel for answers

    def report(answer: Answer) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    worker = make(report)
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("op")
        try:
            if name not in commands:
                raise MeasuringError(f"unknown command {name!r}")
            report(getattr(worker, name)(**command))
        except Exception as error:  # the parent decides what an error means; this process must answer
            report(
                {"error": f"{type(error).__name__}: {error}" if not isinstance(error, MeasuringError) else str(error)}
            )
    worker.close()


if __name__ == "__main__":
    serve()
