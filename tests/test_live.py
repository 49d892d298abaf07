"""`kvtier run --live` on a pseudo terminal: the panel while text streams, and nothing of it afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvtier import Llama
from kvtier.cli import ui
from kvtier.cli.live import Look, TierLook, concentration, look
from kvtier.engine.generation import Generation, Sampling
from kvtier.settings import KVSettings

from .processes import PATIENCE_S, on_terminal, open_terminal, pieces

PROMPT = ("-p", "Once upon a time", "--temp", "0", "-c", "512")


class Screen:
    """What a terminal shows, of the few things that the panel uses."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows = [""]
        self.row = self.column = 0
        self.is_cursor_shown = True
        self.widest = 0

    def feed(self, text: str) -> None:
        for part in re.findall(r"\x1b\[\??\d*(?:;\d+)*[A-Za-z]|\x1b.|[^\x1b]", text, re.DOTALL):
            if part.startswith("\x1b"):
                self._control(part)
            elif part == "\r":
                self.column = 0
            elif part == "\n":
                self.row += 1
                self.rows += [""] * (self.row >= len(self.rows))
            else:
                line = self.rows[self.row].ljust(self.column)
                self.rows[self.row] = line[: self.column] + part + line[self.column + 1 :]
                self.column += 1
                self.widest = max(self.widest, self.column)

    def _control(self, part: str) -> None:
        if part in ("\x1b[?25l", "\x1b[?25h"):
            self.is_cursor_shown = part.endswith("h")
        elif part == "\x1b[2K":
            self.rows[self.row] = ""
        elif up := re.fullmatch(r"\x1b\[(\d+)A", part):
            self.row -= int(up[1])
            assert self.row >= 0
        else:
            assert part.endswith("m"), f"an unexpected control sequence {part!r}"

    @property
    def text(self) -> str:
        return "\n".join(row.rstrip() for row in self.rows)


def run_on_terminal(
    *args: str, size: tuple[int, int] = (80, 24), on_output: Callable[[int, str], None] | None = None
) -> tuple[int, Screen, str]:
    """Exit code, the screen at the end, and all output.

    `on_output(pid, output so far)` is called whenever something came.
    """
    raw = b""
    with on_terminal("run", *args, size=size) as (process, fd):
        for data in pieces(fd):
            raw += data
            if on_output is not None:
                on_output(process.pid, raw.decode("utf-8", "replace"))
        code = process.wait(PATIENCE_S)
    output, screen = raw.decode("utf-8"), Screen(size[0])
    screen.feed(output)
    return code, screen, output


@pytest.fixture(scope="module")
def plain(smollm2_path: Path) -> str:
    """The text that 40 tokens come to."""
    command = [sys.executable, "-m", "kvtier", "run", str(smollm2_path), *PROMPT, "-n", "40", "--json"]
    return str(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["text"])


def squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize("size", [(80, 24), (31, 9), (200, 60)])
def test_text_stays_and_the_panel_goes(smollm2_path: Path, plain: str, size: tuple[int, int]) -> None:
    code, screen, output = run_on_terminal(str(smollm2_path), *PROMPT, "-n", "40", "--live", size=size)
    assert code == 0
    text, table = re.split(r"^prompt ", screen.text, maxsplit=1, flags=re.MULTILINE)
    assert squeezed(text).endswith(squeezed(plain))
    assert "decode" in table
    assert "kvtier" not in screen.text
    assert screen.is_cursor_shown
    assert "\x1b[?25l" in output
    for word in ("kvtier", "tokens/s", "RAM", "layers"):
        assert word in output, word
    panel = output[: output.rindex("╰")].splitlines()
    assert max(len(re.sub(r"\x1b\[\??\d*(;\d+)*[A-Za-z]", "", line)) for line in panel) <= size[0]
    if size[0] >= 80:
        assert "skipped -, recall 100 %, hits 100 %, attention outside RAM 0 %" in output


