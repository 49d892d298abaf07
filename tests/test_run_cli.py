"""`kvtier run` from outside: text, figures, and one clear message with its exit code for everything that is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .texts import source_text

DISK = ("--kv-host", "6MiB", "--kv-disk", "1GiB")


def kvtier(*args: str | Path, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run the program without a terminal; `env` is added to the environment."""
    command = [sys.executable, "-m", "kvtier", *map(str, args)]
    return subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, **env},
        timeout=300,
        check=False,
    )


def refused(done: subprocess.CompletedProcess[str], exit_code: int, *parts: str) -> None:
    """The run ended with this code and one message that has all parts, and no text."""
    assert done.returncode == exit_code, done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    for part in parts:
        assert part in done.stderr
    assert done.stderr.lower().count("error:") == 1


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text(source_text()[:1500], encoding="utf-8")
    return path


def test_text_on_stdout_table_on_stderr(smollm2_path: Path) -> None:
    done = kvtier("run", smollm2_path, "-p", "The capital of France is", "-n", "4", "--temp", "0", "-c", "512")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    for row in ("prompt", "prefill", "first token", "decode", "kv in RAM"):
        assert row in done.stderr
    assert "tokens/s" in done.stderr and "f16" in done.stderr and "llama" not in done.stderr


def test_a_pipe_is_no_terminal_whatever_the_environment_says() -> None:
    plain = kvtier("models")
    forced = kvtier("models", FORCE_COLOR="1", TTY_COMPATIBLE="1")
    assert forced.returncode == 0 and forced.stdout == plain.stdout
    wrong = kvtier("run", "nothing.gguf", "-p", "x", FORCE_COLOR="1", TTY_COMPATIBLE="1")
    assert wrong.returncode == 2 and "\x1b" not in wrong.stderr


def test_json_is_one_object_with_everything(smollm2_path: Path, prompt_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    done = kvtier(
        "run",
        smollm2_path,
        "-f",
        prompt_file,
        "-n",
        "3",
        "--temp",
        "0",
        "-c",
        "1k",
        "--json",
        *DISK,
        "--kv-dir",
        folder,
    )
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)
    assert (
        out["text"]
        and out["n_generated"] == 3
        and out["finish"] == "length"
        and out["n_ctx"] == 1024
        and out["n_ctx_train"] == 8192
    )
    assert (
        out["n_prompt"] > 256
        and out["prefill_per_s"] > 0
        and out["decode_per_s"] > 0
        and out["ttft_s"] >= out["prefill_s"] > 0
    )
    tiers = out["kv"]["tiers"]
    assert tiers["host"]["budget_bytes"] == 6 << 20 >= out["kv"]["peak_host_bytes"] > 0
    assert tiers["disk"]["n_pages"] > 0 and out["kv"]["disk_writes"] > 0 and out["kv"]["n_layers"] == 30
    assert [line for line in done.stderr.splitlines() if "this run crawls" not in line] == []
    assert list(folder.iterdir()) == []
    again = kvtier(
        "run", smollm2_path, "-f", prompt_file, "-n", "3", "--temp", "0", "-c", "1k", *DISK, "--kv-dir", folder
    )
    assert again.stdout.rstrip("\n") == out["text"].rstrip("\n")
    for row in ("kv on disk", "disk reads", "pages read ahead", "stalled on disk"):
        assert row in again.stderr


def test_prompt_from_standard_input_and_chat_template(smollm2_path: Path) -> None:
    done = kvtier(
        "run",
        smollm2_path,
        "-f",
        "-",
        "--chat",
        "-n",
        "16",
        "--temp",
        "0",
        "-c",
        "512",
        stdin="Write the word banana three times.",
    )
    assert done.returncode == 0, done.stderr
    assert "banana" in done.stdout.lower()


def test_a_seed_repeats(smollm2_path: Path) -> None:
    texts = [
        kvtier("run", smollm2_path, "-p", "Once", "-n", "8", "-s", seed, "--temp", "1.5", "-c", "256").stdout
        for seed in ("7", "7", "8")
    ]
    assert texts[0] == texts[1] != texts[2]


def test_environment_sets_and_flag_wins(smollm2_path: Path) -> None:
    env = {
        "KVTIER_CTX_SIZE": "0.5k",
        "KVTIER_PREDICT": "2",
        "KVTIER_PROMPT": "One two three",
        "KVTIER_JSON": "1",
        "KVTIER_KV_HOST": "64MiB",
        "KVTIER_CACHE_TYPE_K": "q8_0",
    }
    out = json.loads(kvtier("run", smollm2_path, **env).stdout)
    assert (out["n_ctx"], out["n_generated"], out["kv"]["tiers"]["host"]["budget_bytes"]) == (512, 2, 64 << 20)
    assert out["kv"]["tiers"]["host"]["bytes_by_format"]["q8_0"] > 0
    out = json.loads(kvtier("run", smollm2_path, "-n", "1", "--kv-host", "32MiB", "-ctk", "f16", **env).stdout)
    assert (out["n_generated"], out["kv"]["tiers"]["host"]["budget_bytes"]) == (1, 32 << 20)
    assert out["kv"]["tiers"]["host"]["bytes_by_format"]["q8_0"] == 0
    refused(kvtier("run", smollm2_path, "-p", "x", KVTIER_CTX_SIZE="24,3"), 2, "'24,3'", "comma")


