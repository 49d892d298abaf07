"""What a model's cache looks like, from its GGUF header: which layer keeps what for how many tokens.

The rules follow llama.cpp at the pinned version: its hyper-parameters (`src/llama-hparams.*`, `src/models/*.cpp`) say
which layers slide, recur or share; its caches (`src/llama-kv-cache*.cpp`, `src/llama-memory-recurrent.cpp`) say how
many cells each gets. Architectures not named in the tables below are plain attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..errors import GgufError
from .header import ArrayInfo, GgufHeader

_MAX_LAYERS: Final = 512
_MAX_FIGURE: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class _Slide:
    """How an architecture's sliding-window layers are arranged when the file has no per-layer array.

    Of every `every` layers one is full (the first of them if `full_first`, else the last); 0: the file must say.
    `window` is used when the file names none; `forced` whatever the file says. `optional`: without a window in the file
    nothing slides.
    """

    every: int
    full_first: bool = False
    window: int | None = None
    forced: bool = False
    optional: bool = False


_SLIDES: Final[Mapping[str, _Slide]] = {
    "afmoe": _Slide(4, optional=True),
    "cohere2": _Slide(4),
    "cohere2moe": _Slide(4, full_first=True),
    "exaone4": _Slide(4, window=4096),
    "exaone-moe": _Slide(4, window=128),
    "gemma2": _Slide(2, window=4096),
    "gemma3": _Slide(6, optional=True),
    "gemma3n": _Slide(5),
    "gemma4": _Slide(0),
    "gemma4-assistant": _Slide(0),
    "gpt-oss": _Slide(2),
    "granite_swa": _Slide(0),
    "laguna": _Slide(4, full_first=True, optional=True),
    "llama4": _Slide(4, window=8192, forced=True),
    "maple": _Slide(0),
    "mellum": _Slide(4, optional=True),
    "mimo2": _Slide(0),
    "muse-glimmer": _Slide(4),
    "olmo2": _Slide(4, optional=True),
    "plamo3": _Slide(8, optional=True),
    "smallthinker": _Slide(4, full_first=True, window=4096, forced=True, optional=True),
    "spark2_5": _Slide(0),
    "step35": _Slide(0),
    "dots3note": _Slide(0),
}

_NO_CACHE: Final = frozenset(
    {
        "bert",
        "jina-bert-v2",
        "jina-bert-v3",
        "nomic-bert",
        "nomic-bert-moe",
        "neo-bert",
        "eurobert",
        "wavtokenizer-dec",
        "modern-bert",
        "gemma-embedding",
        "dream",
        "llada",
        "llada-moe",
        "rnd1",
        "clip",
        "t5encoder",
    }
)
_RECURRENT: Final = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
_STATE_WHERE_NO_KV_HEADS: Final = frozenset(
    {
        "jamba",
        "granitehybrid",
        "kimi-linear",
        "kimi-k3",
        "lfm2",
        "lfm2moe",
        "plamo2",
        "bailingmoe3",
        "glm5-next",
    }
)
_STATE_WHERE_NO_KV_HEADS_NOR_FFN: Final = frozenset({"nemotron_h", "nemotron_h_moe"})
_FULL_EVERY: Final[Mapping[str, int]] = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4, "minimax-01": 8}
_BOTH_IN_EVERY_LAYER: Final = frozenset({"falcon-h1"})
_INDEXER_LAYERS: Final = frozenset(
    {"deepseek32", "glm-dsa", "glm5-next", "hy_v4", "dots3note", "qwen4exp", "minimax-m3"}
)
_ONLY_ROUGHLY: Final = frozenset({"deepseek4", "dflash", "eagle3", "gemma4-assistant"}) | _INDEXER_LAYERS


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """A layer with keys and values in the cache. `d_v` is 0 where V is a view of K (MLA)."""

    index: int
    n_head_kv: int
    d_k: int
    d_v: int
    slides: bool
    indexer: bool = False  # a small extra cache of indexer keys, not a layer of its own


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The figures of a model that decide what it takes in memory.

    `state_items` are the F32 numbers of recurrent state per sequence over all layers. `n_swa` is 0 without a sliding
    window. `notes` say where the figures are only approximate.
    """

    architecture: str
    name: str
    n_ctx_train: int
    n_vocab: int
    n_embd: int
    n_ff: int
    n_layer: int
    n_head: int
    n_swa: int
    attention: tuple[AttentionLayer, ...]
    n_state_layers: int
    state_items: int
    notes: tuple[str, ...] = ()


