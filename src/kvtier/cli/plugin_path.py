"""`kvtier plugin-path`: where the library is, for programs that load ggml backends themselves."""

from __future__ import annotations

import click

from ..native import binding
from . import ui


@click.command("plugin-path")
def command() -> None:
    """Print the path of the ggml backend.

    \b
    For llama.cpp's own programs:
      GGML_BACKEND_PATH=$(kvtier plugin-path) KVTIER_CONFIG=host=1GiB,disk=20GiB,dir=/var/tmp \\
        llama-server --device KVT0 -ngl 99 -fa on -m model.gguf
    """
    ui.echo(str(binding.library_path()))