def test_context_is_used_to_its_end(smollm2_path: Path) -> None:
    out = json.loads(
        kvtier("run", smollm2_path, "-p", "word " * 240, "-n", "-1", "-c", "256", "--temp", "0", "--json").stdout
    )
    assert out["finish"] in {"context", "stop"}
    if out["finish"] == "context":
        assert out["n_prompt"] + out["n_generated"] == 257  # the last token needs no place
    assert out["n_generated"] > 1


def test_a_context_beyond_training_is_a_warning(smollm2_path: Path) -> None:
    done = kvtier("run", smollm2_path, "-p", "x", "-n", "1", "-c", "32k")
    assert done.returncode == 0
    for part in ("warning: ", "32,768", "8,192", "--rope-scaling yarn --rope-scale 4"):
        assert part in done.stderr
    done = kvtier("run", smollm2_path, "-p", "x", "-n", "1", "-c", "32k", "--rope-scaling", "yarn", "--rope-scale", "4")
    assert done.returncode == 0 and "warning" not in done.stderr


def test_lossy_without_a_budget_is_a_warning(smollm2_path: Path) -> None:
    for budget, n in (((), 1), (("--kv-host", "64MiB"), 0)):
        done = kvtier("run", smollm2_path, "-p", "x", "-n", "1", "-c", "256", "--fidelity", "lossy", *budget)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("warning: --fidelity lossy without a budget drops nothing") == n


@pytest.mark.parametrize("size", ["24,3", "-1", "", "1.3k", "abc"])
def test_context_sizes_that_are_none(smollm2_path: Path, size: str) -> None:
    refused(kvtier("run", smollm2_path, "-p", "x", "-c", size), 2, f"'{size}'")


@pytest.mark.parametrize(
    "words",
    [
        "--temp nan",
        "--temp inf",
        "--top-p nan",
        "--min-p nan",
        "--rope-scale nan",
        "--rope-scale inf",
        "--rope-freq-base nan",
        "--rope-freq-base 1e39",
        "-b 0",
        "-b 1048577",
        "-ub 1048577",
        "-c 16777217",
    ],
)
def test_numbers_beyond_what_can_be_computed(words: str) -> None:
    name, value = words.split()
    refused(kvtier("run", "smollm2", "-p", "x", name, value), 2, name, value)


def test_a_prompt_that_is_no_text() -> None:
    refused(kvtier("run", "smollm2", "-p", "ab\udcff"), 2, "not UTF-8", "0xff", "offset 2")
    refused(kvtier("run", "m\udcff.gguf", "-p", "x"), 2, "path is not UTF-8", "0xff")
    refused(kvtier("run", "smollm2", "-p", "x", "--kv-disk", "1GiB", "--kv-dir", "/d\udcff"), 2, "directory", "0xff")


@pytest.mark.parametrize(
    ("redirection", "exit_code", "part"),
    [(">/dev/full", 14, "No space left"), (">&-", 14, "closed"), ("| true", 14, ""), ("2>&- <&-", 0, "")],
)
def test_output_that_cannot_be_written(redirection: str, exit_code: int, part: str) -> None:
    script = f'set -o pipefail; "{sys.executable}" -m kvtier models {redirection}'
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, encoding="utf-8", timeout=300, check=False
    )
    assert done.returncode == exit_code, done.stderr
    assert part in done.stderr and "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert bool(done.stderr) == bool(part)


def test_the_command_of_a_plan_has_the_options_it_was_made_with(smollm2_path: Path) -> None:
    done = kvtier(
        "plan", smollm2_path, "-c", "20k", "-b", "256", "-ub", "128", "--kv-page-tokens", "64", "--swa-full", "--json"
    )
    assert done.returncode == 0, done.stderr
    for way in json.loads(done.stdout)["options"]:
        assert way["command"].endswith(
            "-b 256 -ub 128 --kv-page-tokens 64 --swa-full --rope-scaling yarn --rope-scale 3"
        )


def test_habits_of_llama_cpp(smollm2_path: Path) -> None:
    for words, reason in (
        (("-ngl", "99"), "all layers"),
        (("-fa", "on"), "always on"),
        (("-fa",), "always on"),
        (("-m", "other"), "two models"),
    ):
        refused(kvtier("run", "smollm2", "-p", "x", *words), 2, words[0], reason)
    assert kvtier("run", "-m", smollm2_path, "-p", "x", "-n", "1", "-c", "256").returncode == 0
    refused(kvtier("run", "none.gguf", "-p", "x", KVTIER_MODEL="smollm2"), 2, "none.gguf")
    refused(kvtier("run", "-p", "x", KVTIER_MODEL="none.gguf"), 2, "none.gguf")


