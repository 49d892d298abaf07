"""What becomes of each argument of `llama_cpp.Llama`: one table, and one rule.

An argument that cannot be honoured is refused where the caller would get something else than asked, and warned about
where only the place or the speed differs. Whatever is passed on has been checked: llama.cpp ends the process over some
values, and ctypes turns others into what nobody asked for (a seed of 2**32 is 0, any text is true).
"""

from __future__ import annotations

import difflib
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
from llama_cpp import llama_chat_format

from ..errors import ArgumentWarning, SettingsError
from ..machine.hardware import memory
from ..model import files
from ..model.gguf import check_figures
from ..model.header import GgufHeader, Scalar
from ..sizes import format_bytes

Outcome = Literal["honoured", "refused", "warned"]
_MAX_INT: Final = (1 << 31) - 1
_MAX_FLOAT: Final = 3.4e38  # llama.cpp computes in 32 bits
_MAX_THREADS: Final = 512  # ggml ends the process above
_CELL_BYTES: Final = 48  # of llama.cpp's llama_kv_cells: position, shift, and a bit for each of 256 sequences
_DEFAULT_BATCH, _DEFAULT_CONTEXT = 512, 512  # tokens, llama_cpp's own defaults
_CALLER: Final = 4  # stack level of whoever calls kvtier.Llama, seen from `decide`


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one argument.

    Attributes:
        outcome: of a value that is possible, but not done here: "refused" or "warned"; "honoured" if all are done.
        read: what is passed on; takes the name and the value. Raises SettingsError for a value that is impossible.
        is_done: whether a value comes out as asked; takes the value and the number of layers.
        why: the reason where it does not, and what is done instead; `way_out` is what the caller can do about it.
    """

    outcome: Outcome
    read: Callable[[str, Any], Any]
    is_done: Callable[[Any, int], bool] = lambda _value, _n_layers: True
    why: str = ""
    way_out: str = ""


def _fail(name: str, value: Any, wanted: str) -> SettingsError:
    shown = repr(value)
    return SettingsError(f"{name} is {shown if len(shown) <= 80 else shown[:77] + '...'}", f"Take {wanted}.")


def _switch(name: str, value: Any, none: bool = False) -> bool | None:
    if value is None and none:
        return None
    if isinstance(value, bool | np.bool_) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise _fail(name, value, "True or False" + ", or leave it out" * none)


def _whole(name: str, value: Any, least: int, most: int, wanted: str = "", none: bool = False) -> int | None:
    """A whole number of any kind but bool; `wanted` describes it where the bounds do not."""
    if value is None and none:
        return None
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise _fail(name, value, wanted or f"a whole number from {least:,} to {most:,}")
    return number


def _real(name: str, value: Any, least: float = -_MAX_FLOAT) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes | bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not least <= number <= _MAX_FLOAT:
        raise _fail(name, value, "a finite 32-bit number" + (f" of at least {least:g}" if least > -_MAX_FLOAT else ""))
    return number


def _one_of(name: str, value: Any, values: Mapping[int, str], none: bool = False) -> int | None:
    wanted = "one of " + ", ".join(f"{number} ({meaning})" for number, meaning in values.items())
    return _whole(name, value, min(values), max(values), wanted, none)


def _numa(name: str, value: Any) -> bool | int | None:
    return value if isinstance(value, bool) else _one_of(name, value, dict(enumerate(_NUMA)))


def _function(name: str, value: Any, wanted: str) -> Any:
    if value is None or callable(value):
        return value
    raise _fail(name, value, f"{wanted}, or leave it out")


def _tokenizer(name: str, value: Any) -> Any:
    if value is None or all(callable(getattr(value, method, None)) for method in ("tokenize", "detokenize")):
        return value
    raise _fail(name, value, "an object with methods tokenize and detokenize (llama_cpp.BaseLlamaTokenizer)")


def _text(name: str, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise _fail(name, value, "text, or leave it out")


def _overrides(name: str, value: Any) -> dict[str, bool | int | float | str] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _fail(name, value, "a dictionary of keys of the GGUF file and their values")
    for key, item in value.items():
        what = f"{name}[{key!r}]"
        if not isinstance(key, str) or not 0 < len(key.encode(errors="replace")) < 128 or "\0" in key:
            raise _fail(f"a key of {name}", key, "the name of a GGUF key, text of 1 to 127 bytes")
        if isinstance(item, str):
            if len(item.encode(errors="replace")) > 127 or "\0" in item:
                raise _fail(what, item, "at most 127 bytes of text")
        elif isinstance(item, float):
            _real(what, item)
        else:
            _whole(what, int(item) if isinstance(item, bool) else item, -(1 << 63), (1 << 63) - 1)
    return dict(value)


def _anything(_name: str, value: Any) -> Any:
    return value


_NUMA: Final = ("off", "distribute", "isolate", "numactl", "mirror")
_SPLITS: Final = {0: "none", 1: "layer", 2: "row", 3: "tensor"}
_SCALINGS: Final = {-1: "the model's", 0: "none", 1: "linear", 2: "yarn", 3: "longrope"}
_POOLINGS: Final = {-1: "the model's", 0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}
_ATTENTIONS: Final = {-1: "the model's", 0: "causal", 1: "not causal"}
_CONTEXT: Final = "a number of tokens, or 0 for what the model was trained for"
_ONE_DEVICE: Final = (
    "the caches of all layers are on kvtier's device, and there is no second one to choose or share with"
)
_LEAVE_OUT: Final = "Leave it out, or use llama_cpp.Llama."


def _honoured(read: Callable[[str, Any], Any]) -> Decision:
    return Decision("honoured", read)


_SWITCH: Final = _honoured(_switch)
_FRACTION: Final = _honoured(_real)
_POSITIVE: Final = _honoured(partial(_real, least=0.0))
_BATCH: Final = _honoured(partial(_whole, least=1, most=_MAX_INT))
_THREADS: Final = _honoured(partial(_whole, least=0, most=_MAX_THREADS, none=True))
_OURS: Final = _honoured(_anything)  # checked elsewhere: the model's file, the cache types

DECISIONS: Final[Mapping[str, Decision]] = {
    "model_path": _OURS,
    "n_gpu_layers": Decision(
        "warned",
        partial(_whole, least=-_MAX_INT - 1, most=_MAX_INT),
        lambda n, n_layers: n < 0 or n >= n_layers,
        "the caches of all layers are on kvtier's device, and all weights stay where llama.cpp's CPU backend computes",
    ),
    "split_mode": Decision(
        "refused", partial(_one_of, values=_SPLITS), lambda mode, _: mode < 2, _ONE_DEVICE, _LEAVE_OUT
    ),
    "main_gpu": Decision(
        "refused",
        partial(_whole, least=-_MAX_INT - 1, most=_MAX_INT),
        lambda gpu, _: gpu == 0,
        _ONE_DEVICE,
        _LEAVE_OUT,
    ),
    "tensor_split": Decision("refused", _anything, lambda split, _: split is None, _ONE_DEVICE, _LEAVE_OUT),
    "vocab_only": _SWITCH,
    "use_mmap": _SWITCH,
    "use_mlock": _SWITCH,
    "kv_overrides": _honoured(_overrides),
    "seed": _honoured(partial(_whole, least=-1, most=0xFFFFFFFF, wanted="-1 (random) to 4,294,967,295")),
    "n_ctx": _honoured(partial(_whole, least=0, most=_MAX_INT, wanted=_CONTEXT)),
    "n_batch": _BATCH,
    "n_ubatch": _BATCH,
    "n_threads": _THREADS,
    "n_threads_batch": _THREADS,
    "rope_scaling_type": _honoured(partial(_one_of, values=_SCALINGS, none=True)),
    "pooling_type": _honoured(partial(_one_of, values=_POOLINGS)),
    "attention_type": _honoured(partial(_one_of, values=_ATTENTIONS)),
    "rope_freq_base": _POSITIVE,
    "rope_freq_scale": _POSITIVE,
    "yarn_ext_factor": _FRACTION,
    "yarn_attn_factor": _FRACTION,
    "yarn_beta_fast": _FRACTION,
    "yarn_beta_slow": _FRACTION,
    "yarn_orig_ctx": _honoured(partial(_whole, least=0, most=_MAX_INT, wanted=_CONTEXT)),
    "logits_all": _SWITCH,
    "embedding": _SWITCH,
    "offload_kqv": Decision(
        "refused", _switch, lambda on, _: on, "it would keep the cache away from the tiers", _LEAVE_OUT
    ),
    "flash_attn": Decision(
        "refused", _switch, lambda on, _: on, "pages are only read by kvtier's own flash attention", _LEAVE_OUT
    ),
    "op_offload": Decision(
        "warned",
        partial(_switch, none=True),
        lambda on, _: not on,
        "kvtier's device computes attention only, and every other operation stays where its weights are",
    ),
    "swa_full": _honoured(partial(_switch, none=True)),
    "no_perf": _SWITCH,
    "last_n_tokens_size": _honoured(partial(_whole, least=-1, most=_MAX_INT)),
    "lora_base": Decision(
        "refused",
        _anything,
        lambda base, _: base is None,
        "llama.cpp no longer merges an adapter into weights: it computes it beside those of the model",
        "Leave it out, or give that file as the model.",
    ),
    "lora_scale": _FRACTION,
    "lora_path": _OURS,
    "numa": _honoured(_numa),
    "chat_format": _honoured(_text),
    "chat_handler": _honoured(partial(_function, wanted="a chat handler (see llama_cpp.llama_chat_format)")),
    "draft_model": _honoured(
        partial(_function, wanted="a draft model such as llama_cpp.llama_speculative.LlamaPromptLookupDecoding()")
    ),
    "tokenizer": _honoured(_tokenizer),
    "type_k": _OURS,
    "type_v": _OURS,
    "spm_infill": _SWITCH,
    "verbose": _SWITCH,
}


def check_names(given: Iterable[str], ours: Iterable[str]) -> None:
    """Raise SettingsError for arguments that neither llama_cpp.Llama nor `ours` have. llama_cpp ignores such."""
    known = {*DECISIONS, *ours}
    unknown = sorted(set(given) - set(DECISIONS))
    if unknown:
        near = [match for name in unknown for match in difflib.get_close_matches(name, known, 1)]
        hint = f"Did you mean {', '.join(near)}? " if near else ""
        raise SettingsError(f"there is no argument {', '.join(unknown)}", f"{hint}help(kvtier.Llama) lists all.")


def read_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as they are passed on. Raises SettingsError for a value that is impossible with any model."""
    return {name: DECISIONS[name].read(name, value) for name, value in given.items()}


