"""`kvtier doctor`: checks the installation and the machine, and ends with what to do."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path

import click

from ..doctor.diagnosis import Finding, diagnose, worst
from ..settings import KVSettings
from . import ui
from .options import option

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
EXIT_UNSOUND = 11  # as LibraryError: the installation cannot run


@click.command("doctor")
@option(
    "--kv-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Directory of the disk tier to look at.  [default: the user's cache folder]",
)
@option("--json", "as_json", is_flag=True, help="Print one JSON object with all findings.")
def command(kv_dir: Path | None, as_json: bool) -> None:
    """Check llama.cpp, the plug-in, instruction sets, memory and disk.

    The exit code is 0 when all is well or only could be better, 11 when something does not work.
    """
    findings = diagnose(KVSettings(disk=1, dir=kv_dir).disk_dir() or Path())
    status = worst(findings)
    if as_json:
        ui.echo(json.dumps({"status": status, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _show(findings)
    if status == "fail":
        sys.exit(EXIT_UNSOUND)


def _width() -> int:
    return max(60, shutil.get_terminal_size((80, 24)).columns)


def _show(findings: list[Finding]) -> None:
    for finding in findings:
        # Long texts go on under their own column; a path is never broken.
        lines = textwrap.wrap(finding.text, _width() - 28, break_long_words=False, break_on_hyphens=False) or [""]
        ui.echo_styled((f"{finding.status:4}", _COLOURS[finding.status]), f"  {finding.name:20}  {lines[0]}")
        for line in lines[1:]:
            ui.echo(" " * 28 + line)
    advice = [finding for finding in findings if finding.hint]
    ui.echo("\nAll is well." if not advice else "\nWhat to do:")
    for finding in advice:
        first, *rest = finding.hint.split("\n")
        ui.echo(f"- {finding.name}: {first}")
        for line in rest:
            ui.echo(f"  {line}")