def shape_of(header: GgufHeader) -> ModelShape:
    """The shape of the model whose (first) file has this header.

    Raises GgufError if it lacks what a language model has.
    """
    arch = header.architecture
    n_layer_all = _positive(header, "block_count", most=_MAX_LAYERS)
    n_layer = n_layer_all - (
        _get(header, "nextn_predict_layers") or 0
    )  # draft heads have a cache of their own, when they are used
    if n_layer <= 0:
        n_layer = n_layer_all
    n_embd = _positive(header, "embedding_length")
    heads = _per_layer(header, "attention.head_count", n_layer, 0)
    heads_kv = _per_layer(header, "attention.head_count_kv", n_layer, heads)
    ffn = _per_layer(header, "feed_forward_length", n_layer, 0)
    states = _state_layers(header, arch, heads_kv, ffn)
    n_swa, slides = _sliding(header, arch, n_layer, states)
    attention = _attention_layers(header, arch, n_embd, heads, heads_kv, ffn, states, slides)
    n_state_layers = sum(states)
    return ModelShape(
        architecture=arch,
        name=header.get_str("general.name") or header.path.stem,
        n_ctx_train=_get(header, "context_length") or 0,
        n_vocab=_n_vocab(header),
        n_embd=n_embd,
        n_ff=max(ffn),
        n_layer=n_layer,
        n_head=max(heads),
        n_swa=n_swa if any(slides) else 0,
        attention=attention,
        n_state_layers=n_state_layers,
        state_items=n_state_layers * _state_items(header, arch, n_embd, heads[0]),
        notes=(f"{arch} keeps further caches that are counted only roughly",) if arch in _ONLY_ROUGHLY else (),
    )


def _get(header: GgufHeader, suffix: str) -> int | None:
    """A figure of the model, None if the file does not give it. Raises GgufError for one that no model has."""
    key = header.arch_key(suffix)
    value = header.get_int(key)
    if value is not None and not 0 <= value <= _MAX_FIGURE:
        raise _impossible(header, key, value)
    return value


def _impossible(header: GgufHeader, key: str, value: int) -> GgufError:
    return GgufError(
        header.path,
        header.data_off_bytes,
        f"key '{key}' is {value:,}, which is not possible",
        "Fetch the model again, or take another file of it.",
    )


def _positive(header: GgufHeader, suffix: str, most: int = _MAX_FIGURE) -> int:
    key = header.arch_key(suffix)
    value = header.require_int(key)
    if not 0 < value <= most:
        raise _impossible(header, key, value)
    return value


def _per_layer(header: GgufHeader, suffix: str, n_layer: int, default: int | Sequence[int]) -> list[int]:
    """A figure per layer, from a single value or an array."""
    key = header.arch_key(suffix)
    values = header.get_ints(key)
    if values is None:
        return [default] * n_layer if isinstance(default, int) else list(default)
    if len(values) == 1:
        values *= n_layer
    if len(values) < n_layer or any(not 0 <= v < 1 << 31 for v in values):
        raise GgufError(
            header.path,
            header.data_off_bytes,
            f"key '{key}' has {len(values)} values for {n_layer} layers, or impossible ones",
            "Fetch the model again, or take another file of it.",
        )
    return list(values[:n_layer])


def _n_vocab(header: GgufHeader) -> int:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, ArrayInfo):
        return tokens.n_items
    if isinstance(tokens, tuple):
        return len(tokens)
    embd = next((t for t in header.tensors if t.name == "token_embd.weight"), None)
    return embd.shape[-1] if embd is not None else _get(header, "vocab_size") or 0


def _state_layers(header: GgufHeader, arch: str, heads_kv: list[int], ffn: list[int]) -> list[bool]:
    """For each layer whether it keeps a recurrent state."""
    n_layer = len(heads_kv)
    if arch in _RECURRENT or arch in _BOTH_IN_EVERY_LAYER:
        return [True] * n_layer
    if arch in _STATE_WHERE_NO_KV_HEADS:
        return [n == 0 for n in heads_kv]
    if arch in _STATE_WHERE_NO_KV_HEADS_NOR_FFN:
        return [n == 0 and f == 0 for n, f in zip(heads_kv, ffn, strict=True)]
    if arch in _FULL_EVERY:
        given = header.get_ints(header.arch_key("attention.recurrent_layers"))
        if given is not None:
            return [bool(v) for v in _per_layer(header, "attention.recurrent_layers", n_layer, 0)]
        every = _get(header, "full_attention_interval") or _FULL_EVERY[arch]
        return [(i + 1) % every != 0 for i in range(n_layer)]
    return [False] * n_layer