def for_model(headers: Sequence[GgufHeader], kwargs: dict[str, Any]) -> tuple[GgufHeader, dict[str, Any]]:
    """The header as overrides leave it, and the arguments as they fit the model. Raises SettingsError, GgufError."""
    header = overridden(headers[0], kwargs.get("kv_overrides"))
    check_figures((header, *headers[1:]))
    decide(kwargs, header)
    check_chat_format(kwargs.get("chat_format"), header)
    files.check_handler(kwargs.get("chat_handler"))
    adapter = files.adapter_path(kwargs.get("lora_path"), headers)
    n_ctx = (
        kwargs.get("n_ctx", _DEFAULT_CONTEXT) or header.get_int(header.arch_key("context_length")) or _DEFAULT_CONTEXT
    )
    check_context(n_ctx)
    n_batch = min(kwargs.get("n_batch", _DEFAULT_BATCH), n_ctx)  # llama_cpp allocates for more than it uses
    # a draft model's tokens need logits of each, for which llama_cpp makes room only if it is asked for them
    logits_all = kwargs.get("logits_all", False) or kwargs.get("draft_model") is not None
    return header, {**kwargs, "lora_path": adapter, "n_batch": n_batch, "logits_all": logits_all}


def decide(values: Mapping[str, Any], header: GgufHeader) -> None:
    """Refuse (SettingsError) or warn (ArgumentWarning) where a value does not come out as asked of a model."""
    n_layers = header.get_int(header.arch_key("block_count")) or 0
    for name, value in values.items():
        decision = DECISIONS[name]
        if decision.is_done(value, n_layers):
            continue
        if decision.outcome == "refused":
            raise SettingsError(f"{name} is {value!r}, which cannot be: {decision.why}", decision.way_out)
        warnings.warn(
            f"{name}={value!r} has no effect with kvtier: {decision.why}", ArgumentWarning, stacklevel=_CALLER
        )