def test_tiers_in_the_panel(smollm2_path: Path, tmp_path: Path) -> None:
    text = tmp_path / "prompt.txt"
    text.write_text("The river is cold and the hills are far away. " * 60)
    tiers = ("--kv-host", "8MiB", "--kv-disk", "1GiB", "--kv-dir", str(tmp_path))
    code, screen, output = run_on_terminal(
        str(smollm2_path), "-f", str(text), "-c", "1k", "-n", "12", "--temp", "0", *tiers, "--live"
    )
    assert code == 0
    assert re.search(r"RAM +[0-9.]+ MiB of 8\.00 MiB, \d+ pages", output)
    assert re.search(r"disk +[0-9.]+ MiB of 1\.00 GiB, \d+ pages", output)
    outside = [float(x) for x in re.findall(r"attention outside RAM ([0-9.]+) %", output)]
    assert outside
    assert max(outside) > 0
    assert screen.is_cursor_shown


def test_ctrl_c_leaves_the_terminal_as_it_was(smollm2_path: Path) -> None:
    sent: list[int] = []

    def interrupt_once_the_panel_is_there(pid: int, output: str) -> None:
        if output.count("╰") > 4 and not sent:
            sent.append(signal.SIGINT)
            os.kill(pid, signal.SIGINT)

    code, screen, _ = run_on_terminal(
        str(smollm2_path), *PROMPT, "-n", "400", "--live", on_output=interrupt_once_the_panel_is_there
    )
    assert sent
    assert code == 130
    assert screen.is_cursor_shown
    assert "interrupted" in screen.text
    assert "kvtier" not in screen.text
    assert len(squeezed(screen.text.split("prompt  ")[0])) > 3  # the text so far


def test_a_process_that_ends_at_once_shows_the_cursor_first() -> None:
    code = (
        "import os, signal\n"
        "from kvtier.cli.signals import StopFlag\n"
        "with StopFlag() as stop:\n"
        "    stop.on_abandon = lambda: print('cursor', flush=True)\n"
        "    for _ in range(3): os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('not reached')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (130, "cursor\n")


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_without_a_terminal_it_says_so_and_goes_on(smollm2_path: Path, plain: str, term: str) -> None:
    command = [sys.executable, "-m", "kvtier", "run", str(smollm2_path), *PROMPT, "-n", "40", "--live"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "TERM": term})
    assert ended.stdout.strip("\n") == plain.strip("\n")
    assert "--live needs a terminal" in ended.stderr
    assert "\x1b" not in ended.stdout + ended.stderr


def test_text_goes_to_a_pipe_and_the_panel_to_the_terminal(smollm2_path: Path, plain: str, tmp_path: Path) -> None:
    ours, theirs = open_terminal()
    command = [sys.executable, "-m", "kvtier", "run", str(smollm2_path), *PROMPT, "-n", "40", "--live"]
    with (tmp_path / "out").open("wb") as out:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=theirs, env={**os.environ, "TERM": "xterm"}
        )
    os.close(theirs)
    try:
        shown = b"".join(pieces(ours)).decode()
        assert child.wait(PATIENCE_S) == 0
    finally:
        child.kill()
        child.wait()
        os.close(ours)
    assert (tmp_path / "out").read_text().strip("\n") == plain.strip("\n")
    assert "layers" in shown


@pytest.mark.parametrize("width", [20, 27, 36, 76, 196])
def test_a_narrow_panel_loses_nothing(width: int) -> None:
    heat = tuple(i / 40 for i in range(40))
    tiers = (TierLook("host", 12_345_678, 8 << 20, 1234), TierLook("disk", 1 << 30, None, 56_789))
    seen = Look(123, 4.56, tiers, "mass", heat, 0.0123, 0.0456, 0.789, 0.321, 0.654, 12, "adaptive, balanced")
    rows = [line.plain for line in ui.panel_lines(seen, "abcdefgh", width)]
    assert max(map(len, rows)) <= width
    text = " ".join(rows)
    parts = (
        "4.56 tokens/s",
        "123 tokens",
        "adaptive",
        "of 8.00 MiB",
        "1,234 pages",
        "56,789 pages",
        "90 % of attention 48.8 %",
        "skipped 1.23 % (at most 4.56 %)",
        "recall 65.4 %",
        "hits 78.9 %",
        "attention outside RAM 32.1 %",
        "12 pages gone",
    )
    assert [part for part in parts if part not in text] == []
    first = next(i for i, row in enumerate(rows) if row.startswith("layers "))
    bars = [row[7:].split(" ")[0] for row in rows[first:] if row.startswith(("layers ", "       "))]
    assert len("".join(bars)) == len(heat)


