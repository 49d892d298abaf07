"""Configurations: which engine, which KV formats, which tiers."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..errors import KvtierError
from ..lossy.batch import fitting_batch
from ..lossy.settings import MemorySettings
from ..model.cachetypes import AUTO, GGML_TYPES, cache_types
from ..model.gguf import read_model
from ..model.plan import PlanRequest, cache_bytes
from ..model.shape import ModelShape, shape_of
from ..settings import KVSettings
from .errors import MeasuringError

EngineName = Literal["stock", "kvtier"]


@dataclass(frozen=True, slots=True)
class Configuration:
    """One engine with one way of keeping the KV cache.

    `type_k` and `type_v` are llama.cpp's nominal types; "auto" (kvtier): what suits the pages, see `for_model`.
    `settings` is kvtier's settings string (``host=2GiB,...``), empty for stock. `flash_attn` is llama.cpp's switch;
    kvtier needs it on. `policy` places kvtier's pages; empty: the library's own. `keep` is a host budget as a share of
    the text's cache in F16, until `for_model` makes bytes of it; 0: the budget is in `settings`. `memory` is what lossy
    fidelity does with pages; None: what goes with the policy.
    """

    name: str
    engine: EngineName = "stock"
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: bool = True
    settings: str = ""
    policy: str = ""
    keep: float = 0.0
    memory: MemorySettings | None = None

    def __post_init__(self) -> None:
        for kind in (self.type_k, self.type_v):
            if kind not in GGML_TYPES and not (kind == AUTO and self.engine == "kvtier"):
                raise MeasuringError(f"unknown KV type {kind!r}: one of {', '.join(GGML_TYPES)}")
        if self.engine == "kvtier" and not self.flash_attn:
            raise MeasuringError("kvtier needs flash attention: V must not be transposed")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Configuration:
        """The inverse of `to_dict`."""
        memory = data.get("memory")
        return cls(**{**data, "memory": None if memory is None else MemorySettings(**memory)})

    def for_model(self, model: str | Path, n_tokens: int, n_batch: int = 512) -> Configuration:
        """The same for this model and a text of `n_tokens`, in batches of `n_batch`: types that were "auto", and bytes
        for `keep`. Raises KvtierError."""
        if AUTO not in (self.type_k, self.type_v) and self.keep == 0.0:
            return self
        header, settings = read_model(model)[0], KVSettings.from_native(self.settings)
        type_k, type_v = cache_types(settings, header, self.type_k, self.type_v)
        if self.keep > 0.0:
            settings = self._with_share(settings, shape_of(header), n_tokens, n_batch)
            if (
                fewer := fitting_batch(shape_of(header), settings, n_batch)
            ) < n_batch:  # sliding windows hold a batch, too
                settings = self._with_share(settings, shape_of(header), n_tokens, fewer)
        return replace(self, type_k=type_k, type_v=type_v, keep=0.0, settings=settings.to_native())

    def _with_share(self, settings: KVSettings, shape: ModelShape, n_tokens: int, n_batch: int) -> KVSettings:
        n_bytes = cache_bytes(shape, PlanRequest(n_ctx=n_tokens, n_ubatch=n_batch), "f16", "f16").page_bytes
        if n_bytes is None:
            raise KvtierError(
                f"{self.name}: this model's cache cannot be kept in f16, so it has no share",
                "Give host=BYTES instead of keep.",
            )
        return replace(settings, host=int(self.keep * n_bytes))

    def make_directory(self) -> None:
        """Make the disk tier's directory if it is the user's cache folder; one that was named must exist."""
        default = KVSettings(disk=1).disk_dir()
        if default is not None and f"dir={default}" in self.settings.split("\n"):
            with suppress(OSError):  # the native library says what is wrong with it
                default.mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions are stretched; zeros mean the model's own."""

    freq_base: float = 0.0
    freq_scale: float = 0.0


def rope_for(n_ctx: int, n_ctx_train: int) -> Rope:
    """Positions squeezed linearly into the trained range where a context is longer than it; else the model's own."""
    return Rope(freq_scale=n_ctx_train / n_ctx) if n_ctx > n_ctx_train > 0 else Rope()


@dataclass(frozen=True, slots=True)
class Opening:
    """What a worker needs to open a model; makes `config` one for this model, and `n_batch` one for its budget."""

    model: str
    config: Configuration
    n_ctx: int
    n_threads: int
    n_batch: int = 512
    rope: Rope = field(default_factory=Rope)

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", self.config.for_model(self.model, self.n_ctx, self.n_batch))
        if "fidelity=lossy" in self.config.settings.splitlines():
            settings = KVSettings.from_native(self.config.settings)
            object.__setattr__(
                self, "n_batch", fitting_batch(shape_of(read_model(self.model)[0]), settings, self.n_batch)
            )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Opening:
        """The inverse of `to_dict`."""
        return cls(**{**data, "config": Configuration.from_dict(data["config"]), "rope": Rope(**data["rope"])})
