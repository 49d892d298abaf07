"""`kvtier models`: the models known by name, and which of them are on this machine."""

from __future__ import annotations

import json

import click

from ..model.names import cached_path
from ..model.table import ModelEntry, known_models
from ..sizes import format_bytes
from . import ui


@click.command("models")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per model.")
def command(as_json: bool) -> None:
    """List the models that can be run by name.

    Any GGUF file works by its path, and `run` and `plan` take any of a Hugging Face repository with -hf OWNER/NAME.
    """
    entries = known_models().values()
    if as_json:
        for entry in entries:
            ui.echo(json.dumps(_as_json(entry)))
        return
    rows = [
        (entry.name, _size(entry), f"{entry.n_ctx_train // 1024}k", "yes" if cached_path(entry) else "no", entry.note)
        for entry in entries
    ]
    ui.table(rows, header=("Name", "Size", "Trained", "Here", "What it is"), stderr=False)


def _size(entry: ModelEntry) -> str:
    return "?" if entry.n_bytes is None else format_bytes(entry.n_bytes)


def _as_json(entry: ModelEntry) -> dict[str, object]:
    path = cached_path(entry)
    return {
        "name": entry.name,
        "kind": entry.kind,
        "packages": [source.package for source in entry.sources],
        "file": entry.file_name,
        "sha256": entry.sha256,
        "n_bytes": entry.n_bytes,
        "n_ctx_train": entry.n_ctx_train,
        "note": entry.note,
        "cached": None if path is None else str(path),
    }
