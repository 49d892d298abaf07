"""Norms and novelty of keys, against what the pages hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvtier import Llama
from kvtier.native.pagekeys import PageKeys
from kvtier.settings import KVSettings

from .texts import source_text


def test_figures_are_those_of_the_pages(smollm2_path: Path) -> None:
    with Llama(str(smollm2_path), n_ctx=512, n_batch=256, n_ubatch=256, n_threads=1, verbose=False) as llm:
        llm.eval(llm.tokenize(source_text().encode())[:200])
        kv = llm.kv
        layer, tier = kv.layer(3).figures, kv.pages(3).tier
        few = PageKeys(kv, reads_per_look=4)
        norm, _, _ = few.look(layer, tier)
        assert np.count_nonzero(norm) == 4
        few.begin_look()
        key_norm, value_norm, novelty = few.look(layer, tier)
        assert np.flatnonzero(key_norm).tolist() == list(
            range(6)
        )  # 200 tokens: six pages of 32 and the one being filled
        means = []
        for page in range(6):
            keys, values = kv.read_page(layer, page)
            assert np.isclose(key_norm[page], np.linalg.norm(keys, axis=-1).mean())
            assert np.isclose(value_norm[page], np.linalg.norm(values, axis=-1).mean())
            mean = keys.mean(axis=0).reshape(-1)
            means.append(mean / np.linalg.norm(mean))
        centre = np.mean(means, axis=0)
        assert np.allclose(novelty[:6], [1 - mean @ centre / np.linalg.norm(centre) for mean in means], atol=1e-4)
        assert not novelty[6:].any()


def test_keys_apart_from_their_pages_are_read_too(smollm2_path: Path) -> None:
    def keys(fidelity: str) -> np.ndarray:
        settings = KVSettings(fidelity=fidelity, host_type_k="q8_0")
        with Llama(
            str(smollm2_path), n_ctx=512, n_batch=256, n_ubatch=256, n_threads=1, verbose=False, kv_settings=settings
        ) as llm:
            llm.eval(llm.tokenize(source_text().encode())[:200])
            return np.array(llm.kv.read_page(llm.kv.layer(0).figures, 2)[0])

    exact = keys("exact")
    assert np.abs(exact).max() > 0.1
    assert np.array_equal(keys("bounded:0.05"), exact)  # of the first layer: nothing was left out before it
