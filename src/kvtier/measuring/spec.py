"""Configurations as people write them, for example `kvtier:q8_0,host=64MiB,disk=1GiB` or `stock:f16`.

Before the colon stands the engine, after it are settings with commas between them. A setting without a key is the
cache type. For kvtier every field of KVSettings is a key, with dashes for underscores and without a leading `kv-`;
`policy` names who places the pages. `keep` is a host budget as a share of what the text's cache takes in F16; with
lossy fidelity the fields of MemorySettings are keys, too.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Final, get_args, get_type_hints

from ..errors import KvtierError, SettingsError, UsageError
from ..lossy.settings import MemorySettings, memory_for
from ..model.cachetypes import AUTO, GGML_TYPES
from ..policies.registry import LOSSY_DEFAULT
from ..policies.registry import create as create_policy
from ..settings import LEAST_SHARE, KVSettings
from ..sizes import parse_share, parse_tokens
from .config import Configuration, EngineName

ENGINES: Final[tuple[EngineName, ...]] = get_args(EngineName)
CACHE_KEYS: Final = ("cache", "cache-k", "cache-v")
POLICY_KEY: Final = "policy"
KEEP_KEY: Final = "keep"
STOCK_KEYS: Final = (*CACHE_KEYS, "flash-attn")
_BYTES: Final = ("host", "disk")  # KVSettings understands their text
_SHORT: Final = {"host-k": "host-type-k", "host-v": "host-type-v", "disk-k": "disk-type-k", "disk-v": "disk-type-v"}
_SWITCH: Final = {"on": True, "off": False}


class SpecError(UsageError):
    """A configuration that cannot be read; says which part of it, and what is allowed there."""


def setting_keys() -> dict[str, str]:
    """Every key of kvtier's settings, and the field of KVSettings that it sets."""
    return {field.name.removeprefix("kv_").replace("_", "-"): field.name for field in fields(KVSettings)}


def memory_keys() -> dict[str, str]:
    """Every key of the online memory's settings, and its field."""
    return {field.name.replace("_", "-"): field.name for field in fields(MemorySettings)}


def parse_spec(text: str) -> Configuration:
    """The configuration that `text` describes, named by it. Raises SpecError."""
    spec = text.strip()
    engine, colon, rest = spec.partition(":")
    if engine not in ENGINES or not colon:
        raise SpecError(
            f"{text!r} is no configuration: it must begin with {' or '.join(f'{name}:' for name in ENGINES)}",
            "For example stock:q8_0, or kvtier:f16,host=64MiB,disk=1GiB.",
        )
    pairs = _pairs(
        spec,
        rest,
        STOCK_KEYS if engine == "stock" else (*CACHE_KEYS, *setting_keys(), *memory_keys(), KEEP_KEY, POLICY_KEY),
    )
    if not pairs:
        raise SpecError(
            f"{text!r} has nothing after the colon", "For example stock:q8_0, or kvtier:f16,host=64MiB,disk=1GiB."
        )
    policy = pairs.pop(POLICY_KEY, "")
    keep = pairs.pop(KEEP_KEY, "")
    parts = {name: pairs.pop(key) for key, name in memory_keys().items() if key in pairs}
    asked = _cache_types(spec, pairs)
    try:
        if engine == "stock":
            flash_attn = _switch(pairs.get("flash-attn", "on"))
            return Configuration(spec, "stock", asked[0] or "f16", asked[1] or "f16", flash_attn)
        share = _share(keep, pairs) if keep else 0.0
        settings = _settings(spec, pairs).with_cache_types(*asked)
        if keep and settings.disk is None and settings.fidelity != "lossy":
            raise SettingsError(
                f"keep is '{keep}', and the rest of the cache has nowhere to go",
                "Add fidelity=lossy or disk=BYTES, or leave keep out.",
            )
        if settings.fidelity == "lossy":
            policy = policy or LOSSY_DEFAULT  # as a run has it
        base = create_policy(policy).name if policy else ""  # an unknown one is an error here
        memory = _memory(spec, memory_for(base), parts, settings) if parts else None
        type_k, type_v = (AUTO if kind is None else "f16" if kind == "f32" else kind for kind in asked)
        return Configuration(
            spec, "kvtier", type_k, type_v, settings=settings.to_native(), policy=policy, keep=share, memory=memory
        )
    except SpecError:
        raise
    except (KvtierError, ValueError) as error:
        message, hint = (error.message, error.hint) if isinstance(error, KvtierError) else (str(error), "")
        raise SpecError(f"{spec}: {message}", hint) from None


def _pairs(spec: str, rest: str, allowed: tuple[str, ...]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            key, value = "cache", part
        key = key.strip().lower().replace("_", "-")
        key = _SHORT.get(key, key) if _SHORT.get(key) in allowed else key
        if key not in allowed:
            raise SpecError(f"{spec}: there is no setting {key!r}", f"Settings: {', '.join(allowed)}.")
        if key in pairs:
            raise SpecError(f"{spec}: {key} is given twice", "Leave one of them out.")
        if not value.strip():
            raise SpecError(f"{spec}: {key} has no value", f"Write {key}=VALUE, or leave it out.")
        pairs[key] = value.strip()
    return pairs


def _cache_types(spec: str, pairs: dict[str, str]) -> tuple[str | None, str | None]:
    """Types of keys and values, None where none is named."""
    both = pairs.get("cache")
    kinds = [pairs.get(key, both) for key in ("cache-k", "cache-v")]
    for kind in kinds:
        if kind is not None and kind.lower() not in GGML_TYPES:
            raise SpecError(f"{spec}: {kind!r} is no cache type", f"Cache types: {', '.join(GGML_TYPES)}.")
    k, v = (kind and kind.lower() for kind in kinds)
    return k, v


def _settings(spec: str, pairs: dict[str, str]) -> KVSettings:
    keys, hints = setting_keys(), get_type_hints(KVSettings)
    values: dict[str, Any] = {}
    for key, text in pairs.items():
        if key in CACHE_KEYS:
            continue
        name = keys[key]
        try:
            values[name] = _value(name, hints[name], text)
        except ValueError as error:
            raise SpecError(f"{spec}: {key}: {error}") from None
    return KVSettings(**values)


def _share(text: str, pairs: dict[str, str]) -> float:
    """What `keep` says. Raises SettingsError."""
    if "host" in pairs:
        raise SettingsError("keep and host both say what the RAM tier may take", "Leave one of them out.")
    try:
        share = parse_share(text)
    except ValueError:
        share = 0.0
    if not LEAST_SHARE <= share <= 1.0:
        raise SettingsError(f"keep is '{text}', which is no share of a cache from 1% to 100%", "Take for example 20%.")
    return share


def _memory(spec: str, memory: MemorySettings, parts: dict[str, str], settings: KVSettings) -> MemorySettings:
    if settings.fidelity != "lossy":
        raise SpecError(f"{spec}: {', '.join(parts)} is for lossy fidelity", "Add fidelity=lossy, or leave it out.")
    hints = get_type_hints(MemorySettings)
    return replace(memory, **{name: _value(name, hints[name], text) for name, text in parts.items()})


def _value(name: str, hint: Any, text: str) -> Any:
    """`text` as the type of a field. Raises ValueError."""
    kinds = get_args(hint) or (hint,)
    if name in _BYTES or str in kinds:
        return text
    if bool in kinds:
        return _switch(text)
    if int in kinds:
        return parse_tokens(text)
    return float(text) if float in kinds else text


def _switch(text: str) -> bool:
    if text.lower() not in _SWITCH:
        raise ValueError(f"{text!r} is neither on nor off")
    return _SWITCH[text.lower()]