def _sliding(header: GgufHeader, arch: str, n_layer: int, states: list[bool]) -> tuple[int, list[bool]]:
    """The window in tokens, and for each layer whether it slides."""
    window = _get(header, "attention.sliding_window")
    none = 0, [False] * n_layer
    if arch == "lfm2":
        return (window, [not s for s in states]) if window else none
    rule = _SLIDES.get(arch)
    if (
        rule is None
        or (arch == "exaone4" and n_layer != 64)
        or (rule.optional and not window)
        or (rule.forced and window == 0)
    ):
        return none
    if rule.forced or window is None:
        window = rule.window
    if not window:
        return none
    pattern = header.get_ints(header.arch_key("attention.sliding_window_pattern"))
    if pattern is not None and (len(pattern) > 1 or rule.every == 0):
        return window, [bool(v) for v in _per_layer(header, "attention.sliding_window_pattern", n_layer, 0)]
    every = pattern[0] if pattern else rule.every
    full = 0 if rule.full_first else every - 1
    return window, [every == 0 or i % every != full for i in range(n_layer)]


def _attention_layers(
    header: GgufHeader,
    arch: str,
    n_embd: int,
    heads: list[int],
    heads_kv: list[int],
    ffn: list[int],
    states: list[bool],
    slides: list[bool],
) -> tuple[AttentionLayer, ...]:
    if arch in _NO_CACHE or arch in _RECURRENT:
        return ()
    per_head = n_embd // heads[0] if heads[0] else 0
    d_k, d_v = _get(header, "attention.key_length") or per_head, _get(header, "attention.value_length") or per_head
    d_k_swa, d_v_swa = (
        _get(header, "attention.key_length_swa") or d_k,
        _get(header, "attention.value_length_swa") or d_v,
    )
    mla = bool(_get(header, "attention.key_length_mla") and _get(header, "attention.value_length_mla"))
    layers = []
    for i in range(_n_layers_with_cache(header, arch, len(heads))):
        if heads_kv[i] == 0 or (states[i] and arch not in _BOTH_IN_EVERY_LAYER):
            continue
        if arch in _STATE_WHERE_NO_KV_HEADS_NOR_FFN and ffn[i] != 0:
            continue
        k, v = (d_k_swa, d_v_swa) if slides[i] else (d_k, d_v)
        layers.append(AttentionLayer(i, heads_kv[i], k, 0 if mla else v, slides[i]))
    layers += _extra_layers(header, arch, layers, mla, d_k, d_v)
    n_loops = _get(header, "num_loops") or 1 if arch == "nanbeige" else 1
    return tuple(layers * min(n_loops, _MAX_LAYERS // max(len(heads), 1)))


def _n_layers_with_cache(header: GgufHeader, arch: str, n_layer: int) -> int:
    """Layers after these use the cache of an earlier one."""
    if arch == "gemma3n":
        return min(n_layer, 20)
    if arch == "gemma4":
        return max(0, n_layer - (_get(header, "attention.shared_kv_layers") or 0))
    return n_layer


def _extra_layers(
    header: GgufHeader, arch: str, layers: list[AttentionLayer], mla: bool, d_k: int, d_v: int
) -> list[AttentionLayer]:
    if arch == "graniteswitch" and layers:  # the router that picks adapters is one more layer, with one head
        return [AttentionLayer(layers[-1].index + 1, 1, d_k, d_v, False)]
    d_indexer = _get(header, "attention.indexer.key_length")
    if arch not in _INDEXER_LAYERS or not d_indexer:
        return []
    first = (_get(header, "leading_dense_block_count") or 0) if arch == "minimax-m3" else 0
    return [
        AttentionLayer(layer.index, 1, d_indexer, 0 if mla else d_v, False, indexer=True)
        for layer in layers
        if layer.index >= first and not layer.slides
    ]


def _state_items(header: GgufHeader, arch: str, n_embd: int, n_head: int) -> int:
    """F32 numbers of one layer's recurrent state for one sequence: the short convolution's and the state proper."""

    def get(suffix: str, default: int = 0) -> int:
        value = _get(header, suffix)
        return default if value is None else value

    if get("wkv.head_size"):
        return n_embd * (get("token_shift_count", 2) + get("wkv.head_size"))
    if get("shortconv.l_cache"):
        return n_embd * (get("shortconv.l_cache") - 1)
    conv = get("ssm.conv_kernel")
    if get("kda.head_dim"):
        d = get("kda.head_dim")
        return 3 * (conv - 1 if conv else 3) * n_head * d + d * d * n_head
    d_inner, d_state = get("ssm.inner_size"), get("ssm.state_size")
    rolling = max(conv - 1, 0) * (d_inner + 2 * get("ssm.group_count") * d_state)
    if arch == "minimax-01":
        d = get("attention.key_length")
        return rolling + d * d * n_head
    return rolling + d_state * d_inner
