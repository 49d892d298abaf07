"""`kvtier simulate TRACE`: what policies would have kept, and what they would have missed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError
from ..measuring.progress import StatusLine
from ..sizes import parse_share
from . import ui
from .options import ParamType, option

if TYPE_CHECKING:
    from ..simulator.run import Result


ALL = "all"


class SharesParam(ParamType):
    """A list of shares: "0.5,0.35,0.2" or "50%,20%"."""

    name = "shares"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            shares = tuple(parse_share(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"'{value}' is no list of shares such as 0.5,0.35,0.2", param, ctx)
        if not all(0 < share <= 1 for share in shares):
            self.fail(f"'{value}' has a share that is not above 0 and at most 1", param, ctx)
        return shares


@click.command("simulate", context_settings={"show_default": True})
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path))
@option(
    "--policy",
    "policies",
    metavar="NAMES",
    default=ALL,
    help="Policies, with commas between; 'oracle' knows the future.",
)
@option(
    "--keep",
    "keeps",
    type=SharesParam(),
    default="0.5,0.35,0.2",
    metavar="SHARES",
    help="Shares of the pages that RAM holds.",
)
@click.option(
    "--mode",
    type=click.Choice(["lossy", "disk"]),
    default="lossy",
    help="lossy: what leaves RAM is gone. disk: it can come back.",
)
@click.option("--every", type=click.IntRange(1, 4096), default=16, help="Steps from one plan to the next.")
@click.option("--warmup", type=click.IntRange(0), default=64, help="Steps before the budget holds, which do not count.")
@click.option("--seed", type=int, default=0, help="Seed of the policies.")
@click.option("--partial", is_flag=True, help="Use what is there of a trace that was cut short.")
@click.option("--per-step", is_flag=True, help="With --json: the figures of every step, too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def command(
    traces: tuple[Path, ...],
    policies: str,
    keeps: tuple[float, ...],
    mode: str,
    every: int,
    warmup: int,
    seed: int,
    partial: bool,
    per_step: bool,
    as_json: bool,
) -> None:
    """Run policies over recorded TRACES.

    For each policy and budget: the eviction hit rate (share of the attention mass that went to pages which had been
    evicted), the information recall (share on pages still held) and the worst recall over 64 steps in a row.
    """
    from ..simulator.run import Setting, compare, make
    from ..trace import read_trace

    if per_step and not as_json:
        raise UsageError(
            "the figures of every step (--per-step) do not fit a table", "Add --json, or leave --per-step out."
        )
    wanted = _wanted(policies)
    loaded = [read_trace(path, partial) for path in traces]
    for name in wanted:
        make(name, loaded[0])  # an unknown name is an error before anything is computed
    settings = [Setting(keep, mode == "lossy", every, warmup, seed) for keep in keeps]
    with StatusLine() as status:
        table = compare(loaded, wanted, settings, status)
    if as_json:
        ui.echo(
            json.dumps(
                [
                    _as_json(result, path, per_step)
                    for results in table
                    for result, path in zip(results, traces, strict=True)
                ]
            )
        )
        return
    ui.table(
        [_row(results) for results in table],
        header=("policy", "keep", "hit rate", "recall", "worst recall", "moved", "plan"),
        stderr=False,
    )


def _wanted(policies: str) -> list[str]:
    """The names in a list, each once. Raises UsageError if there are none."""
    from ..policies.registry import names
    from ..simulator.run import ORACLE

    known = (*names(), ORACLE)
    asked = [name.strip() for name in policies.split(",") if name.strip()]
    if not asked:
        raise UsageError("no policy is named", f"Policies: {', '.join(known)}; all is all of them.")
    return list(dict.fromkeys(name for word in asked for name in (known if word.lower() == ALL else (word,))))


def _as_json(result: Result, path: Path, per_step: bool) -> dict[str, Any]:
    values = asdict(result)
    steps = {name: values.pop(name).tolist() for name in ("hit_rates", "recalls")}
    return {"trace": str(path), **values, **(steps if per_step else {})}


def _row(results: list[Result]) -> tuple[str, ...]:
    """Means over the traces; the worst of all for the worst."""
    n = len(results)
    return (
        results[0].policy,
        f"{results[0].setting.keep:.0%}",
        f"{sum(r.eviction_hit_rate for r in results) / n:.2%}",
        f"{sum(r.recall for r in results) / n:.2%}",
        f"{min(r.worst_recall for r in results):.2%}",
        f"{sum(r.n_moved for r in results):,}",
        f"{max(r.plan_us for r in results):,.0f} us",
    )
