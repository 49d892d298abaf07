"""The network at run time: numpy only, weights from an .npz file that says what it is and proves that it is whole."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import ScorerError
from ..outputs import aside, discard, settle, unwritable
from .base import PageStats
from .features import FEATURES, FEATURES_VERSION, LN2, PRESENT, features

VERSION: Final = 1
HIDDEN: Final = (15, 7)
ARRAYS: Final = ("w1", "w2", "w3")
SHIPPED: Final = "weights.npz"
_MAX_BYTES: Final = 1 << 20
# Pages at a time. Few enough for the caches, and for BLAS to do each product itself: beside generation, which has all
# cores at work, waiting for other threads of BLAS takes hundreds of times longer than the product.
_BLOCK: Final = 1024

Floats = npt.NDArray[np.float32]


def shapes(hidden: tuple[int, int] = HIDDEN) -> dict[str, tuple[int, int]]:
    """Shapes of the arrays: outputs and inputs of each layer, the last input being the bias."""
    n1, n2 = hidden
    return {"w1": (n1, len(FEATURES) + 1), "w2": (n2, n1 + 1), "w3": (1, n2 + 1)}


@dataclass(frozen=True, slots=True, eq=False)
class Scorer:
    """Weights, float32, for inputs as they come from `features`; `about` says how they were made.

    Each hidden layer is a matrix and an absolute value, which numpy computes seven times faster than the usual max(0,
    x). What comes out is added to the logarithm of the present mass: a network of zeros says that everything will stay
    as it is. The sum is the logarithm (natural) of the mass that a page is expected to get per step, in fair shares.
    """

    w1: Floats
    w2: Floats
    w3: Floats
    about: str = ""

    def predict(self, x: Floats) -> Floats:
        """float32 [pages] for features [features + 1, pages]."""
        w1, w2 = _with_one(self.w1), _with_one(self.w2)
        n = x.shape[1]
        out: Floats = np.empty((1, n), np.float32)
        h1, h2 = np.empty((len(w1), min(n, _BLOCK)), np.float32), np.empty((len(w2), min(n, _BLOCK)), np.float32)
        for i in range(0, n, _BLOCK):
            part = x[:, i : i + _BLOCK]
            if part.shape[1] < h1.shape[1]:
                h1, h2 = np.empty((len(w1), part.shape[1]), np.float32), np.empty((len(w2), part.shape[1]), np.float32)
            np.matmul(w1, part, out=h1)
            np.abs(h1, out=h1)
            np.matmul(w2, h1, out=h2)
            np.abs(h2, out=h2)
            np.matmul(self.w3, h2, out=out[:, i : i + _BLOCK])
        out[0] += x[PRESENT] * LN2
        scores: Floats = out[0]
        return scores

    def score(self, stats: PageStats) -> Floats:
        """Expected mass per step of every page, in fair shares: float32 [pages], positive."""
        log = self.predict(features(stats))
        np.clip(log, -20, 20, out=log)
        return np.exp(log, out=log)

    def save(self, path: Path) -> None:
        """Raises OutputError."""
        buffer = io.BytesIO()
        arrays = {name: getattr(self, name) for name in ARRAYS}
        meta = {
            "kind": "kvtier scorer",
            "version": VERSION,
            "features_version": FEATURES_VERSION,
            "features": FEATURES,
            "about": self.about,
            "sha256": _checksum(arrays, self.about),
        }
        np.savez(buffer, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays)
        whole = aside(path)
        try:
            whole.write_bytes(buffer.getvalue())
            settle(whole, path)
        except OSError as err:
            discard(whole, path)
            raise unwritable(f"the scorer {path}", err) from err


def _with_one(w: Floats) -> Floats:
    """A layer with one more output that hands the bias's input on: the absolute value of 1 is 1."""
    out = np.zeros((w.shape[0] + 1, w.shape[1]), np.float32)
    out[:-1] = w
    out[-1, -1] = 1
    return out


def load(path: Path) -> Scorer:
    """Read weights. Raises ScorerError that says what is wrong with the file."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ScorerError(f"{path} is no scorer: it has {path.stat().st_size:,} bytes", _MAKE_ONE)
        data = path.read_bytes()
    except OSError as err:
        raise ScorerError(f"the scorer {path} cannot be read: {err.strerror}", _MAKE_ONE) from err
    return _parse(data, str(path))


def shipped() -> Scorer:
    """The weights that come with the package. Raises ScorerError if the installation has none."""
    file = resources.files(__package__) / SHIPPED
    if not file.is_file():
        raise ScorerError("the package has no scorer weights", "Install it again: its files are incomplete.")
    return _parse(file.read_bytes(), SHIPPED)


_MAKE_ONE: Final = "Make one with `kvtier scorer train TEXT... -o FILE`."


def _parse(data: bytes, name: str) -> Scorer:
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            found = {key: file[key] for key in file.files}
        meta: dict[str, Any] = json.loads(found.pop("meta").tobytes())
        if meta.get("kind") != "kvtier scorer":
            raise ValueError("kind")
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OSError,
        EOFError,
        zipfile.BadZipFile,
        RuntimeError,
    ) as err:
        raise ScorerError(f"{name} is no scorer, or is damaged", _MAKE_ONE) from err
    if (
        meta.get("version") != VERSION
        or meta.get("features_version") != FEATURES_VERSION
        or tuple(meta.get("features", ())) != FEATURES
    ):
        raise ScorerError(
            f"the scorer {name} has version {meta.get('version')}.{meta.get('features_version')}, "
            f"and this program uses version {VERSION}.{FEATURES_VERSION}",
            "Train it again with this program.",
        )
    about = str(meta.get("about", ""))
    _check_arrays(found, name)
    if meta.get("sha256") != _checksum(found, about):
        raise ScorerError(f"the scorer {name} is damaged: its checksum does not match", _MAKE_ONE)
    return Scorer(**found, about=about)


def _check_arrays(found: dict[str, Any], name: str) -> None:
    if set(found) != set(ARRAYS):
        raise ScorerError(f"the scorer {name} has other arrays than {', '.join(ARRAYS)}", _MAKE_ONE)
    hidden = (found["w1"].shape[0], found["w2"].shape[0]) if found["w1"].ndim == found["w2"].ndim == 2 else (0, 0)
    for array, shape in shapes(hidden).items():
        got = found[array]
        if got.shape != shape or got.dtype != np.float32 or 0 in shape:
            raise ScorerError(
                f"the scorer {name} has an array {array} of shape {list(got.shape)}, {got.dtype}, which does not fit "
                "the others",
                _MAKE_ONE,
            )
        if not np.isfinite(got).all():
            raise ScorerError(f"the scorer {name} has weights that are not finite", _MAKE_ONE)


def _checksum(arrays: dict[str, Any], about: str) -> str:
    digest = hashlib.sha256(about.encode())
    for name in ARRAYS:
        digest.update(name.encode() + np.ascontiguousarray(arrays[name], np.float32).tobytes())
    return digest.hexdigest()