def test_concentration() -> None:
    assert concentration(np.array([1, 1, 1, 1, 1, 1, 1, 1, 1, 1], np.float32)) == pytest.approx(0.9, abs=0.11)
    assert concentration(np.array([96, 1, 1, 1, 1], np.float32)) == 1 / 5
    assert concentration(np.array([50, 45, 5, 0, 0], np.float32)) == 2 / 3  # empty pages do not count
    assert concentration(np.array([3.0], np.float32)) == 1.0


def test_a_look_at_tiers_and_layers(smollm2_path: Path, tmp_path: Path) -> None:
    with Llama(str(smollm2_path), n_ctx=1024, kv_host="8MiB", kv_disk="1GiB", kv_dir=tmp_path, verbose=False) as llm:
        tokens = llm.tokenize(b"The river is cold and the hills are far away. " * 50)
        generation = Generation(llm, tokens, Sampling(n_predict=6, temp=0.0), lambda: False)
        before = look(llm.kv, generation.timing())
        assert (before.heat, before.recall, before.page_hits, before.evicted_mass) == ((), None, None, None)
        generation.prefill(lambda *_: None)
        "".join(generation.decode())
        seen = look(llm.kv, generation.timing(), "lru")
        assert seen.n_tokens == 6
        assert seen.preset == "lru"
        assert len(seen.heat) == 30
        assert all(0 < x <= 1 for x in seen.heat)
        tiers = {tier.name: tier for tier in seen.tiers}
        assert list(tiers) == ["host", "disk"]
        assert tiers["host"].used_bytes <= 8 << 20 == tiers["host"].budget_bytes
        assert tiers["disk"].n_pages > 0
        evicted = [
            float(mass.page_mean[llm.kv.pages(i).tier == 3].sum() / mass.page_mean.sum())
            for i, mass in ((i, llm.kv.layer(i)) for i in range(30))
        ]
        assert seen.evicted_mass == pytest.approx(np.mean(evicted), rel=1e-3)
        assert seen.page_hits is not None
        assert 0 < seen.page_hits < 1
        assert (seen.omitted, seen.recall, seen.n_gone) == (None, 1.0, 0)


def test_a_look_at_what_is_left_out_or_gone(smollm2_path: Path) -> None:
    looks = []
    for settings in (KVSettings(fidelity="bounded:0.1"), KVSettings(fidelity="lossy", host="3MiB")):
        with Llama(str(smollm2_path), n_ctx=1024, kv_settings=settings, n_threads=1, verbose=False) as llm:
            tokens = llm.tokenize(b"The river is cold and the hills are far away. " * 50)
            generation = Generation(llm, tokens, Sampling(n_predict=4, temp=0.0), lambda: False)
            generation.prefill(lambda *_: None)
            "".join(generation.decode())
            looks.append(look(llm.kv, generation.timing()))
    bounded, lossy = looks
    assert bounded.heat_of == "read"
    assert len(bounded.heat) == 30
    assert 0 < min(bounded.heat) < 1
    assert bounded.omitted is not None
    assert bounded.omitted_bound is not None
    assert 0 < bounded.omitted < 0.1
    assert bounded.omitted < bounded.omitted_bound
    assert (bounded.recall, bounded.n_gone) == (1.0 - bounded.omitted, 0)
    assert lossy.heat_of == "mass"
    assert lossy.n_gone > 0
    assert lossy.recall is not None
    assert lossy.evicted_mass is not None
    assert 0 < lossy.evicted_mass < 1
    assert lossy.recall == pytest.approx(1 - lossy.evicted_mass)
