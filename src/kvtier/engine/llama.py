"""`kvtier.Llama`: llama_cpp.Llama with its KV cache in tiers."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jinja2
import llama_cpp
import llama_cpp.llama_cpp as api
import numpy as np

from ..errors import (
    ChatTemplateError,
    ContextLengthError,
    DirectoryError,
    KvtierError,
    OutOfMemoryError,
    SettingsError,
    UnsupportedError,
    from_code,
)
from ..lossy.batch import fitting_batch
from ..lossy.memory import LossyEngine, make_room
from ..lossy.settings import MemorySettings, memory_for
from ..machine.processors import Processors
from ..model import files, gguf
from ..model.cachetypes import GGML_TYPES, cache_types, type_name
from ..model.shape import shape_of
from ..native import binding, runtime
from ..native.kv import CacheLease, KVCache
from ..placement.kvengine import KVEngine
from ..placement.placement import Placement
from ..policies.base import Policy
from ..policies.registry import LOSSY_DEFAULT
from ..policies.registry import create as create_policy
from ..settings import KVSettings
from . import arguments, closed, samebits
from .decode import Decode
from .guards import GuardedLlama, GuardedModel
from .pace import Pace, ThreadFigures

if TYPE_CHECKING:
    from typing_extensions import Self

# what no argument changes: all caches on our device, which is the only one, and our attention
_ALWAYS: Final = {
    "n_gpu_layers": -1,
    "split_mode": api.LLAMA_SPLIT_MODE_LAYER,
    "main_gpu": 0,
    "tensor_split": None,
    "flash_attn": True,
    "offload_kqv": True,
}


class Llama(GuardedLlama):
    """A llama_cpp.Llama that keeps its KV cache in pages on RAM and disk.

    Takes the arguments of llama_cpp.Llama, and those below. Flash attention is always on, and the layers' caches always
    go to our device; weights stay where llama.cpp can compute with them.

    Args:
        model_path: the GGUF file.
        kv_host: budget of the cache in RAM, bytes or text such as "2GiB"; None: no limit.
        kv_disk: budget of the cache on disk; None: no disk tier.
        kv_dir: directory of the disk tier; None: the user's cache folder.
        kv_host_type_k, kv_host_type_v, kv_disk_type_k, kv_disk_type_v: storage formats (f32 f16 bf16 q8_0 q4_0 q4_1);
            RAM takes type_k and type_v by default, disk takes RAM's.
        page_tokens: tokens per page, a multiple of 32.
        fidelity: "exact", "bounded", "bounded:EPS" or "lossy", see kvtier.settings.KVSettings.
        kv_read_budget: with bounded fidelity, the most values that one step reads per KV head.
        kv_settings: all of the above in one object, instead of them.
        kv_memory: with lossy fidelity, what becomes of a page before it is gone (a kvtier.MemorySettings); by default
            it is kept in fewer bits with the policies delta and adaptive, and nothing with others, which drop pages as
            they are.
        policy: decides which pages stay in RAM: a name of kvtier.policies.names(), or an object with `name` and `plan`.
            None: the library's own choice, by last use; with fidelity lossy, where what leaves is gone, "adaptive".
        same_bits: one answer, however it was computed: logits are equal to the last bit whether tokens come one by one
            or in batches of any size, with any number of threads. Needs fidelity exact and caches of the full size
            (swa_full), and refuses what llama.cpp cannot do (docs/same-bits.md).
        n_batch: most tokens that one call of llama.cpp gets; with lossy fidelity fewer where half of the budget is
            fewer.
        type_k, type_v: the cache types that llama.cpp sees, as ggml type numbers or names. None: f16, but q8_0 or less
            where pages are or become quantized, so that llama.cpp rotates what is rounded (see
            kvtier.model.cachetypes).
        n_threads, n_threads_batch: threads for decode, and for prefill. None: as many as there are physical cores that
            this process may use, fewer while other programs keep them busy; `threads` says how many there are.

    Raises:
        GgufError: the model, or another file that an argument names, is missing or cannot be used.
        SettingsError: an argument cannot be used (docs/arguments.md has the table of what becomes of each).
        ChatTemplateError: the model's chat template cannot be compiled.
        SameBitsError: same_bits is asked for, and this model or build of llama.cpp cannot give them.
        NativeError: the tiers could not be set up (BudgetError, DirectoryError, ...).
        LlamaError: llama.cpp could not load the model or create the context; holds what it logged.
    """

    def __init__(
        self,
        model_path: str,
        *,
        kv_host: int | str | None = None,
        kv_disk: int | str | None = None,
        kv_dir: str | Path | None = None,
        kv_host_type_k: str | None = None,
        kv_host_type_v: str | None = None,
        kv_disk_type_k: str | None = None,
        kv_disk_type_v: str | None = None,
        page_tokens: int | None = None,
        fidelity: str | None = None,
        kv_read_budget: int | None = None,
        kv_settings: KVSettings | None = None,
        policy: str | Policy | None = None,
        kv_memory: MemorySettings | None = None,
        same_bits: bool = False,
        type_k: int | str | None = None,
        type_v: int | str | None = None,
        **kwargs: Any,
    ) -> None:
        own = {
            "host": kv_host,
            "disk": kv_disk,
            "dir": kv_dir,
            "host_type_k": kv_host_type_k,
            "host_type_v": kv_host_type_v,
            "disk_type_k": kv_disk_type_k,
            "disk_type_v": kv_disk_type_v,
            "page_tokens": page_tokens,
            "fidelity": fidelity,
            "read_budget": kv_read_budget,
        }
        arguments.check_names(kwargs, inspect.signature(Llama.__init__).parameters)
        asked = type_name("type_k", type_k), type_name("type_v", type_v)
        settings = _merge(kv_settings, own).with_cache_types(*asked)
        kwargs = arguments.read_values(kwargs)
        if policy is None and settings.fidelity == "lossy":
            policy = LOSSY_DEFAULT
        chosen = create_policy(policy) if isinstance(policy, str) else _checked_policy(policy)
        memory = _memory(settings, chosen, kv_memory)
        path = files.named_path("model_path", model_path)
        headers = gguf.read_model(path)  # llama.cpp must never see a damaged file
        header, kwargs = arguments.for_model(headers, kwargs)
        if same_bits:
            samebits.check_settings(settings)
            samebits.check_windows(header, kwargs.get("swa_full"))
        nominal = cache_types(settings, header, *asked)
        if settings.fidelity == "lossy":
            kwargs["n_batch"] = fitting_batch(shape_of(header), settings, kwargs["n_batch"])

        loaded = runtime.load()
        self._same_bits = same_bits
        self._repack = not same_bits or samebits.extra_buffers_allowed(headers, kwargs.get("lora_path"))
        _make_dir(settings)
        domain = binding.Domain(settings.to_native())
        try:
            self._load(loaded, domain, path, GGML_TYPES[nominal[0]], GGML_TYPES[nominal[1]], kwargs)
        except BaseException:
            if "_stack" in self.__dict__:
                self._stack.close()
            domain.close()
            raise
        self._lease = CacheLease(_Free(self._stack, domain, (self._model, self._ctx, self._batch)))
        self._kv = KVCache(domain, self._lease, settings)
        self._policy, self._kv_memory = policy, kv_memory
        if memory is not None and self.context_params.swa_full and api.llama_model_n_swa(self._model.model) > 0:
            # a summary is seen by every query, and would show layers with a window what lies before it
            memory = replace(memory, online_share=0.0, low_rank=0)
        self._placement = (
            _start_placement(self._kv, chosen, memory, self._ctx.decode, self._model.vocab)
            if chosen is not None
            else None
        )

    def _load(
        self,
        loaded: runtime.Runtime,
        domain: binding.Domain,
        model_path: str,
        type_k: int,
        type_v: int,
        kwargs: dict[str, Any],
    ) -> None:
        self._devices = runtime.device_array(loaded.device)
        kwargs = {**kwargs, **_ALWAYS}
        given = kwargs.get("n_threads") or None, kwargs.get("n_threads_batch") or None
        processors = Processors()
        kwargs["n_threads"], kwargs["n_threads_batch"] = (n or processors.limit for n in given)
        runtime.log.clear()
        try:
            with runtime.loading_onto(self._devices, self._repack), runtime.bound(domain):
                super().__init__(model_path, type_k=type_k, type_v=type_v, **kwargs)
        except KvtierError:
            raise
        except (ValueError, RuntimeError) as err:
            raise runtime.llama_error(str(err), domain) from err
        except jinja2.TemplateError as err:  # the templates of the file are compiled, used or not
            raise ChatTemplateError(
                f"{model_path}: the chat template in the file (tokenizer.chat_template) cannot be used: {err}",
                "Take another copy of the model, or give this one a sound template (gguf-new-metadata).",
            ) from None
        except MemoryError as err:
            raise OutOfMemoryError(
                f"the model cannot be made: {err or 'out of memory'}",
                "Take a smaller context (n_ctx), a smaller n_batch or no logits_all, or close other programs.",
            ) from err
        if kwargs["lora_path"] is not None and not self._lora_adapter:  # llama_cpp goes on with a null pointer
            raise runtime.llama_error(f"llama.cpp could not use the adapter {kwargs['lora_path']}", domain)
        self._model.__class__ = GuardedModel
        if kwargs.get("seed") == 0:  # llama_cpp.Llama takes it for "not given"
            self.set_seed(0)
        if self.input_ids.shape[0] < self._n_ctx:  # llama.cpp rounds the context up
            self.input_ids = np.ndarray((self._n_ctx,), dtype=np.intc)
        # Every decode of llama_cpp goes through the context, whichever method of Llama starts it.
        context = self._ctx

        def set_threads(decode: int, prefill: int) -> None:
            api.llama_set_n_threads(context.ctx, decode, prefill)

        self._given_threads = given
        self._pace = Pace(set_threads, processors, *given)
        self._ctx.decode = Decode(context, domain, self._pace)  # type: ignore[method-assign]

    @property
    def kv(self) -> KVCache:
        """Figures of the tiers and attention mass."""
        return self._kv

    @property
    def placement(self) -> Placement | None:
        """The policy at work; None without one."""
        return self._placement

    @property
    def threads(self) -> ThreadFigures:
        """Threads that compute now, and why a run crawled if it did."""
        return self._pace.figures

    def eval(self, tokens: Any) -> None:
        """Evaluate tokens after those evaluated so far.

        Raises ContextLengthError if they do not fit, NativeError if the store failed, LlamaError if llama.cpp did.
        """
        if self.n_tokens + len(tokens) > self._n_ctx:
            raise ContextLengthError(self.n_tokens + len(tokens), self._n_ctx)
        done = 0
        while done < len(tokens):
            # what a lossy cache drops depends on how many tokens come at once, so there it stays with n_batch
            is_lossy = self._kv.settings.fidelity == "lossy"
            n = self.n_batch if is_lossy else self._pace.piece(self.n_batch, self.context_params.n_ubatch)
            super().eval(tokens[done : done + n])
            done += n

    def save_state(self) -> llama_cpp.LlamaState:
        """The model's state, cache included. Raises UnsupportedError if the cache is lossy and has dropped pages."""
        n_gone = self._kv.figures.tiers["none"].n_pages
        if n_gone > 0:
            raise UnsupportedError(
                f"the cache is lossy, and {n_gone:,} of its pages have been dropped: a saved state would show zeros "
                "in their place",
                "Save the state before pages are dropped (a larger host budget), or use fidelity exact with a disk "
                "tier.",
            )
        return super().save_state()

    def close(self) -> None:
        """Free the model, its cache and its disk tier's files; waits for arrays that still point into the cache.

        Whatever is called after it raises ClosedError, except close() itself.
        """
        placement: Placement | None = self.__dict__.get("_placement")
        if placement is not None:
            placement.stop()
        lease: CacheLease | None = self.__dict__.get("_lease")
        if lease is not None:
            lease.close()
        closed.refuse_use(self)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),  # type: ignore[no-untyped-call]
            "n_threads": self._given_threads[0],
            "n_threads_batch": self._given_threads[1],
            "op_offload": None,  # either way the same here
            "kv_settings": self._kv.settings,
            "policy": self._policy,
            "kv_memory": self._kv_memory,
            "same_bits": self._same_bits,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Free:
    """Frees a model, then its domain. Does not hold the model's Python object, so that dropping that one frees all.

    `parts` are the objects of llama_cpp that point to what is freed.
    """

    def __init__(self, stack: Any, domain: binding.Domain, parts: Sequence[object]) -> None:
        self._stack = stack
        self._domain = domain
        self._parts = parts

    def __call__(self) -> None:
        self._stack.close()
        self._domain.close()
        for part in self._parts:
            closed.refuse_access(part)


