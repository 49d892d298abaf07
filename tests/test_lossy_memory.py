"""The parts of the online memory: levels of pages, the online state, groups in few dimensions, the budget that
follows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import SettingsError
from kvtier.figures import LayerFigures
from kvtier.lossy.budget import WAIT_UP, ShareKeeper
from kvtier.lossy.compress import compress
from kvtier.lossy.levels import TOP_SHARE, Level, assign, ladder
from kvtier.lossy.online import OnlineState
from kvtier.lossy.streaming import StreamingCache, group_bytes, whole_groups
from kvtier.native.summary import SummaryGroup
from kvtier.settings import KVSettings

LAYER = LayerFigures(0, 0, 3, 64, 64, 32, 1, 4096, 128, 0, 0, 0, 0, 0)
SIZES = np.array([24640, 13120, 6976], np.int64)


def test_bytes_of_a_page() -> None:
    levels = ladder("f16", "f16", LAYER)
    assert [(level.fmt_k, level.fmt_v) for level in levels] == [
        ("f16", "f16"),
        ("q8_0", "q8_0"),
        ("q8_0", "q4_0"),
        ("q4_0", "q4_0"),
    ]
    assert levels[0].page_bytes(LAYER) == 3 * 32 * 64 * 2 * 2 + 64
    assert levels[1].page_bytes(LAYER) == 3 * 32 * 2 * 2 * 34 + 64
    assert ladder("q8_0", "q8_0", LAYER)[1:] == (Level("q8_0", "q4_0"), Level("q4_0", "q4_0"))
    assert ladder("q4_0", "f16", LAYER)[1:] == (Level("q4_0", "q4_0"),)  # nothing gains bits
    assert ladder("f16", "q4_0", LAYER)[1:] == (Level("q8_0", "q4_0"), Level("q4_0", "q4_0"))
    assert len(ladder("f16", "f16", LayerFigures(0, 0, 3, 40, 40, 32, 1, 4096, 128, 0, 0, 0, 0, 0))) == 1


@given(st.integers(0, 200), st.integers(0, 6_000_000), st.integers(0, 1000))
@settings(max_examples=200)
def test_what_is_assigned_fits_and_follows_what_is_wanted(n: int, room: int, seed: int) -> None:
    keep = np.random.default_rng(seed).random(n).astype(np.float32)
    level = assign(keep, SIZES, room)
    held = level < len(SIZES)
    assert int(SIZES[level[held]].sum()) <= room
    assert held.all() == (n * SIZES[-1] <= room) or n == 0
    order = np.argsort(-keep, kind="stable")
    assert (np.diff(level[order]) >= 0).all()  # nobody is better off than a page that is wanted more
    if not held.all():
        assert np.count_nonzero(level == len(SIZES) - 2) == int(TOP_SHARE * np.count_nonzero(held))
        assert level.min(initial=len(SIZES)) >= len(SIZES) - 2
    elif (
        n and level.max() > 0
    ):  # two levels at most, and too little is left for one more page to rise to the better one
        low = int(level.max())
        assert level.min() >= low - 1
        assert room - int(SIZES[level].sum()) < int(SIZES[low - 1] - SIZES[low])


def test_cells_hold_every_token_once() -> None:
    rng = np.random.default_rng(1)
    state = OnlineState(2, 8, 4, 16, spread=True)
    assert state.cells() is None
    keys, values = rng.normal(size=(500, 2, 8)).astype(np.float32), rng.normal(size=(500, 2, 4)).astype(np.float32)
    for first in range(0, 500, 25):
        state.add(keys[first : first + 25], values[first : first + 25])
    cells = state.cells()
    assert cells is not None and cells.key_var is not None
    count = np.exp(cells.log_count)
    assert count.sum(1) == pytest.approx([500, 500], rel=1e-4)
    for got, rows in ((cells.key, keys), (cells.value, values)):  # what all tokens sum to is kept
        mean = (got * count[:, :, None]).sum(1) / 500
        assert np.abs(mean - rows.mean(0)).max() < 5e-3
    within = (cells.key_var * count[:, :, None]).sum(1) / 500
    between = (np.square(cells.key) * count[:, :, None]).sum(1) / 500
    assert np.abs(within + between - np.square(keys).mean(0)).max() < 2e-2


def test_cells_answer_for_tokens_that_are_alike() -> None:
    """Tokens in as many clusters as there are cells: attention over the cells is attention over the tokens."""
    rng = np.random.default_rng(2)
    centres = rng.normal(size=(8, 16)).astype(np.float32) * 2
    which = rng.integers(0, 8, 400)
    keys = (centres[which] + 0.01 * rng.normal(size=(400, 16)))[:, None].astype(np.float32)
    values = (centres[which, :6] * 0.5)[:, None].astype(np.float32)
    state = OnlineState(1, 16, 6, 16)
    for first in range(0, 400, 32):
        state.add(keys[first : first + 32], values[first : first + 32])
    cells = state.cells()
    assert cells is not None
    q = rng.normal(size=16).astype(np.float32)

    def attend(scores: np.ndarray, rows: np.ndarray) -> np.ndarray:
        weights = np.exp(scores - scores.max())
        return weights @ rows / weights.sum()

    whole = attend(keys[:, 0] @ q, values[:, 0])
    summed = attend(cells.key[0] @ q + cells.log_count[0], cells.value[0])
    assert np.abs(whole - summed).max() < 0.02 * np.abs(whole).max()


@pytest.mark.parametrize("rank", [1, 8, 32])
def test_a_group_is_the_best_of_its_rank(rank: int) -> None:
    rng = np.random.default_rng(rank)
    rows = (rng.normal(size=(100, 32)) @ np.diag(0.8 ** np.arange(32)) @ rng.normal(size=(32, 32))).astype(np.float32)[
        :, None
    ]
    group = compress(rows, rows[:, :, ::-1], rank)
    ours = group.k_mean[:, None] + group.k_coord @ group.k_basis
    centred = rows[:, 0] - rows[:, 0].mean(0)
    singular = np.linalg.svd(centred, compute_uv=False)
    error = float(np.square(ours[0] - rows[:, 0]).sum())
    assert error == pytest.approx(float(np.square(singular[rank:]).sum()), rel=1e-2, abs=1e-2)


def test_the_lightest_groups_leave() -> None:
    def group(mass: float) -> SummaryGroup:
        rows = np.zeros((32, 1, 32), np.float32)
        return compress(rows, rows, 32, mass=mass)

    stream = StreamingCache(3)
    first = [group(0.5), group(0.1)]
    assert stream.with_new(first, np.zeros(0, np.float32)) == tuple(first)
    stream.n_groups = 2
    new = [group(0.3), group(0.05)]
    assert stream.with_new(new, np.array([0.2, 0.4], np.float32)) == (
        0,
        1,
        new[0],
    )  # as they are now, not as they began
    stream.n_groups = 3
    assert stream.with_new([], np.array([0.0, 0.1, 0.2], np.float32)) == (0, 1, 2)
    assert StreamingCache(0).with_new(new, np.zeros(0, np.float32)) == ()


def test_pages_leave_in_whole_groups() -> None:
    order = np.arange(20)
    assert whole_groups(order[:1], order).tolist() == list(range(8))
    assert whole_groups(order[:9], order).tolist() == list(range(16))
    assert whole_groups(order[:18], order).tolist() == list(range(18))  # no more to give


def test_what_a_group_takes() -> None:
    assert group_bytes(LAYER, 32) == 3 * (256 * 2 * 18 + 32 * 128 * 34 // 32 + 4 * 128 + 4 * 256)


def test_the_budget_falls_at_once_and_rises_slowly() -> None:
    gib = 1 << 30
    keeper = ShareKeeper(0.65, int(0.65 * 10 * gib))
    assert keeper.look(10 * gib, 0) == int(0.65 * 10 * gib)
    assert keeper.look(int(9.9 * gib), 0) == int(0.65 * 10 * gib)  # less than a step
    low = keeper.look(4 * gib, 0)
    assert low <= 0.65 * 4 * gib
    history = [keeper.look(10 * gib, 0) for _ in range(3 * WAIT_UP)]
    assert history[: WAIT_UP - 1] == [low] * (WAIT_UP - 1)
    steps = np.diff([low, *history])
    assert np.count_nonzero(steps) == 3 and steps.max() <= min(gib, 0.051 * history[-1])
    assert keeper.look(0, 0) == keeper.least


def test_shares_that_cannot_be() -> None:
    assert KVSettings(host="65%", fidelity="lossy").host_share == 0.65
    for text in ("0%", "1e-9%", "-5%", "100%", "x%", "%"):
        with pytest.raises(SettingsError, match="share"):
            KVSettings(host=text, fidelity="lossy")
    with pytest.raises(SettingsError, match="lossy"):
        KVSettings(host="65%")
