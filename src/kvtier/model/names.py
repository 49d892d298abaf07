"""From a model's name to a file on this machine: a path, a name of the table `models.txt`, or a repository."""

from __future__ import annotations

import difflib
from pathlib import Path

from ..errors import ModelFetchError, ModelNotFoundError
from . import hub, pypi
from .fetching import ProgressFn, sha256_of
from .table import ModelEntry, known_models


def cached_path(entry: ModelEntry) -> Path | None:
    """Where the model lies in the cache, or None."""
    return hub.cached(entry.sources[0].package, entry.sources[0].file) if entry.kind == "hf" else pypi.cached(entry)


def resolve(model: str, *, progress: ProgressFn | None = None) -> Path:
    """The file of a model given as a path or as a name of models.txt; a name is fetched if it is not in the cache.

    `progress` is called from this thread while fetching. Raises ModelNotFoundError (with the nearest names) and
    ModelFetchError. An interrupt leaves only finished parts and never a file under its final name.
    """
    path = Path(model).expanduser()
    entries = known_models()
    if model and (path.is_file() or (path.exists() and model not in entries)):
        return path
    entry = entries.get(model)
    if entry is None:
        raise _not_found(model, path, entries)
    return cached_path(entry) or fetch(entry, progress=progress)


def _not_found(model: str, path: Path, entries: dict[str, ModelEntry]) -> ModelNotFoundError:
    if path.suffix == ".gguf" or model.startswith((".", "/", "~")):
        siblings = [p.name for p in path.parent.glob("*.gguf")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, siblings, 3, 0.5)
        hint = (
            f"In that folder: {', '.join(near)}" if near else "Check the path; `kvtier models` lists the known names."
        )
        return ModelNotFoundError(f"no such model file: {model}", hint)
    near = difflib.get_close_matches(model.lower(), list(entries), 3, 0.5)
    near = near or [name for name in entries if model and name.startswith(model.lower()[:4])][:3]
    hint = f"Did you mean {' or '.join(near)}? `kvtier models` lists all names." if near else ""
    hint = hint or "`kvtier models` lists the known names; a path to a .gguf file works too."
    if model.count("/") == 1:
        hint = f"To take it from Hugging Face: kvtier run -hf {model}\n{hint}"
    return ModelNotFoundError(f"unknown model '{model}'", hint)


def fetch(entry: ModelEntry, *, progress: ProgressFn | None = None) -> Path:
    """Fetch a known model into the cache and return its path. Waits if another process is fetching the same one.

    Raises ModelFetchError.
    """
    if entry.kind == "hf":
        path = fetch_hf(entry.sources[0].package, entry.sources[0].file, progress=progress)
        if entry.sha256 is not None and sha256_of(path) != entry.sha256:
            raise ModelFetchError(
                f"{entry.name}: {path} does not have the SHA-256 of the table",
                "The repository has changed: update kvtier, or run the file by its path.",
            )
        return path
    return pypi.fetch(entry, progress or (lambda _: None))


def fetch_hf(repo: str, file: str | None = None, *, progress: ProgressFn | None = None) -> Path:
    """A GGUF file of a Hugging Face repository, through huggingface_hub and its cache; returns the (first) file.

    `repo` is OWNER/NAME or OWNER/NAME:QUANT as in llama.cpp; without `file` the quantization chooses (Q4_K_M first).
    All parts of a split model are fetched. The SHA-256 that the repository publishes is checked. Raises UsageError
    (ModelNotFoundError) for a malformed name and ModelFetchError for everything else.
    """
    return hub.fetch(repo, file, progress)
