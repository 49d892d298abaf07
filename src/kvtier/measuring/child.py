"""The parent's end of a measuring process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from .config import Opening
from .errors import WorkerError

Progress = Callable[[str, int, int], None]


def _environment() -> dict[str, str]:
    """This process's, less what would configure kvtier behind the plan's back."""
    kept = ("KVTIER_LIBRARY", "KVTIER_ISA", "KVTIER_CACHE_DIR")
    env = {k: v for k, v in os.environ.items() if k in kept or not k.startswith(("KVTIER_", "GGML_BACKEND_PATH"))}
    # One BLAS thread, or numpy's own take part in bandwidth measurements; no debugger that a failing ggml would start.
    return {**env, "OPENBLAS_NUM_THREADS": "1", "GGML_NO_BACKTRACE": "1"}


class Child:
    """A measuring process with at most one configuration open. A context manager: leaving it ends the process.

    `worker` is the module that runs in it, with more commands than those of `measuring.worker` where it needs them.
    """

    def __init__(
        self,
        opening: Opening | None = None,
        tokens: list[int] | None = None,
        worker: str = "kvtier.measuring.worker",
    ) -> None:
        self.name = opening.config.name if opening else "measuring process"
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_environment(),
            text=True,
        )
        self.info: dict[str, Any] = {}
        if opening is not None:
            try:
                self.info = self.ask("open", opening=opening.to_dict(), tokens=tokens or [1])
            except BaseException:
                self.close()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, op: str, progress: Progress | None = None, **arguments: Any) -> dict[str, Any]:
        """Send one command and wait for its answer. Raises WorkerError for an error answer or a dead process."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise WorkerError(f"{self.name}: the measuring process has no pipes")
        try:
            stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            stdin.flush()
        except OSError:
            raise self._death(op) from None
        for line in stdout:
            answer: dict[str, Any] = json.loads(line)
            if "progress" in answer:
                if progress is not None:
                    progress(*answer["progress"])
                continue
            if "error" in answer:
                raise WorkerError(f"{self.name}: {op}: {answer['error']}")
            return answer
        raise self._death(op)

    def _death(self, op: str) -> WorkerError:
        code = self._process.wait()
        self._errors.seek(0)
        words = self._errors.read()[-2000:].decode(errors="replace").strip()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return WorkerError(
            f"{self.name}: the measuring process ended during {op!r} ({how}){': ' + words if words else ''}"
        )

    def close(self) -> None:
        """End the process: politely first, and within seconds."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._process.terminate()  # it may be in the middle of a long computation that nobody waits for
        self.close()
