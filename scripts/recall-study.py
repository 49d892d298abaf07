"""What a decode step can leave unread, on a model's own queries, keys and values: the table of docs/recall.md.

    python scripts/recall-study.py MODEL.gguf -f TEXT [--prefix 7500] [--steps 16]

Runs the model on llama.cpp's own cache (F16), keeps queries, keys and values of every layer of some decode steps, and
then answers those queries in many ways: which form of the keys is scored, which values are read, what stands in for
the others. For each way it prints the bytes read (keys, values and what stays in memory for the choice) as a share of
F16 keys and values, the softmax probability of the values that were read, and the error of the output.

With --pages, the table of docs/lossy.md instead: what it costs to keep the half of the pages that is wanted least in
other forms.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import llama_cpp
import numpy as np
import numpy.typing as npt

from kvtier.measuring.config import rope_for

Array = npt.NDArray[np.float32]
PAGE = 32
ROTATED = 64  # channels
F16 = 2.0  # bytes

# Offsets of ggml_tensor's fields, and sizes of its shape, in bytes: checked against the tensor's own strides below.
_NE, _NB, _OP, _PARAMS, _SRC, _DATA = 16, 48, 80, 84, 152, 248


def _int64s(address: int, n: int) -> list[int]:
    return list((ctypes.c_int64 * n).from_address(address))


def _array(address: int) -> npt.NDArray[np.generic]:
    """A tensor [d, positions, heads] of F32 or F16 as a view [heads, positions, d]."""
    dtype = {0: np.float32, 1: np.float16}[ctypes.c_int32.from_address(address).value]
    ne, nb = _int64s(address + _NE, 3), _int64s(address + _NB, 3)
    assert nb[0] == np.dtype(dtype).itemsize, "ggml_tensor is laid out differently in this llama.cpp"
    n_bytes = sum((ne[i] - 1) * nb[i] for i in range(3)) + nb[0]
    raw = (ctypes.c_char * n_bytes).from_address(_int64s(address + _DATA, 1)[0])
    return np.lib.stride_tricks.as_strided(np.frombuffer(raw, dtype), ne, nb).transpose(2, 1, 0)


class Capture:
    """Queries of every decode step as lists by layer, and keys and values of the steps that `step` says: one after
    another."""

    def __init__(self) -> None:
        base = ctypes.CDLL(str(next((Path(llama_cpp.__file__).parent / "lib").glob("libggml-base.so"))))
        base.ggml_op_name.restype = ctypes.c_char_p
        self._attention = next(i for i in range(256) if base.ggml_op_name(i) == b"FLASH_ATTN_EXT")
        self.queries: list[list[Array]] = []
        self.keys: list[Array] = []
        self.values: list[Array] = []
        self.visible: list[npt.NDArray[np.bool_]] = []
        self.scale = 1.0  # of scores: a model may scale its queries itself
        self.on = self.with_keys = False
        self._layer = 0
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._see)

    def step(self, with_keys: bool) -> None:
        self.on, self.with_keys, self._layer = True, with_keys, 0

    def _see(self, tensor: ctypes.c_void_p | int, ask: bool, _user: object) -> bool:
        address = tensor if isinstance(tensor, int) else int(tensor.value or 0)
        if ctypes.c_int32.from_address(address + _OP).value != self._attention:
            return not ask
        if self.on and not ask:
            self.scale = ctypes.c_float.from_address(address + _PARAMS).value
            self._keep(*_int64s(address + _SRC, 4))
        return True

    def _keep(self, q: int, k: int, v: int, mask: int) -> None:
        if self._layer == len(self.queries):
            self.queries.append([])
        self.queries[self._layer].append(np.array(_array(q)[:, 0], np.float32))
        if self.with_keys:
            self.keys.append(np.array(_array(k), np.float32))
            self.values.append(np.array(_array(v), np.float32))
            self.visible.append(np.array(_array(mask)[0, 0] > -1.0))
        self._layer += 1


def capture(model_path: Path, text: str, n_prefix: int, n_steps: int, all_keys: bool = False) -> Capture:
    """Takes `n_steps` steps after `n_prefix` tokens, keys and values with the last one, or with all of them."""
    taken = Capture()
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(os.fsencode(model_path), llama_cpp.llama_model_default_params())
    assert model, f"llama.cpp could not load {model_path}"
    n_ctx = n_prefix + n_steps + PAGE
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_threads, params.n_threads_batch = n_ctx, 512, 2, 2
    params.flash_attn_type, params.swa_full, params.cb_eval = 1, False, taken.callback
    rope = rope_for(n_ctx, llama_cpp.llama_model_n_ctx_train(model))
    if rope.freq_scale:
        params.rope_scaling_type, params.rope_freq_scale = llama_cpp.LLAMA_ROPE_SCALING_TYPE_LINEAR, rope.freq_scale
    ctx = llama_cpp.llama_init_from_model(model, params)
    vocab, data = llama_cpp.llama_model_get_vocab(model), text.encode()
    tokens = (llama_cpp.llama_token * (len(data) + 16))()
    n = llama_cpp.llama_tokenize(vocab, data, len(data), tokens, len(tokens), True, False)
    assert n >= n_prefix + n_steps, f"the text has {n} tokens"
    batch = llama_cpp.llama_batch_init(512, 0, 1)

    def decode(first: int, end: int) -> None:
        batch.n_tokens = end - first
        for i in range(end - first):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = tokens[first + i], first + i, 1, 0
            batch.logits[i] = int(first + i == end - 1)
        assert llama_cpp.llama_decode(ctx, batch) == 0

    for first in range(0, n_prefix, 512):
        decode(first, min(first + 512, n_prefix))
    for i in range(n_steps):
        taken.step(all_keys or i == n_steps - 1)
        decode(n_prefix + i, n_prefix + i + 1)
    return taken


# --- forms of the keys: what is scored, and its bytes per channel


def _blocks(x: Array) -> Array:
    return x.reshape(*x.shape[:-1], -1, 32)


def _f16(x: Array) -> Array:
    return x.astype(np.float16).astype(np.float32)


def rotated(x: Array) -> Array:
    """The Walsh-Hadamard transform of every 64 channels, as llama.cpp has it before a quantized cache: no product
    changes."""
    h = np.ones((1, 1), np.float32)
    while len(h) < ROTATED:
        h = np.block([[h, h], [h, -h]]) / np.sqrt(np.float32(2))
    return np.asarray((x.reshape(*x.shape[:-1], -1, ROTATED) @ h).reshape(x.shape), np.float32)


def q8_0(x: Array) -> Array:
    b = _blocks(x)
    d = _f16(np.abs(b).max(-1, keepdims=True) / 127)
    return (np.round(b / np.where(d == 0, 1, d)) * d).reshape(x.shape)


def q4_0(x: Array) -> Array:
    b = _blocks(x)
    most = np.take_along_axis(b, np.abs(b).argmax(-1)[..., None], -1)
    d = _f16(most / -8)
    return ((np.clip(np.floor(b / np.where(d == 0, 1, d) + 8.5), 0, 15) - 8) * d).reshape(x.shape)


def two_bit(x: Array) -> Array:
    b = _blocks(x)
    low = _f16(b.min(-1, keepdims=True))
    d = _f16((b.max(-1, keepdims=True) - low) / 3)
    return (np.clip(np.round((b - low) / np.where(d == 0, 1, d)), 0, 3) * d + low).reshape(x.shape)


def product_quantized(x: Array) -> Array:
    """One byte for 4 channels: the nearest of 256 centroids per head and group of channels (8 rounds of k-means)."""
    out = np.empty_like(x)
    rng = np.random.default_rng(0)
    for head in range(x.shape[0]):
        for c in range(0, x.shape[2], 4):
            part = x[head, :, c : c + 4]
            centres = part[rng.choice(len(part), min(256, len(part)), replace=False)].copy()
            for _ in range(8):
                near = (((centres**2).sum(1) / 2)[None] - part @ centres.T).argmin(1)
                counts = np.bincount(near, minlength=len(centres))
                sums = np.stack([np.bincount(near, part[:, i], minlength=len(centres)) for i in range(4)], 1)
                centres[counts > 0] = (sums[counts > 0] / counts[counts > 0, None]).astype(np.float32)
            out[head, :, c : c + 4] = centres[near]
    return out


KEYS: dict[str, tuple[Callable[[Array], Array], float]] = {
    "f16": (lambda x: x, F16),
    "q8_0": (q8_0, 34 / 32),
    "q4_0": (q4_0, 18 / 32),
    "2-bit": (two_bit, 12 / 32),
    "product": (product_quantized, 1 / 4),
}

# --- which values are read: masks [n_head_kv, 1, n] from weights [n_head_kv, group, n]

Choice = Callable[[Array], npt.NDArray[np.bool_]]


def everything(p: Array) -> npt.NDArray[np.bool_]:
    return np.ones((p.shape[0], 1, p.shape[2]), bool)


def above(least: float) -> Choice:
    return lambda p: (p >= least).any(1, keepdims=True)


def mass(eps: float) -> Choice:
    """The heaviest tokens of each row until at most `eps` is left."""

    def choose(p: Array) -> npt.NDArray[np.bool_]:
        order = np.sort(p, -1)
        n_left = (np.cumsum(order, -1) <= eps).sum(-1, keepdims=True)
        return (p >= np.take_along_axis(order, np.minimum(n_left, p.shape[2] - 1), -1)).any(1, keepdims=True)

    return choose


def pages(eps: float) -> Choice:
    """As `mass`, by whole pages."""
    tokens = mass(eps)
    return lambda p: np.repeat(tokens(p.reshape(*p.shape[:2], -1, PAGE).sum(-1)), PAGE, -1)


CHOICES: dict[str, Choice] = {
    "all": everything,
    "p >= 1e-4": above(1e-4),
    "p >= 5e-4": above(5e-4),
    "mass 0.98": mass(0.02),
    "mass 0.95": mass(0.05),
    "mass 0.90": mass(0.10),
    "mass 0.80": mass(0.20),
    "pages, mass 0.95": pages(0.05),
    "pages, mass 0.90": pages(0.10),
}


def _softmax(scores: Array, visible: npt.NDArray[np.bool_]) -> Array:
    s = np.where(visible, scores, -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def droppable(q: Array, k: Array, scale: float, visible: npt.NDArray[np.bool_], eps: float) -> float:
    """Share of pages that the box bound proves to hold at most `eps` of each row together: they need no scores."""
    paged = k.reshape(k.shape[0], -1, PAGE, k.shape[2])
    lo, hi, centre = paged.min(2), paged.max(2), paged.mean(2)
    q = q * scale
    up = np.einsum("hgd,hpd->hgp", np.maximum(q, 0), hi) + np.einsum("hgd,hpd->hgp", np.minimum(q, 0), lo)
    seen = visible.reshape(-1, PAGE).all(-1)
    up = np.where(seen, up, -np.inf)
    down = np.where(seen, np.einsum("hgd,hpd->hgp", q, centre), -np.inf)
    top = up.max(-1, keepdims=True)
    most, least = np.exp(up - top), np.exp(down - top).sum(-1, keepdims=True)
    order = np.sort(most, -1)
    n = (np.cumsum(order, -1) <= eps * least).sum(-1, keepdims=True)
    drop = (most < np.take_along_axis(order, np.minimum(n, most.shape[2] - 1), -1)).all(1)
    return float((drop & seen).sum() / max(1, seen.sum() * k.shape[0]))


def ways() -> Iterator[tuple[str, str, str]]:
    """(keys, choice of values, stand-in for the others) of every row of the table."""
    for keys in KEYS:
        yield keys, "all", "none"
    for choice in list(CHOICES)[1:]:
        yield "q8_0", choice, "none"
        yield "q8_0", choice, "page mean"
    for keys in ("f16", "q4_0", "2-bit", "product"):
        yield keys, "mass 0.95", "page mean"
    for keys in ("q4_0", "product"):  # the chosen tokens are scored again with their full keys
        yield f"{keys} + f16", "mass 0.95", "page mean"
    for choice in ("mass 0.98", "mass 0.95", "mass 0.90"):
        yield "oracle", choice, "none"
        yield "oracle", choice, "page mean"


class Layer:
    """One layer at one step: the exact answer, and others' distance from it."""

    def __init__(
        self, q: Array, k: Array, v: Array, visible: npt.NDArray[np.bool_], forms: dict[str, Array], scale: float
    ) -> None:
        heads = k.shape[0]
        self.q, self.v, self.visible, self.scale = q.reshape(heads, -1, k.shape[2]), v, visible, scale
        self.forms = forms
        self.means = v.reshape(heads, -1, PAGE, v.shape[2]).mean(2)
        self.p = self.weights(k)
        self.out = np.einsum("hgn,hnd->hgd", self.p, v)
        self.norm = float(np.linalg.norm(self.out))
        self.n_seen = int(visible.sum())

    def weights(self, k: Array) -> Array:
        return _softmax(np.einsum("hgd,hnd->hgn", self.q, k) * self.scale, self.visible)

    def answer(self, keys: str, choice: str, stand_in: str) -> tuple[float, float, float]:
        """(bytes as a share of F16 keys and values, mass read, relative error of the output)"""
        base = keys.split(" ")[0]
        p = self.p if keys == "oracle" else self.weights(self.forms[base])
        read = CHOICES[choice](p)
        share = float((read & self.visible).sum() / (self.n_seen * read.shape[0]))
        key_bytes = F16 * share if keys == "oracle" else KEYS[base][1]
        kept = np.where(read, p, 0)
        left = np.where(read, 0, p)
        if keys.endswith(
            "+ f16"
        ):  # weights of what was read become exact, relative to one another and to the rest's estimate
            exact = np.where(read, self.p, 0)
            kept = exact * (kept.sum(-1, keepdims=True) / exact.sum(-1, keepdims=True))
            key_bytes += F16 * share
        out = np.einsum("hgn,hnd->hgd", kept, self.v)
        extra = 0.0
        if stand_in == "page mean":
            out = out + np.einsum("hgp,hpd->hgd", left.reshape(*left.shape[:2], -1, PAGE).sum(-1), self.means)
            extra = F16 / PAGE
        else:
            out = out / kept.sum(-1, keepdims=True)
        total = 2 * F16  # keys and values have the same number of channels here
        mass_read = float(np.where(read, self.p, 0).sum(-1).mean())
        return (key_bytes + F16 * share + extra) / total, mass_read, self.error(out)

    def error(self, out: Array) -> float:
        """Of another answer: the norm of the difference over that of the exact one."""
        return float(np.linalg.norm(out - self.out)) / self.norm


