"""`kvtier plan MODEL`: what a context takes in memory and what fits here, from the file's header alone."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ..errors import UsageError
from ..machine import hardware
from ..model.gguf import read_model
from ..model.plan import BoundedBytes, CacheBytes, Machine, Plan, PlanRequest, command_line, make_plan, rope_words
from ..settings import KVSettings
from ..sizes import format_bytes
from . import ui
from .options import BATCH, FORMAT, context_option, hf_repo_option, option, ubatch_option


@click.command("plan", context_settings={"show_default": True})
@click.argument("model", required=False)
@hf_repo_option
@context_option
@option("-b", "--batch-size", type=BATCH, default=512, help="Most tokens that one call of llama.cpp gets.")
@ubatch_option
@option("-np", "--parallel", type=click.IntRange(1, 256), default=1, help="Sequences.")
@option(
    "-ctk",
    "--cache-type-k",
    type=FORMAT,
    default="f16",
    metavar="FMT",
    help="Cache type of keys: f32 f16 bf16 q8_0 q4_0 q4_1.",
)
@option("-ctv", "--cache-type-v", type=FORMAT, default="f16", metavar="FMT", help="Cache type of values.")
@option(
    "--kv-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Directory of the disk tier.  [default: the user's cache folder]",
)
@option("--kv-page-tokens", type=click.IntRange(32), default=32, metavar="N", help="Tokens per page, a multiple of 32.")
@option("--swa-full", is_flag=True, help="Keep the whole context in sliding-window layers too.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object with all figures, in bytes.")
def command(
    model: str | None, hf_repo: str | None, n_ctx: int, kv_dir: Path | None, as_json: bool, **options: Any
) -> None:
    """Compute what MODEL takes in memory, and how to run it here.

    MODEL is a path, or a name that `kvtier models` lists. Ways to run it that are not exact are offered where they
    help: --fidelity bounded at long contexts, and lossy where the cache does not fit in RAM.
    """
    if (model is None) == (hf_repo is None):
        raise UsageError(
            "no model is given" if model is None else "both a model and a repository (-hf) are given",
            "Name a .gguf file, a model of `kvtier models`, or a repository with -hf.",
        )
    request = PlanRequest(
        n_ctx=n_ctx,
        type_k=options["cache_type_k"],
        type_v=options["cache_type_v"],
        n_batch=options["batch_size"],
        n_ubatch=options["ubatch_size"],
        n_seq_max=options["parallel"],
        swa_full=options["swa_full"],
        page_tokens=options["kv_page_tokens"],
    )
    words = [model] if model is not None else ["-hf", hf_repo or ""]
    plan = make_plan(read_model(_find(model, hf_repo)), request, _machine(kv_dir), hardware.cpu_flags())
    commands = [
        command_line(words, plan, way, kv_dir, _as_asked(options) + rope_words(plan.shape, plan.request))
        for way in plan.options
    ]
    if as_json:
        ui.echo(json.dumps(_as_json(plan, words, commands), indent=2, default=str))
    else:
        _show(plan, commands, _title(plan, model))


def _title(plan: Plan, model: str | None) -> str:
    """The name that was asked for, where it is one of `kvtier models`, and what the file calls itself."""
    from ..model.table import known_models

    name, architecture = plan.shape.name, plan.shape.architecture
    return (
        f"{model} ({name}, {architecture})"
        if model in known_models() and not Path(model).is_file()
        else f"{name} ({architecture})"
    )


def _as_asked(options: dict[str, Any]) -> list[str]:
    """The options that `run` has too, as words, where they differ from its defaults."""
    words = []
    for name, option_name, default in (
        ("batch_size", "-b", 512),
        ("ubatch_size", "-ub", 512),
        ("kv_page_tokens", "--kv-page-tokens", 32),
    ):
        words += [option_name, str(options[name])] if options[name] != default else []
    return words + (["--swa-full"] if options["swa_full"] else [])


def _find(model: str | None, hf_repo: str | None) -> Path:
    from ..model.names import fetch_hf, resolve

    with ui.download_progress() as progress:
        return resolve(model, progress=progress) if model is not None else fetch_hf(hf_repo or "", progress=progress)


def _machine(kv_dir: Path | None) -> Machine:
    memory = hardware.memory()
    folder = KVSettings(disk=1, dir=kv_dir).disk_dir() or Path()
    existing = next((p for p in (folder, *folder.parents) if p.is_dir()), Path("/"))
    return Machine(memory.total_bytes, memory.available_bytes, folder, shutil.disk_usage(existing).free)


def _as_json(plan: Plan, model: list[str], commands: list[str]) -> dict[str, Any]:
    out = asdict(plan)
    out["model"] = " ".join(model)
    out["fixed_bytes"] = plan.fixed_bytes
    for option_out, words in zip(out["options"], commands, strict=True):
        option_out["command"] = words
    return out


def _show(plan: Plan, commands: list[str], title: str) -> None:
    shape = plan.shape
    sliding = sum(layer.slides for layer in shape.attention)
    kinds = [f"{len(shape.attention) - sliding} full"] if sliding < len(shape.attention) else []
    kinds += [f"{sliding} sliding over {shape.n_swa:,}"] if sliding else []
    kinds += [f"{shape.n_state_layers} recurrent"] if shape.n_state_layers else []
    ui.echo(f"{title}: trained for {shape.n_ctx_train:,} tokens")
    ui.echo(f"Layers with a cache: {', '.join(kinds) or 'none'}")
    ui.echo(f"Context: {plan.n_ctx:,} tokens, {plan.request.n_ubatch:,} at a time during prefill\n")
    rows = [("Weights", format_bytes(plan.weight_bytes))]
    rows += [("  of them repacked for this CPU", format_bytes(plan.repack_bytes))] if plan.repack_bytes else []
    rows += [("Compute buffer (estimate)", format_bytes(plan.compute_bytes))]
    rows += [
        ("Output buffer", format_bytes(plan.output_bytes)),
    ]
    rows += [("Recurrent state", format_bytes(plan.state_bytes))] if plan.state_bytes else []
    ui.table(rows, header=("Besides the KV cache", ""), stderr=False)
    if shape.attention:
        caches = [_cache_row(cache) for cache in plan.caches] + ([_bounded_row(plan.bounded)] if plan.bounded else [])
        ui.table(caches, header=("KV cache", "llama.cpp", "in pages", "longest in RAM"), stderr=False)
        if plan.bounded:
            ui.echo(
                f"Of a bounded cache, {format_bytes(plan.bounded.always_bytes)} (keys, means of values) never leave "
                "RAM.\n"
            )
    _show_machine(plan, commands)


def _cache_row(cache: CacheBytes) -> tuple[str, ...]:
    name = cache.type_k if cache.type_k == cache.type_v else f"{cache.type_k} / {cache.type_v}"
    if cache.cache_bytes is None or cache.page_bytes is None:
        return name, "-", "-", "head size"
    return name, format_bytes(cache.cache_bytes), format_bytes(cache.page_bytes), _longest(cache.n_ctx_in_ram)


def _bounded_row(bounded: BoundedBytes) -> tuple[str, ...]:
    return "bounded, q8_0", "-", format_bytes(bounded.always_bytes + bounded.page_bytes), _longest(bounded.n_ctx_in_ram)


def _longest(n_ctx: int | None) -> str:
    return f"{n_ctx:,} tokens" if n_ctx else "none"


def _show_machine(plan: Plan, commands: list[str]) -> None:
    machine = plan.machine
    if machine is not None:
        ui.echo(
            f"Here: {format_bytes(machine.ram_available_bytes)} of {format_bytes(machine.ram_bytes)} RAM free,"
            f" {format_bytes(machine.disk_free_bytes)} of disk free at\n  {machine.disk_dir}"
        )
    for warning in plan.warnings:
        ui.warn(warning)
    if not plan.options:
        longest = max((c.n_ctx_in_ram or 0 for c in plan.caches), default=0)
        ui.echo("It does not fit here." + (f" The longest context that does: {longest:,} tokens." if longest else ""))
    for way, words in zip(plan.options, commands, strict=True):
        ui.echo(
            f"\n{way.text[0].upper()}{way.text[1:]}, as "
            f"{way.type_k if way.type_k == way.type_v else f'{way.type_k} / {way.type_v}'}:"
        )
        ui.echo(f"  {words}")
