"""What is left of a closed model: objects whose use raises ClosedError, where llama.cpp would read memory that is gone.

llama_cpp's objects keep the pointers of what they have freed, and hand them on. So once something is freed its Python
object changes its class, to one that refuses. This holds for every way to it, those of later llama_cpp releases
included: a method, a property, a bound method kept from before, a generator half-way, a tokenizer that was handed out.
An open model pays nothing for it.
"""

from __future__ import annotations

from functools import cache
from inspect import getattr_static
from typing import Any, Final, NoReturn

from ..errors import ClosedError

_HINT: Final = "Make a new Llama, or use this one before close() and inside its `with` block."

_FREE: Final = ("close", "kv", "placement")  # the last two are objects of ours, which refuse by themselves


def refuse_use(model: Any) -> None:
    """`model` is closed: methods and properties raise ClosedError, a second close() does nothing.

    What Python itself holds can still be read: attributes such as `metadata` and `model_path`, static methods.
    """
    if not isinstance(model, _ClosedModel):
        model.__class__ = _closed(type(model), _ClosedModel)  # type: ignore[arg-type]


def refuse_access(part: Any) -> None:
    """`part` of a model (its context, its batch, ...) has been freed: every attribute raises ClosedError."""
    if not isinstance(part, _ClosedPart):
        part.__class__ = _closed(type(part), _ClosedPart)  # type: ignore[arg-type]


@cache
def _closed(cls: type, refusal: type) -> type:
    return type(cls.__name__, (refusal, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _refuse(what: str) -> NoReturn:
    raise ClosedError(f"the model is closed, and {what} needs it", _HINT)


class _ClosedModel:
    def __getattribute__(self, name: str) -> Any:
        of_class = getattr_static(object.__getattribute__(self, "__class__"), name, None)
        is_free = (
            name.startswith("_")
            or name in _FREE
            or of_class is None
            or isinstance(of_class, staticmethod | classmethod)
            or name in object.__getattribute__(self, "__dict__")
        )
        return super().__getattribute__(name) if is_free else _refuse(f"{name}")

    def close(self) -> None:
        """Nothing is left to close."""

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("a completion")

    def __enter__(self) -> NoReturn:
        _refuse("a `with` block")

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        _refuse("a copy")


class _ClosedPart:
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name) if name == "close" or name.startswith("__") else _refuse(f"{name}")

    def close(self) -> None:
        """Nothing is left to close."""
