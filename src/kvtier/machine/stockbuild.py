"""How the installed llama.cpp was built, and whether that makes it slower than it could be here.

A ratio against a slow build of stock is no result: what compares with stock asks this first, says so beside its
figures, and marks them. The facts come from a process that has llama.cpp loaded (`ggmlcpu`); what they mean is decided
here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from .buildargs import HALF_PRECISION

# ggml's words for instruction sets that matter and those of /proc/cpuinfo, most important first
WORTHWHILE: Final = (("AVX512", "avx512f"), ("AVX2", "avx2"), ("FMA", "fma"), ("F16C", "f16c"))
HALF_STEP: Final = 128  # channels that ggml adds up at a time in half precision; what is left of a head is slow
# Attention for heads of 64 channels takes 0.5 to 0.65 times as long as for 128 in a good build. Nothing but slow code
# makes it longer.
SLOW_RATIO: Final = 1.0
_SMALL, _LARGE = 64, 128


@dataclass(frozen=True, slots=True)
class StockBuild:
    """What is known about an installed llama.cpp.

    `features` are ggml's words for what its CPU backend was compiled with, `attention_ns` nanoseconds per cell of a
    decode step of one head over an F16 cache, by the head's channels; both empty where they could not be found out.
    `flags` are the processor's, as /proc/cpuinfo names them.
    """

    version: str
    ggml: str
    processor: str
    flags: frozenset[str] = frozenset()
    features: Mapping[str, str] = field(default_factory=dict)
    attention_ns: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any], processor: str, flags: frozenset[str]) -> StockBuild:
        """From what a process with llama.cpp loaded answered: version, ggml, features, attention_ns (keys as text)."""
        times = {int(size): float(ns) for size, ns in answer["attention_ns"].items()}
        features = {str(name): str(value) for name, value in answer["features"].items()}
        return cls(str(answer["version"]), str(answer["ggml"]), processor, flags, features, times)

    @property
    def instruction_sets(self) -> list[str]:
        """ggml's names of what was compiled in, in its order."""
        return [name if value == "1" else f"{name}={value}" for name, value in self.features.items() if value != "0"]

    @property
    def lacking(self) -> list[str]:
        """Instruction sets that matter, that the processor has, and that were not compiled in; none where nothing is
        known."""
        used = {name for name, value in self.features.items() if value != "0"}
        return [name for name, flag in WORTHWHILE if used and flag in self.flags and name not in used]

    @property
    def half_ratio(self) -> float | None:
        """Time of attention over F16 for heads of 64 channels over that for 128; None where it was not measured."""
        times = self.attention_ns
        return times[_SMALL] / times[_LARGE] if times.get(_SMALL) and times.get(_LARGE) else None

    @property
    def has_slow_heads(self) -> bool:
        """Whether attention over F16 caches is slow for heads that are no multiple of 128 channels."""
        return self.half_ratio is not None and self.half_ratio > SLOW_RATIO

    def is_slow_for(self, type_v: str, head_sizes: Iterable[int]) -> bool:
        """Whether stock with values of this type and heads of these sizes (channels of V) is slower than another build
        would be."""
        return bool(self.lacking) or (
            self.has_slow_heads and type_v == "f16" and any(size % HALF_STEP for size in head_sizes)
        )

    def problems(self) -> list[str]:
        """What makes this build slow, a sentence each without its full stop."""
        found = []
        if self.lacking:
            found.append(f"it was built without {', '.join(self.lacking)}, which this processor has")
        if self.has_slow_heads:
            native = HALF_PRECISION in self.flags
            why = "; -march=native does that to it on a processor with AVX512_FP16" if native else ""
            found.append(
                f"its attention over F16 caches takes {self.half_ratio:.1f} times as long for heads of 64 channels "
                f"as for 128, where a good build takes about half{why}"
            )
        return found

    def line(self) -> str:
        """Version, instruction sets and processor, for the head of a report."""
        sets = ", ".join(self.instruction_sets) or "instruction sets unknown"
        return f"llama-cpp-python {self.version}, ggml {self.ggml} ({sets}) on {self.processor}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON: every field, the flags left out, and what follows from them."""
        values = {name: value for name, value in asdict(self).items() if name != "flags"}
        times = {str(size): ns for size, ns in self.attention_ns.items()}
        return {**values, "features": dict(self.features), "attention_ns": times, "problems": self.problems()}
