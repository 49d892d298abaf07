"""What README.md tells people to type exists, and CI runs what it says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import click
import pytest

from kvtier.cli import main

assert isinstance(main, click.Group)
GROUP: click.Group = main
ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL_BLOCKS = re.findall(r"```sh\n(.*?)```", README, flags=re.S)
SET_UP = [block.strip() for block in SHELL_BLOCKS if block.strip().startswith("make ")]


def kvtier_calls() -> list[list[str]]:
    """Every `kvtier ...` of the shell blocks and of inline code, as words."""
    inline = re.findall(r"`(kvtier [^`]+)`", README)
    lines = [line.split("#")[0] for block in SHELL_BLOCKS for line in block.splitlines()]
    calls = [match for line in [*lines, *inline] for match in re.findall(r"(?:^|\$\()kvtier ([^)]+)", line)]
    return [call.split() for call in calls]


def command(name: str) -> click.Command:
    found = GROUP.get_command(click.Context(GROUP), name)
    assert found is not None, f"README.md names `kvtier {name}`, which does not exist"
    return found


def test_there_are_exactly_two_commands_to_start_with() -> None:
    assert SET_UP == ["make demo", "make test"]


def test_ci_runs_the_second_command() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert SET_UP[1] in [line.strip() for line in script.splitlines()]


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([a-z][a-z-]*)", README))))
def test_make_targets_exist_and_are_explained(target: str) -> None:
    listed = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert re.search(rf"^  make {target}  *\S", listed, flags=re.M)


@pytest.mark.parametrize("words", [call for call in kvtier_calls() if call[0] != "COMMAND"], ids=" ".join)
def test_commands_and_their_options_exist(words: list[str]) -> None:
    used_command = command(words[0])
    if isinstance(used_command, click.Group):
        used_command = used_command.commands[words[1]]
    known = {option for parameter in used_command.params for option in (*parameter.opts, *parameter.secondary_opts)} | {
        "--help"
    }
    used = [word.split("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)]
    assert not [option for option in used if option not in known]


def test_every_command_is_in_the_readme() -> None:
    existing = set(GROUP.list_commands(click.Context(GROUP)))
    assert existing and {words[0] for words in kvtier_calls()} >= existing


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


def test_python_example_uses_what_exists() -> None:
    block = re.search(r"```python\n(.*?)```", README, flags=re.S)
    assert block is not None
    compile(block.group(1), "README.md", "exec")
    from inspect import signature

    import llama_cpp

    from kvtier import KVCache, Llama

    calls = re.findall(r'Llama\("model.gguf", ([^)]*)\)', block.group(1))
    assert len(calls) >= 3
    ours = set(signature(Llama.__init__).parameters) | set(signature(llama_cpp.Llama.__init__).parameters)
    assert {word.split("=")[0].strip() for call in calls for word in call.split(",")} <= ours
    assert hasattr(KVCache, "figures")
