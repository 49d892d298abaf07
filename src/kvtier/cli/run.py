"""`kvtier run MODEL`: text from a model, with its KV cache in tiers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ContextLengthError, KvtierError, OutputError, UsageError
from ..settings import KVSettings
from . import ui
from .options import (
    BATCH,
    CONTEXT,
    FORMAT,
    FiniteRange,
    OneOfParam,
    context_option,
    hf_repo_option,
    known_policy,
    kv_options,
    kv_settings,
    not_ours,
    option,
    policy_option,
    require_utf8,
    require_utf8_path,
    ubatch_option,
)
from .signals import StopFlag, unless_hung_up
from .streaming import streaming
from .texts import read_file

if TYPE_CHECKING:
    from ..engine.generation import Generation, Sampling
    from ..engine.llama import Llama

_ROPE_SCALINGS = ("none", "linear", "yarn")
DEFAULT_N_PREDICT = 512


@dataclass(frozen=True, slots=True)
class _Job:
    """The command's arguments, checked."""

    path: Path
    n_ctx: int
    n_ctx_train: int
    settings: KVSettings
    type_k: str | None
    type_v: str | None
    n_threads: int | None
    n_batch: int
    n_ubatch: int
    rope: dict[str, Any]
    swa_full: bool
    verbose: bool
    policy: str | None
    same_bits: bool


