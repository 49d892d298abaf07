"""The model file that is evaluated."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final

from ..measuring.child import Child


class ModelFile:
    """A model as it is, or a copy with its weights widened to F32, written when first needed.

    A context manager: leaving it removes the copy.
    """

    def __init__(self, model: Path, f32_weights: bool, stem: Path, on_widen: Callable[[], None]) -> None:
        """`stem` is where the copy goes: its name gets the process and an ending added."""
        self._model: Final = model
        self._copy: Final = stem.with_name(f"{stem.name}.{os.getpid()}.f32.gguf") if f32_weights else None
        self._on_widen: Final = on_widen

    def path(self) -> Path:
        """The file to open. Raises MeasuringError."""
        if self._copy is None:
            return self._model
        if not self._copy.exists():
            self._on_widen()
            with Child() as child:
                child.ask("widen", source=str(self._model), target=str(self._copy))
        return self._copy

    def __enter__(self) -> ModelFile:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._copy is not None:
            self._copy.unlink(missing_ok=True)
