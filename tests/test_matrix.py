"""One matrix over policies, fidelities, formats and tiers: what each combination promises, on the real engine.

Exact: the same logits wherever pages are. Bounded: no row leaves out more than it may. All: budgets hold, every plan
    was
sound, and a run can be repeated bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.lossy.settings import MEMORY_POLICIES
from kvtier.measuring.config import Opening
from kvtier.measuring.engine import Engine
from kvtier.measuring.spec import parse_spec
from kvtier.policies.registry import BUILT_IN

from .texts import source_text

N_PROMPT, N_STEPS, N_CTX = 448, 32, 480
PAGE_BYTES = {
    "f16": 32 * 3 * 64 * 2 * 2,
    "q8_0": 32 * 3 * 64 * 2 * 34 // 32,
    "q4_0": 32 * 3 * 64 * 2 * 18 // 32,
}  # SmolLM2, keys and values
N_PAGES = 30 * ((N_PROMPT + N_STEPS + 31) // 32)

FIDELITIES = ("exact", "bounded:0.05", "lossy")
FORMATS = tuple(PAGE_BYTES)


@dataclass(frozen=True)
class Run:
    logits: npt.NDArray[np.float32]
    figures: dict[str, float]
    n_plans: int
    budget: int
    peak: int


def spec_of(fidelity: str, fmt: str, tier: str, folder: Path, policy: str = "") -> tuple[str, int]:
    """The configuration, and its host budget: about half of what the cache would take."""
    pages = N_PAGES * PAGE_BYTES[fmt]
    bounded = fidelity.startswith("bounded")
    cache = f"cache-v={fmt}" if bounded and fmt == "f16" else fmt  # compact keys beside wide values
    if tier == "host":
        return f"kvtier:{cache},fidelity={fidelity},host=1GiB", 1 << 30
    keys = 30 * 3 * (N_CTX + 32) * 68 * 2 if bounded else 0  # those of the whole context stay in RAM
    wide_lossy = fidelity == "lossy" and fmt == "f16"  # the protected pages stay wide, so the others lose most bits
    budget = keys + (pages * 5 // 8 if wide_lossy else pages // 2)
    disk = f",disk=256MiB,dir={folder}" if tier == "disk" else ""
    return f"kvtier:{cache},fidelity={fidelity},host={budget}{disk}" + (f",policy={policy}" if policy else ""), budget


def measure(model: Path, spec: str, budget: int) -> Run:
    engine = Engine(Opening(str(model), parse_spec(spec), N_CTX, 2, n_batch=64))
    try:
        tokens = engine.tokenize(source_text().encode())[: N_PROMPT + N_STEPS]
        engine.prefill(tokens[:N_PROMPT])
        logits = []
        for token in tokens[N_PROMPT:]:
            engine.decode((token,))
            logits.append(engine.logits())
        counts = engine.counts()
        return Run(np.stack(logits), counts, engine.n_plans(), budget, int(counts["peak_host_bytes"]))
    finally:
        engine.close()


@pytest.fixture(scope="module")
def exact(smollm2_path: Path) -> dict[str, Run]:
    """By format: every page in RAM, every page read."""
    return {fmt: measure(smollm2_path, *spec_of("exact", fmt, "host", Path())) for fmt in FORMATS}


def kl(reference: npt.NDArray[np.float32], logits: npt.NDArray[np.float32]) -> float:
    p, q = (x - x.max(-1, keepdims=True) for x in (reference.astype(float), logits.astype(float)))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def check(run: Run, fidelity: str, exact: Run, loses_bits: bool = False) -> None:
    assert np.isfinite(run.logits).all()
    assert run.peak <= run.budget
    if fidelity == "exact":
        assert np.array_equal(run.logits, exact.logits)
        assert run.figures["recall_rows"] == 0 and run.figures["n_gone"] == 0
    elif fidelity == "lossy":
        assert (run.figures["n_gone"] == 0) == loses_bits and run.figures["disk_writes"] == 0
        # half of the cache is gone: different, not garbage; with fewer bits all of it fits
        assert kl(exact.logits, run.logits) < (0.3 if loses_bits else 1.5)
    else:
        assert 0.0 < run.figures["max_omitted"] <= 0.05 + 1e-5
        assert run.figures["max_omitted"] <= run.figures["max_bound"]
        assert run.figures["tokens_read"] < run.figures["tokens_seen"]
        assert kl(exact.logits, run.logits) < 0.1


@pytest.mark.parametrize("policy", tuple(BUILT_IN))
@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_every_policy_with_every_fidelity(
    smollm2_path: Path, tmp_path: Path, exact: dict[str, Run], policy: str, fidelity: str
) -> None:
    tier = "gone" if fidelity == "lossy" else "disk"
    spec, budget = spec_of(fidelity, "f16", tier, tmp_path, policy)
    run = measure(smollm2_path, spec, budget)  # a policy that fails ends it with an error
    check(run, fidelity, exact["f16"], policy in MEMORY_POLICIES)
    assert run.n_plans >= 2


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("fidelity", "tier"), [*((f, t) for f in FIDELITIES[:2] for t in ("host", "disk")), ("lossy", "gone")]
)
def test_every_format_on_every_tier(
    smollm2_path: Path, tmp_path: Path, exact: dict[str, Run], fidelity: str, tier: str, fmt: str
) -> None:
    spec, budget = spec_of(fidelity, fmt, tier, tmp_path)
    run = measure(smollm2_path, spec, budget)
    if fidelity.startswith("bounded") and fmt == "f16":
        assert run.figures["k_bytes_read"] < exact[fmt].figures["k_bytes_read"]  # keys are compact there
    # a lossy run's policy is `adaptive`: half the bytes hold every page of F16 with fewer bits, and not every one of
    # Q8_0
    check(run, fidelity, exact[fmt], loses_bits=fmt == "f16")


@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_a_run_can_be_repeated(smollm2_path: Path, tmp_path: Path, fidelity: str) -> None:
    spec, budget = spec_of(fidelity, "f16", "gone" if fidelity == "lossy" else "host", tmp_path, "h2o")
    first, second = (measure(smollm2_path, spec, budget).logits for _ in range(2))
    assert np.array_equal(first, second)
