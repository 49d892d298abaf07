"""Signals at every stage of a run: the exit code a shell expects, what was done is shown, and no file is left."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from .processes import PATIENCE_S, start, wait_until
from .texts import source_text


def _blocks(folder: Path) -> int:
    """Blocks on disk of the pages' file; 0 if there is none."""
    return sum(path.stat().st_blocks for path in folder.glob("*.pages"))


@pytest.fixture
def prefill(smollm2_path: Path, tmp_path: Path) -> tuple[str | Path, ...]:
    """Arguments of a run whose prefill takes long and writes to disk."""
    (tmp_path / "long.txt").write_text(source_text()[:24000], encoding="utf-8")
    folder = tmp_path / "kv"
    folder.mkdir()
    return (
        smollm2_path,
        "-f",
        tmp_path / "long.txt",
        "-n",
        "4",
        "-ub",
        "128",
        "--kv-host",
        "6MiB",
        "--kv-disk",
        "2GiB",
        "--kv-dir",
        folder,
    )


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_during_prefill_and_disk_writes(prefill: tuple[str | Path, ...], signum: signal.Signals) -> None:
    folder = Path(prefill[-1])
    process = start("run", *prefill)
    wait_until(lambda: _blocks(folder) > 0, process)
    process.send_signal(signum)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signum, err
    assert out == "" and "interrupted" in err and "Traceback" not in err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_during_decode_the_text_so_far_is_kept(smollm2_path: Path, signum: signal.Signals) -> None:
    process = start("run", smollm2_path, "-p", "1, 2, 3, 4, 5,", "-n", "-1", "-c", "8k", "--temp", "0")
    assert process.stdout is not None
    first = process.stdout.read(6)
    process.send_signal(signum)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signum, err
    assert first and (first + out).strip() and "interrupted" in err and "Traceback" not in err


def test_json_of_an_interrupted_run(prefill: tuple[str | Path, ...]) -> None:
    folder = Path(prefill[-1])
    process = start("run", *prefill, "--json")
    wait_until(lambda: _blocks(folder) > 0, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    assert json.loads(out)["finish"] == "interrupted"


def test_what_a_killed_process_left_is_swept_by_the_next(prefill: tuple[str | Path, ...], smollm2_path: Path) -> None:
    folder = Path(prefill[-1])
    process = start("run", *prefill)
    wait_until(lambda: _blocks(folder) > 0, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=PATIENCE_S)
    assert len(list(folder.iterdir())) == 1
    after = start("run", smollm2_path, "-p", "x", "-n", "1", "-c", "256", *prefill[-6:])
    out, err = after.communicate(timeout=PATIENCE_S)
    assert after.returncode == 0 and out.strip(), err
    assert list(folder.iterdir()) == []
