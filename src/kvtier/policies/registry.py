"""Policies by name: the built-in ones, and those that other packages register under the entry point group
kvtier.policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Final, cast

from ..errors import PolicyError, UsageError
from . import parameters
from .base import Policy

GROUP: Final = "kvtier.policies"
DEFAULT: Final = "lru"
LOSSY_DEFAULT: Final = "adaptive"  # where what leaves is gone

Factory = Callable[..., Policy]

# name: module and class. The names are what --policy takes.
BUILT_IN: Final[dict[str, tuple[str, str]]] = {
    "static": ("static", "Static"),
    "lru": ("lru", "Lru"),
    "sink_window": ("sink_window", "SinkWindow"),
    "h2o": ("h2o", "H2o"),
    "key_diversity": ("key_diversity", "KeyDiversity"),
    "retention": ("retention", "Retention"),
    "delta": ("delta", "Delta"),
    "adaptive": ("adaptive", "Adaptive"),
}


def names() -> tuple[str, ...]:
    """Every name that `create` knows, the built-in ones first. Third parties cannot replace these."""
    return (*BUILT_IN, *sorted(name for name in _third_party() if name not in BUILT_IN))


def create(text: str, seed: int = 0, others: Sequence[str] = ()) -> Policy:
    """A new policy from its name and, after colons, parameters (policies/parameters.py).

    `others` are names that the caller knows besides.

    Raises UsageError for an unknown name or parameter, PolicyError if a third party's cannot be made.
    """
    name, pairs = parameters.split(text)
    wanted = name.lower().replace("-", "_")
    if wanted in BUILT_IN:
        module, cls = BUILT_IN[wanted]
        return _make(wanted, cast(Factory, getattr(import_module(f".{module}", __package__), cls)), pairs, seed)
    third = _third_party()
    entry = third.get(name, third.get(wanted))
    if entry is None:
        raise UsageError(f"no policy is called '{name}'", f"Policies: {', '.join((*names(), *others))}.")
    try:
        policy = _make(entry.name, entry.load(), pairs, seed)
    except UsageError:
        raise
    except Exception as err:
        raise PolicyError(
            f"the policy '{entry.name}' of {entry.value} cannot be made: {type(err).__name__}: {err}"
        ) from err
    if not isinstance(policy, Policy):
        raise PolicyError(f"the policy '{entry.name}' of {entry.value} has no `name` or no `plan`")
    return policy


def _make(name: str, factory: Factory, pairs: Mapping[str, str], seed: int) -> Policy:
    values = parameters.parse(name, factory, pairs)
    make: Factory = getattr(factory, "from_parameters", factory)
    return make(seed=seed, **values)


def _third_party() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}