def test_models_that_are_none(tmp_path: Path, smollm2_path: Path) -> None:
    refused(kvtier("run", "smollm", "-p", "x"), 2, "smollm2", "kvtier models")
    refused(kvtier("run", tmp_path / "none.gguf", "-p", "x"), 2, "none.gguf")
    refused(kvtier("run", "-p", "x"), 2, "no model")
    (tmp_path / "empty.gguf").touch()
    refused(kvtier("run", tmp_path / "empty.gguf", "-p", "x"), 3, "empty")
    (tmp_path / "text.gguf").write_text("not a model")
    refused(kvtier("run", tmp_path / "text.gguf", "-p", "x"), 3, "not a GGUF file")
    data = smollm2_path.read_bytes()
    for n_bytes in (20, 5000, len(data) // 2, len(data) - 1):
        (tmp_path / "cut.gguf").write_bytes(data[:n_bytes])
        refused(kvtier("run", tmp_path / "cut.gguf", "-p", "x"), 3, "cut.gguf")


def test_a_chat_template_that_is_none(smollm2_path: Path, tmp_path: Path) -> None:
    data = smollm2_path.read_bytes()
    assert b"{% for message in messages %}" in data
    (tmp_path / "bad.gguf").write_bytes(
        data.replace(b"{% for message in messages %}", b"{% fox message in messages %}")
    )
    refused(
        kvtier("run", tmp_path / "bad.gguf", "-p", "x", "-n", "1", "-c", "256"),
        3,
        "bad.gguf",
        "tokenizer.chat_template",
        "fox",
        "another copy",
    )


def test_prompts_that_do_not_work(smollm2_path: Path, tmp_path: Path) -> None:
    run = ("run", smollm2_path, "-c", "256")
    (tmp_path / "long.txt").write_text("word " * 2000)
    done = kvtier(*run, "-f", tmp_path / "long.txt")
    refused(done, 4, "2,00", "256", "-c ")
    refused(kvtier(*run), 2, "no prompt", "-p", "-f -")
    refused(kvtier(*run, "-p", ""), 2, "prompt is empty")
    refused(kvtier(*run, "-p", "x", "-f", tmp_path / "long.txt"), 2, "both")
    refused(kvtier(*run, "-f", tmp_path / "none.txt"), 2, "none.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    refused(kvtier(*run, "-f", tmp_path / "latin.txt"), 2, "latin.txt", "0xe9", "offset 3")


def test_tiers_that_do_not_work(smollm2_path: Path, tmp_path: Path, prompt_file: Path) -> None:
    run = ("run", smollm2_path, "-c", "1k", "-n", "1", "-f", prompt_file)
    refused(kvtier(*run, "--kv-host", "64KiB"), 5, "65536", "layer", "--kv-host")
    refused(kvtier(*run, "--kv-host", "6MiB"), 5, "host tier", "layer", "page", "--kv-disk")
    refused(kvtier(*run, *DISK, "--kv-dir", tmp_path / "none"), 6, str(tmp_path / "none"), "No such file")
    refused(kvtier(*run, *DISK, "--kv-dir", prompt_file), 6, "not a directory")
    refused(
        kvtier(*run, "--kv-host", "6MiB", "--kv-disk", "1MiB", "--kv-dir", tmp_path), 7, "disk tier", "1048576", "page"
    )
    refused(kvtier(*run, "--kv-dir", tmp_path), 2, "--kv-disk")
    refused(kvtier(*run, "--kv-host", "2GB"), 2, "2GiB")
    refused(kvtier(*run, "--kv-host-type-k", "q3_K"), 2, "q3_K", "q8_0")
    refused(kvtier(*run, "--kv-page-tokens", "48"), 2, "48", "Take 64")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompt.txt"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_and_a_read_only_file_system(smollm2_path: Path, tmp_path: Path, prompt_file: Path) -> None:
    run = ("run", smollm2_path, "-c", "1k", "-n", "1", "-f", prompt_file, *DISK, "--kv-dir")
    for options, exit_code, part in (("size=2m", 7, "No space left"), ("size=2m,ro", 6, "Read-only")):
        folder = tmp_path / options
        folder.mkdir()
        if (
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, check=False
            ).returncode
            != 0
        ):
            pytest.skip("this container may not mount")
        try:
            done = kvtier(*run, folder)
            left = list(folder.iterdir())
        finally:
            subprocess.run(["umount", str(folder)], check=True)
        refused(done, exit_code, part)
        assert left == []


def test_plugin_path_and_version() -> None:
    path = Path(kvtier("plugin-path").stdout.strip())
    assert path.is_file() and path.suffix == ".so"
    assert kvtier("--version").stdout.startswith("kvtier ")
    refused(kvtier("plugin-path", KVTIER_LIBRARY="/nonexistent.so"), 11, "/nonexistent.so")
    help_text = kvtier("--help").stdout
    for name in ("run", "plan", "doctor", "models", "plugin-path"):
        assert name in help_text
    assert kvtier("rnu").returncode == 2
