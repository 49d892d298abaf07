"""Option types and groups of options that several commands share. Every option is also a variable KVTIER_NAME."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..errors import UsageError
from ..formats import FORMATS
from ..model.plan import MAX_TOKENS
from ..settings import DEFAULT_EPS, KVSettings
from ..sizes import parse_bytes, parse_tokens

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # not generic before click 8.4


class TokensParam(ParamType):
    """A number of tokens: 8192, 32k, 1.5k."""

    name = "tokens"

    def __init__(self, most: int | None = None) -> None:
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            n_tokens = parse_tokens(value)
        except ValueError as err:
            self.fail(str(err), param, ctx)
        if self.most is not None and n_tokens > self.most:
            self.fail(f"'{value}' is {n_tokens:,} tokens: take at most {self.most:,}", param, ctx)
        return n_tokens


class BytesParam(ParamType):
    """A number of bytes: 2GiB, 512M."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_bytes(value)
        except ValueError as err:
            self.fail(str(err), param, ctx)


class BytesOrShareParam(BytesParam):
    """A number of bytes, or a share of free memory: 65%."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return (
            value.strip()
            if isinstance(value, str) and value.strip().endswith("%")
            else super().convert(value, param, ctx)
        )


class OneOfParam(ParamType):
    """One of a few names, in any case."""

    def __init__(self, name: str, names: tuple[str, ...]) -> None:
        self.name = name
        self.names = names

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if str(value).lower() not in self.names:
            self.fail(f"'{value}' is not one of {', '.join(self.names)}", param, ctx)
        return str(value).lower()


class FiniteRange(click.FloatRange):
    """A number that llama.cpp, which computes in 32 bits, can take: neither NaN nor infinite."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number) or abs(number) > MAX_FLOAT32:
            self.fail(f"'{value}' is not a finite 32-bit number: give a plain one, such as 0.5", param, ctx)
        return number


MAX_FLOAT32 = 3.4e38
TOKENS = TokensParam()
CONTEXT = TokensParam(MAX_TOKENS)
BATCH = click.IntRange(1, 1 << 20)
BYTES = BytesParam()
BYTES_OR_SHARE = BytesOrShareParam()
FORMAT = OneOfParam("format", FORMATS)


def option(*names: str, **attrs: Any) -> Callable[[F], F]:
    """click.option with the environment variable of its (last) long name, shown in the help."""
    long_name = [name for name in names if name.startswith("--")][-1].split("/")[0]
    return click.option(*names, envvar="KVTIER_" + long_name[2:].replace("-", "_").upper(), show_envvar=False, **attrs)


# one option each, of several commands
hf_repo_option = option(
    "-hf", "--hf-repo", metavar="REPO[:QUANT]", help="Take the model from a Hugging Face repository instead."
)
context_option = option(
    "-c",
    "--ctx",
    "--ctx-size",
    "n_ctx",
    type=CONTEXT,
    default="0",
    metavar="TOKENS",
    help="Context, e.g. 8192, 32k or 1.5k; 0: what the model was trained for.",
)
ubatch_option = option("-ub", "--ubatch-size", type=BATCH, default=512, help="Tokens computed together during prefill.")
text_option = option(
    "-f",
    "--file",
    "text_file",
    type=click.Path(path_type=Path),
    help="UTF-8 text.  [default: sources of Python's standard library]",
)


def not_utf8(what: str, byte: int, at: int) -> UsageError:
    """The error for text with a byte that UTF-8 does not have there."""
    return UsageError(
        f"{what} is not UTF-8 text: byte {byte:#04x} at offset {at:,}", "Convert it, for example with iconv -t utf-8."
    )


def require_utf8_path(path: object, what: str) -> None:
    """llama.cpp and our library take paths as UTF-8. Raises UsageError for another."""
    try:
        require_utf8(str(path), what)
    except UsageError as err:
        raise UsageError(err.message, "Rename it, or give a link to it that has a plain name.") from None


def require_utf8(text: str, what: str) -> None:
    """Python keeps bytes of arguments and of input that are no UTF-8 as lone surrogates.

    Raises UsageError if there are any.
    """
    try:
        text.encode()
    except UnicodeEncodeError as err:
        raise not_utf8(what, ord(text[err.start]) & 0xFF, len(os.fsencode(text[: err.start]))) from None