@click.command("run", context_settings={"show_default": True})
@click.argument("model", required=False)
@option("-m", "--model", "model_option", metavar="MODEL", help="The same as the argument MODEL.")
@hf_repo_option
@context_option
@option("-p", "--prompt", help="The prompt.")
@option(
    "-f",
    "--file",
    type=click.Path(dir_okay=False, path_type=Path, allow_dash=True),
    help="A file with the prompt, UTF-8; - is standard input.",
)
@option(
    "--chat",
    is_flag=True,
    help="Put the prompt into the model's chat template. Without a prompt, on a terminal, this is a conversation.",
)
@option(
    "-n",
    "--n-predict",
    "--predict",
    "n_predict",
    type=click.IntRange(min=-1),
    help="Tokens to generate; -1: until the model ends or the context is full.  [default: 512, in a conversation -1]",
)
@option("--temp", type=FiniteRange(min=0), default=0.8, help="Temperature; 0: always the most probable token.")
@option("--top-k", type=click.IntRange(0, 0x7FFFFFFF), default=40, help="Choose among this many tokens; 0: all.")
@option("--top-p", type=FiniteRange(0, 1), default=0.95, help="Choose among tokens with this much probability.")
@option(
    "--min-p",
    type=FiniteRange(0, 1),
    default=0.05,
    help="Leave out tokens less probable than this share of the best.",
)
@option(
    "-s",
    "--seed",
    type=click.IntRange(-1, 0xFFFFFFFF),
    default=-1,
    help="Seed of the sampler; -1: another one each time.",
)
@option(
    "-t",
    "--threads",
    type=click.IntRange(1, 512),
    default=None,
    help="Threads, always so many.  [default: one per usable physical core, fewer while other programs are busy]",
)
@option(
    "-b",
    "--batch-size",
    type=BATCH,
    default=512,
    help="Most tokens that one call of llama.cpp gets; fewer with lossy fidelity and a small budget.",
)
@ubatch_option
@option(
    "-ctk",
    "--cache-type-k",
    type=FORMAT,
    default=None,
    metavar="FMT",
    help="Cache type of keys: f32 f16 bf16 q8_0 q4_0 q4_1.  [default: f16, with q8_0's rotation where pages are "
    "quantized]",
)
@option(
    "-ctv",
    "--cache-type-v",
    type=FORMAT,
    default=None,
    metavar="FMT",
    help="Cache type of values.  [default: likewise]",
)
@kv_options
@policy_option
@option(
    "--rope-scaling",
    type=OneOfParam("method", _ROPE_SCALINGS),
    metavar="METHOD",
    help="How positions beyond training are scaled: none, linear or yarn.",
)
@option(
    "--rope-scale",
    type=FiniteRange(1e-6, 1e6),
    metavar="X",
    help="Context is X times what the model was trained for.",
)
@option(
    "--rope-freq-base",
    type=FiniteRange(min=0, min_open=True),
    metavar="X",
    help="Base frequency of the positions.  [default: the model's]",
)
@option(
    "--yarn-orig-ctx",
    type=CONTEXT,
    metavar="TOKENS",
    help="Context that the model was trained for, with yarn.  [default: the model's]",
)
@option(
    "--swa-full",
    is_flag=True,
    help="Keep the whole context in sliding-window layers too, not only the window. A conversation always does.",
)
@option(
    "--same-bits",
    is_flag=True,
    help="One answer, however it is computed: equal logits for any batch size and number of threads. "
    "Prefill may be slower.",
)
@not_ours("-ngl", "--gpu-layers", "--n-gpu-layers", why="the caches of all layers are always kvtier's")
@not_ours("-fa", "--flash-attn", why="flash attention is always on")
@not_ours("-nkvo", "--no-kv-offload", why="the caches of all layers are always kvtier's")
@not_ours("-sm", "--split-mode", why="there is one device, kvtier's")
@not_ours("-ts", "--tensor-split", why="there is one device, kvtier's")
@not_ours("-mg", "--main-gpu", why="there is one device, kvtier's")
@option(
    "--live",
    is_flag=True,
    help="While text streams, show tiers, layers and what attention leaves out; needs a terminal.",
)
@option("--json", "as_json", is_flag=True, help="Print one JSON object with the text and all figures.")
@option(
    "-v", "--verbose", is_flag=True, help="Show llama.cpp's own log, and why the policy adaptive changes its preset."
)
def command(
    model: str | None,
    model_option: str | None,
    hf_repo: str | None,
    prompt: str | None,
    file: Path | None,
    chat: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Generate text with MODEL: a path, or a name that `kvtier models` lists.

    Without -p and -f this is a conversation on the terminal. Every option can also be given as an environment variable:
    --kv-host as KVTIER_KV_HOST, -c as KVTIER_CTX_SIZE.
    """
    model = _one_model(model, model_option)
    settings = kv_settings(options)
    if settings.fidelity == "lossy" and settings.host is None:
        ui.warn(
            "--fidelity lossy without a budget drops nothing: give one with --kv-host, such as 2GiB, or 65% of free "
            "memory"
        )
    options["policy"] = known_policy(options["policy"])
    require_utf8_path(model, "the model's path")
    require_utf8_path(settings.dir, "the directory of the disk tier")
    text = _prompt_text(prompt, file, as_json)
    with StopFlag() as stop:
        with stop.raising():
            path = _find_model(model, hf_repo)
        # a conversation takes back the end of its context, and the window then reaches further back than it did
        swa_full = options["swa_full"] or options["same_bits"] or text is None
        job = _job(path, settings, options, swa_full)
        sampling = _sampling(options, in_chat=text is None)
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")
        exit_code: int | None = None
        with unless_hung_up(stop):
            if text is None:
                from .chat import converse

                exit_code = converse(lambda: _load(job), sampling, stop, options["live"])
            else:
                exit_code = _complete(job, text, chat, sampling, stop, as_json, options["live"])
    sys.exit(stop.exit_code if exit_code is None else exit_code)


def _prompt_text(prompt: str | None, file: Path | None, as_json: bool) -> str | None:
    """The prompt, or None for a conversation."""
    if prompt is not None and file is not None:
        raise UsageError("both a prompt (-p) and a file (-f) are given", "Give one of them.")
    if file is not None:
        return read_file(file, "the prompt file", "Check the path given with -f.")
    if prompt is not None:
        require_utf8(prompt, "the prompt")
    if prompt is None and (as_json or not sys.stdin.isatty()):
        raise UsageError(
            "there is no prompt, and no terminal for a conversation",
            "Give one with -p TEXT or -f FILE; -f - reads standard input.",
        )
    return prompt


def _one_model(argument: str | None, option: str | None) -> str | None:
    """The model named either way; of KVTIER_MODEL and the argument, the argument."""
    source = click.get_current_context().get_parameter_source("model_option")
    if argument is not None and option is not None and source is click.core.ParameterSource.COMMANDLINE:
        raise UsageError(f"two models are given: {argument}, and {option} with -m", "Give one of them.")
    return argument if argument is not None else option


def _find_model(model: str | None, hf_repo: str | None) -> Path:
    from ..model.names import fetch_hf, resolve

    if (model is None) == (hf_repo is None):
        raise UsageError(
            "no model is given"
            if model is None
            else f"both a model ({model}) and a repository (-hf {hf_repo}) are given",
            "Name a .gguf file, a model of `kvtier models`, or a repository with -hf.",
        )
    with ui.download_progress() as progress:
        return (
            fetch_hf(hf_repo, progress=progress)
            if model is None and hf_repo is not None
            else resolve(model or "", progress=progress)
        )


def _job(path: Path, settings: KVSettings, options: dict[str, Any], swa_full: bool) -> _Job:
    from ..model import gguf

    header = gguf.read_model(path)[0]  # before llama.cpp sees the file
    n_ctx_train = header.get_int(header.arch_key("context_length"), 0) or 0
    rope = _rope(options)
    if n_ctx_train and options["n_ctx"] > n_ctx_train and not rope:
        times = format(options["n_ctx"] / n_ctx_train, ",.1f").removesuffix(".0")
        factor = -(-options["n_ctx"] // n_ctx_train)
        ui.warn(
            f"the context of {options['n_ctx']:,} tokens is {times} times what the model was trained for "
            f"({n_ctx_train:,}): beyond that its text falls apart. "
            f"To stretch its positions: --rope-scaling yarn --rope-scale {factor}"
        )
    return _Job(
        path,
        options["n_ctx"],
        n_ctx_train,
        settings,
        options["cache_type_k"],
        options["cache_type_v"],
        options["threads"],
        options["batch_size"],
        options["ubatch_size"],
        rope,
        swa_full,
        options["verbose"],
        options["policy"],
        options["same_bits"],
    )


def _rope(options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of llama_cpp.Llama for the options that were given."""
    rope: dict[str, Any] = {}
    if options["rope_scaling"] is not None:
        rope["rope_scaling_type"] = _ROPE_SCALINGS.index(options["rope_scaling"])
    if options["rope_scale"] is not None:
        rope["rope_freq_scale"] = 1 / options["rope_scale"]
    if options["rope_freq_base"] is not None:
        rope["rope_freq_base"] = options["rope_freq_base"]
    if options["yarn_orig_ctx"] is not None:
        rope["yarn_orig_ctx"] = options["yarn_orig_ctx"]
    return rope


def _sampling(options: dict[str, Any], in_chat: bool) -> Sampling:
    from ..engine.generation import RANDOM_SEED, Sampling

    n_predict = options["n_predict"]
    if n_predict is None:
        n_predict = -1 if in_chat else DEFAULT_N_PREDICT
    seed = RANDOM_SEED if options["seed"] == -1 else options["seed"]
    return Sampling(n_predict, options["temp"], options["top_k"], options["top_p"], options["min_p"], seed)


def _load(job: _Job) -> Llama:
    from ..engine.llama import Llama
    from ..native import runtime

    runtime.log.muted = not job.verbose
    ui.show_log_of("kvtier.engine.pace")
    ui.show_log_of("kvtier.placement")
    ui.show_log_of("kvtier.policies", verbose=job.verbose)
    return Llama(
        str(job.path),
        n_ctx=job.n_ctx,
        n_batch=job.n_batch,
        n_ubatch=job.n_ubatch,
        n_threads=job.n_threads,
        n_threads_batch=job.n_threads,
        type_k=job.type_k,
        type_v=job.type_v,
        kv_settings=job.settings,
        policy=job.policy,
        swa_full=job.swa_full,
        same_bits=job.same_bits,
        verbose=job.verbose,
        **job.rope,
    )


def _complete(job: _Job, text: str, chat: bool, sampling: Sampling, stop: StopFlag, as_json: bool, live: bool) -> int:
    """One prompt, one answer. Returns the exit code."""
    from ..engine.generation import Generation
    from .report import RunReport

    start = time.perf_counter()
    with _load(job) as llm:
        load_s = time.perf_counter() - start
        tokens = _tokens(llm, text, chat)
        try:
            generation = Generation(llm, tokens, sampling, stop)
        except ContextLengthError as err:
            raise _too_long(err, job) from None
        answer: list[str] = []
        try:
            _show(generation, answer, lambda: streaming(llm, generation, stop, as_json, live))
        except OutputError:
            raise
        except KvtierError:
            if answer and not as_json:
                ui.echo()
            raise
        report = RunReport(
            str(job.path),
            llm.n_ctx(),
            job.n_ctx_train,
            llm.kv.n_layers,
            load_s,
            generation.timing(),
            llm.kv.figures,
            llm.placement.figures if llm.placement is not None else None,
            llm.threads,
        )
    if as_json:
        ui.echo(json.dumps(report.as_json("".join(answer)), ensure_ascii=False))
    else:
        if answer:
            ui.echo()
        ui.table(report.rows())
    return stop.exit_code


def _tokens(llm: Llama, text: str, chat: bool) -> list[int]:
    from ..engine.chat import ChatTemplate, Message

    tokens = (
        ChatTemplate(llm).tokens([Message("user", text)])
        if chat
        else llm.tokenize(text.encode(), add_bos=True, special=True)
    )
    if not tokens:
        raise UsageError("the prompt is empty", "Give some text with -p or -f.")
    return tokens


def _too_long(err: ContextLengthError, job: _Job) -> ContextLengthError:
    n_wanted = err.n_tokens + DEFAULT_N_PREDICT
    hint = f"Shorten the prompt, or give a larger context: -c {n_wanted}."
    if 0 < job.n_ctx_train < n_wanted:
        factor = -(-n_wanted // job.n_ctx_train)
        hint += f" The model was trained for {job.n_ctx_train:,}: add --rope-scaling yarn --rope-scale {factor}."
    return ContextLengthError(err.n_tokens, err.n_ctx, hint)


def _show(
    generation: Generation, answer: list[str], output: Callable[[], AbstractContextManager[Callable[[str], None]]]
) -> None:
    """Run a generation: progress while it reads the prompt, then its text piece by piece, also kept in `answer`."""
    with ui.prefill_progress() as progress:
        if not generation.prefill(progress):
            return
    with output() as write:
        for piece in generation.decode():
            answer.append(piece)
            write(piece)