def check_context(n_ctx: int) -> None:
    """Raise SettingsError for a context whose tables alone, which llama.cpp fills at once, are more than all memory."""
    total_bytes = memory().total_bytes
    if n_ctx * _CELL_BYTES > total_bytes:
        raise SettingsError(
            f"n_ctx is {n_ctx:,}: llama.cpp's tables of so many cells take {format_bytes(n_ctx * _CELL_BYTES)}, "
            f"and this machine has {format_bytes(total_bytes)} in all",
            f"Take at most {total_bytes // _CELL_BYTES // 4:,}.",
        )


def check_chat_format(name: str | None, header: GgufHeader) -> None:
    """Raise SettingsError for a chat format that neither llama_cpp nor the model's file has."""
    own = [key.removeprefix("tokenizer.") for key in header.metadata if key.startswith("tokenizer.chat_template.")]
    if "tokenizer.chat_template" in header.metadata:
        own.append("chat_template.default")
    if name is None or name in own:
        return
    try:
        llama_chat_format.get_chat_completion_handler(name)
    except llama_chat_format.LlamaChatCompletionHandlerNotFoundException:
        known = sorted({*own, *llama_chat_format.LlamaChatCompletionHandlerRegistry._chat_handlers})
        raise SettingsError(f"chat_format is {name!r}, which is none", f"Take one of {', '.join(known)}.") from None


def overridden(header: GgufHeader, overrides: Mapping[str, Scalar] | None) -> GgufHeader:
    """The header as llama.cpp reads it with `kv_overrides`. It takes those that have the type of what they replace."""
    fitting = {
        key: value
        for key, value in (overrides or {}).items()
        if key not in header.metadata or type(header.metadata[key]) is type(value)
    }
    return replace(header, metadata=MappingProxyType({**header.metadata, **fitting})) if fitting else header