def not_ours(*names: str, why: str) -> Callable[[F], F]:
    """An option of llama.cpp's programs that has no choice here: with or without a value it is refused, and the reason
    said."""

    def refuse(_ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
        if value is not None:
            raise UsageError(f"{names[0]} is not an option here: {why}", f"Leave out {names[0]} and its value.")

    return click.option(
        *names, is_flag=False, flag_value="", default=None, hidden=True, expose_value=False, callback=refuse
    )


def kv_options(function: F) -> F:
    """The options that become KVSettings: see `kv_settings`."""
    for decorate in reversed(
        (
            option(
                "--kv-host",
                type=BYTES_OR_SHARE,
                metavar="BYTES",
                help="Budget of the cache in RAM, e.g. 2GiB; with lossy fidelity also a share of free memory, e.g. "
                "65%. [default: no limit]",
            ),
            option(
                "--kv-disk",
                type=BYTES,
                metavar="BYTES",
                help="Budget of the cache on disk, e.g. 20GiB. [default: no disk tier]",
            ),
            option(
                "--kv-dir",
                type=click.Path(path_type=Path),
                metavar="DIR",
                help="Directory of the disk tier; must exist. [default: the user's cache folder]",
            ),
            option(
                "--kv-host-type-k",
                type=FORMAT,
                metavar="FMT",
                help="Format of keys in RAM: f32 f16 bf16 q8_0 q4_0 q4_1. [default: -ctk; with bounded q8_0 without "
                "one]",
            ),
            option(
                "--kv-host-type-v",
                type=FORMAT,
                metavar="FMT",
                help="Format of values in RAM. [default: likewise, -ctv]",
            ),
            option("--kv-disk-type-k", type=FORMAT, metavar="FMT", help="Format of keys on disk. [default: as in RAM]"),
            option(
                "--kv-disk-type-v", type=FORMAT, metavar="FMT", help="Format of values on disk. [default: as in RAM]"
            ),
            option(
                "--fidelity",
                metavar="exact|bounded[:EPS]|lossy",
                help=f"bounded:EPS: a decode step may leave out values of at most EPS ({DEFAULT_EPS}) of the "
                "attention; lossy: what leaves RAM is gone. [default: exact]",
            ),
            option(
                "--kv-read-budget",
                type=TOKENS,
                metavar="TOKENS",
                help="With bounded: read at most so many values per KV head and step, even if EPS then is exceeded; "
                "at least 96, the first and newest pages.",
            ),
            option("--kv-page-tokens", type=int, metavar="N", help="Tokens per page, a multiple of 32. [default: 32]"),
            option(
                "--kv-io-threads",
                type=int,
                metavar="N",
                help="Workers for reads and writes of the disk tier. [default: 2]",
            ),
            option(
                "--kv-protect-first",
                type=int,
                metavar="PAGES",
                help="Pages at the start that stay in RAM (fewer, if the budget cannot hold them). [default: 1]",
            ),
            option(
                "--kv-protect-last",
                type=int,
                metavar="PAGES",
                help="Newest pages that stay in RAM, likewise. [default: 2]",
            ),
        )
    ):
        function = decorate(function)
    return function


def policy_option(function: F) -> F:
    """--policy: see `known_policy`."""
    return option(
        "--policy",
        metavar="NAME",
        help="Who decides which pages stay in RAM, with parameters after colons; docs/policies.md lists them.  "
        "[default: the least recently used leave; with --fidelity lossy adaptive]",
    )(function)


def known_policy(name: str | None) -> str | None:
    """The name, if there is such a policy. Raises UsageError that lists those that exist."""
    if name is not None:
        from ..policies.registry import create

        create(name)
    return name


def kv_settings(options: dict[str, Any]) -> KVSettings:
    """Take the options of `kv_options` out of `options`. Raises SettingsError."""
    names = (
        "host",
        "disk",
        "dir",
        "host_type_k",
        "host_type_v",
        "disk_type_k",
        "disk_type_v",
        "page_tokens",
        "io_threads",
        "protect_first",
        "protect_last",
        "read_budget",
    )
    values = {name: options.pop(f"kv_{name}") for name in names}
    return KVSettings(**values, fidelity=options.pop("fidelity"))