def study(taken: Capture) -> tuple[dict[tuple[str, str, str], Array], Array]:
    """Means of `Layer.answer` over layers without a window and steps, and the share of pages that bounds let be
    dropped, by eps."""
    longest = max(int(visible.sum()) for visible in taken.visible)
    rows: dict[tuple[str, str, str], list[tuple[float, float, float]]] = {way: [] for way in ways()}
    dropped = []
    for layer, queries in enumerate(taken.queries):
        if int(taken.visible[layer].sum()) < longest:
            continue  # a layer with a window: its cache is short whatever the context
        n = taken.keys[layer].shape[1] // PAGE * PAGE
        k, v, visible = taken.keys[layer][:, :n], taken.values[layer][:, :n], taken.visible[layer][:n]
        whole = visible.reshape(-1, PAGE).all(-1)  # whole pages only, without what a window hides
        keep = np.repeat(whole, PAGE)
        k, v, visible = k[:, keep], v[:, keep], visible[keep]
        forms = {name: form(k) for name, (form, _) in KEYS.items()}
        for q in queries:
            one = Layer(q, k, v, visible, forms, taken.scale)
            for way, found in rows.items():
                found.append(one.answer(*way))
            dropped.append([droppable(one.q, k, one.scale, visible, eps) for eps in (0.001, 0.01, 0.05)])
    means = {way: np.mean(found, 0, dtype=np.float32) for way, found in rows.items()}
    return means, np.mean(dropped, 0, dtype=np.float32)