def _checked_policy(policy: Policy | None) -> Policy | None:
    if policy is None or (isinstance(getattr(policy, "name", None), str) and callable(getattr(policy, "plan", None))):
        return policy
    raise SettingsError(
        f"policy is {policy!r}, which is no policy",
        "Give a name of kvtier.policies.names(), or an object with a `name` and a method `plan(stats, budgets)`.",
    )


def _memory(settings: KVSettings, policy: Policy | None, memory: MemorySettings | None) -> MemorySettings | None:
    """What lossy fidelity does with a page before it is gone."""
    if settings.fidelity != "lossy":
        if memory is not None:
            raise SettingsError(
                "kv_memory is given, but only lossy fidelity has an online memory",
                'Add fidelity="lossy" to the settings.',
            )
        return None
    return memory or memory_for(LOSSY_DEFAULT if policy is None else policy.name)


def _start_placement(kv: KVCache, policy: Policy, memory: MemorySettings | None, decode: Any, vocab: Any) -> Placement:
    def to_text(tokens: Sequence[int]) -> str:
        return _text(vocab, tokens)

    lossy = None if memory is None else LossyEngine(kv, memory, to_text)
    engine = KVEngine(kv, to_text) if lossy is None else lossy
    placement = Placement(engine, policy)

    def on_tokens(tokens: Sequence[int]) -> None:
        engine.advance(tokens)
        placement.advance(len(tokens))

    def before(n_tokens: int) -> None:
        if n_tokens > 1 and lossy is not None:
            make_room(lossy, placement, n_tokens)

    decode.on_tokens = on_tokens
    if lossy is not None:
        decode.before = before
    return placement


def _text(vocab: Any, tokens: Sequence[int]) -> str:
    """Text of tokens, those of chat templates included; pieces of 64 bytes or more, which are no words, are left
    out."""
    buffer = ctypes.create_string_buffer(64)
    pieces = []
    for token in tokens:
        n = int(api.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, True))
        pieces.append(buffer.raw[: max(0, n)])
    return b"".join(pieces).decode("utf-8", "replace")


def _merge(settings: KVSettings | None, own: dict[str, Any]) -> KVSettings:
    given = {name: value for name, value in own.items() if value is not None}
    if settings is None:
        return KVSettings(**given)
    if given:
        raise SettingsError(
            f"both kv_settings and {', '.join(given)} are given", "Put everything in kv_settings, or leave it out."
        )
    return settings


def _make_dir(settings: KVSettings) -> None:
    """The user's cache folder is made when needed; a directory that was named must exist."""
    path = settings.disk_dir()
    if path is not None and settings.dir is None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise from_code(
                DirectoryError.code, f"the directory of the disk tier cannot be made: {path}: {err.strerror}"
            ) from err
