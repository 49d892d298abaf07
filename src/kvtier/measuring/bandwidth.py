"""How many bytes per second the processor reads from memory, and a disk delivers: the roofs of decode speed."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_BYTES = 512 << 20  # far more than any cache


def _read(part: NDArray[np.float32]) -> float:
    return float(np.dot(part, part))


def read_bandwidth(n_threads: int, n_bytes: int = _BYTES, rounds: int = 5) -> float:
    """Bytes per second of a plain streaming read by `n_threads` threads; the best of `rounds`.

    The read is a dot product of an array with itself (one read per number, wide vectors, no Python lock held). Run it
    in a process whose BLAS has one thread (`OPENBLAS_NUM_THREADS=1`), or `n_threads` is not what is measured.
    """
    data = np.ones(n_bytes // 4, np.float32)
    parts = np.array_split(data, n_threads)
    best = 0.0
    with ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(_read, parts))
        for _ in range(rounds):
            start = time.perf_counter()
            list(pool.map(_read, parts))
            best = max(best, data.nbytes / (time.perf_counter() - start))
    return best


def disk_bandwidth(directory: Path, n_bytes: int = 256 << 20, block_bytes: int = 1 << 20) -> float:
    """Bytes per second of reading a file in `directory`, past the page cache where the file system allows it.

    Where it does not (tmpfs, some network file systems), the figure is that of the cache. Raises OSError.
    """
    with tempfile.NamedTemporaryFile(dir=directory, prefix="kvtier-disk-") as file:
        block = os.urandom(block_bytes)
        for _ in range(n_bytes // block_bytes):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return _read_file(file.name, n_bytes, block_bytes)


def _read_file(name: str, n_bytes: int, block_bytes: int) -> float:
    direct = getattr(os, "O_DIRECT", 0)
    try:
        fd = os.open(name, os.O_RDONLY | direct)
    except OSError:
        fd = os.open(name, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

        def part(first: int) -> None:
            buffer = mmap.mmap(-1, block_bytes)  # page-aligned, as direct reads want it
            for at in range(first * block_bytes, n_bytes, 4 * block_bytes):
                os.preadv(fd, [buffer], at)

        with ThreadPoolExecutor(4) as pool:
            start = time.perf_counter()
            list(pool.map(part, range(4)))
            return n_bytes / (time.perf_counter() - start)
    finally:
        os.close(fd)