# --- forms of whole pages, keys and values, that are kept instead of being dropped: what comes back, and bytes per
# token and KV head

GROUP = 256  # tokens that share a basis


def low_rank(rank: int, form: str) -> Callable[[Array], tuple[Array, float]]:
    """The best `rank` dimensions of each group and head around its mean; coordinates in `form`, basis in Q8_0."""
    store, n_bytes = KEYS[form]

    def keep(x: Array) -> tuple[Array, float]:
        out, d = np.empty_like(x), x.shape[2]
        for first in range(0, x.shape[1], GROUP):
            part = x[:, first : first + GROUP]
            mean = part.mean(1, keepdims=True)
            _, vectors = np.linalg.eigh((part - mean).transpose(0, 2, 1) @ (part - mean))
            basis = q8_0(np.ascontiguousarray(vectors[:, :, ::-1][:, :, :rank].transpose(0, 2, 1)))
            coordinates = (part - mean) @ basis.transpose(0, 2, 1)
            padded = np.zeros((*coordinates.shape[:2], -(-rank // 32) * 32), np.float32)
            padded[:, :, :rank] = coordinates
            out[:, first : first + GROUP] = mean + store(padded)[:, :, :rank] @ basis
        return out, rank * n_bytes + (rank * d * KEYS["q8_0"][1] + 4 * d) / GROUP

    return keep


def whole(form: str) -> Callable[[Array], tuple[Array, float]]:
    store, n_bytes = KEYS[form]
    return lambda x: (store(x), n_bytes * x.shape[2])


Form = Callable[[Array], tuple[Array, float]]
PAGES: dict[str, tuple[Form, Form]] = {
    "f16": (whole("f16"), whole("f16")),
    "q8_0": (whole("q8_0"), whole("q8_0")),
    "q8_0 keys, q4_0 values": (whole("q8_0"), whole("q4_0")),
    "q4_0": (whole("q4_0"), whole("q4_0")),
    "32 dimensions, q8_0": (low_rank(32, "q8_0"), low_rank(32, "q8_0")),
    "32 dimensions, q4_0": (low_rank(32, "q4_0"), low_rank(32, "q4_0")),
    "16 dimensions, q8_0": (low_rank(16, "q8_0"), low_rank(16, "q8_0")),
    "q4_0 keys, values in 16, q8_0": (whole("q4_0"), low_rank(16, "q8_0")),
}


def study_pages(taken: Capture) -> list[tuple[str, float, float]]:
    """(form, bytes per token and KV head, relative error of the output), means over layers without a window and
    steps."""
    longest = max(int(visible.sum()) for visible in taken.visible)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in (*PAGES, "dropped")}
    for layer, queries in enumerate(taken.queries):
        if int(taken.visible[layer].sum()) < longest:
            continue
        n = longest // PAGE * PAGE
        k, v = rotated(taken.keys[layer][:, :n]), rotated(taken.values[layer][:, :n])
        seen = np.ones(n, bool)
        steps = [Layer(rotated(q), k, v, seen, {}, taken.scale) for q in queries]
        mass_of = np.mean([step.p.mean((0, 1)) for step in steps], 0).reshape(-1, PAGE).sum(-1)
        light = np.repeat(mass_of <= np.median(mass_of), PAGE)
        for name, (of_keys, of_values) in PAGES.items():
            other_k, other_v = k.copy(), v.copy()
            other_k[:, light], k_bytes = of_keys(k[:, light])
            other_v[:, light], v_bytes = of_values(v[:, light])
            for step in steps:
                found[name].append(
                    (k_bytes + v_bytes, step.error(np.einsum("hgn,hnd->hgd", step.weights(other_k), other_v)))
                )
        for step in steps:
            kept = np.where(light, 0, step.p)
            found["dropped"].append((0.0, step.error(np.einsum("hgn,hnd->hgd", kept / kept.sum(-1, keepdims=True), v))))
    return [(name, *(float(x) for x in np.mean(values, 0))) for name, values in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("-f", "--file", type=Path, required=True, help="UTF-8 text")
    parser.add_argument("--prefix", type=int, default=7500, help="tokens in the cache")
    parser.add_argument("--steps", type=int, default=16, help="decode steps that are looked at")
    parser.add_argument("--pages", action="store_true", help="forms of pages that are wanted least, instead")
    args = parser.parse_args()
    taken = capture(args.model, args.file.read_text(encoding="utf-8"), args.prefix, args.steps)
    if args.pages:
        print("| half of the pages as | bytes per token and KV head | output error |")
        print("| --- | ---: | ---: |")
        for name, n_bytes, error in study_pages(taken):
            print(f"| {name} | {n_bytes:.0f} | {error:.4f} |")
        return
    means, dropped = study(taken)
    print("| keys scored | values read | stand-in | bytes of F16 | mass read | output error |")
    print("| --- | --- | --- | --- | --- | --- |")
    for (keys, choice, stand_in), (share, mass_read, error) in means.items():
        print(f"| {keys} | {choice} | {stand_in} | {100 * share:.1f} % | {mass_read:.3f} | {error:.4f} |")
    print()
    for eps, share in zip(("0.001", "0.01", "0.05"), dropped, strict=True):
        print(f"box bounds prove that {100 * share:.1f} % of the pages hold at most {eps} together")


if __name__ == "__main__":
    main()
