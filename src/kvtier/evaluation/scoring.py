"""Teacher forcing in the measuring process: a prefix in batches, then token by token."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..measuring.engine import Engine
from ..measuring.errors import MeasuringError
from .divergence import kl_divergence, log_softmax
from .exactmass import MassReader, MassWriter
from .readings import counts_between

_DECODE_STEP = 16


def score(
    engine: Engine,
    tokens: Sequence[int],
    n_prefix: int,
    n_tokens: int,
    reference: str,
    mass: str,
    write: bool,
    progress: Callable[[str, int, int], None],
) -> dict[str, Any]:
    """Feed `n_prefix` tokens in batches, then `n_tokens` more one at a time, and look at each step's distribution.

    `reference` is a raw file of float32 [n_tokens, n_vocab] logits: written if `write`, else compared with. The answer
    holds per-token lists: `kl` (nats), `same_top`, `nll` (nats), the seconds that prefix and decode took, and in
    `reading` what the engine counted over the decoded tokens. `mass` is the file of the reference's attention mass, see
    `exactmass`.
    """
    if len(tokens) < n_prefix + n_tokens + 1:
        raise MeasuringError(f"the text has {len(tokens)} tokens; {n_prefix} + {n_tokens} + 1 are needed")
    engine.clear()
    prefill_s = 0.0
    for at in range(0, n_prefix, engine.n_batch):
        progress("prefill", at, n_prefix)
        prefill_s += engine.prefill(tokens[at : min(at + engine.n_batch, n_prefix)])

    shape = (n_tokens, engine.n_vocab)
    table = np.memmap(reference, np.float32, "w+" if write else "r", shape=shape)
    kl, same_top, nll = np.zeros(n_tokens), np.ones(n_tokens, bool), np.zeros(n_tokens)
    decode_s = 0.0
    before, cells_before = engine.counts(), engine.cell_bytes()
    writer, reader = MassWriter(Path(mass), n_tokens), MassReader(Path(mass), n_tokens)
    for i in range(n_tokens):
        if i % _DECODE_STEP == 0:
            progress("decode", i, n_tokens)
        if not write:
            reader.before_step(engine)
        start = time.perf_counter()
        engine.decode((tokens[n_prefix + i],))
        decode_s += time.perf_counter() - start
        logits = engine.logits()
        nll[i] = -log_softmax(logits)[tokens[n_prefix + i + 1]]
        if write:
            table[i] = logits
            writer.after_step(engine)
        else:
            reader.after_step(engine)
            kl[i] = kl_divergence(table[i], logits)
            same_top[i] = int(np.argmax(table[i])) == int(np.argmax(logits))
    reading = counts_between(before, engine.counts())
    reading["cell_bytes"] = n_tokens * (cells_before + engine.cell_bytes()) / 2
    if reader.n_steps:
        reading.update(mass_steps=reader.n_steps, evicted_mass_sum=reader.evicted_sum, gone_mass_sum=reader.gone_sum)
    if write:
        table.flush()
        writer.close()
    return {
        "kl": kl.tolist(),
        "same_top": same_top.tolist(),
        "nll": nll.tolist(),
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "reading": reading,
    }
