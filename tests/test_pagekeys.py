"""Norms and novelty of keys, against what the pages hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvtier import Llama
from kvtier.pagekeys import PageKeys

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
        assert np.flatnonzero(key_norm).tolist() == list(range(6))  # 200 tokens: six pages of 32 and the one being filled
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
