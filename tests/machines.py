"""Flags of processors as /proc/cpuinfo lists them, of machines that were seen or publicly reported; those that concern
vectors."""

from __future__ import annotations

from typing import Final

_X86_64_V3: Final = "sse4_1 sse4_2 movbe popcnt xsave avx f16c abm bmi1 avx2 bmi2 fma ssse3"
_AVX512: Final = "avx512f avx512dq avx512ifma avx512cd avx512bw avx512vl"
_ICE_LAKE: Final = "avx512vbmi avx512_vbmi2 gfni vaes vpclmulqdq avx512_vnni avx512_bitalg avx512_vpopcntdq"

# Xeon Platinum 8480 in a virtual machine; Emerald Rapids (6542Y) has the same
SAPPHIRE_RAPIDS: Final = frozenset(
    f"{_X86_64_V3} {_AVX512} {_ICE_LAKE} avx_vnni avx512_bf16 amx_bf16 avx512_fp16 amx_tile amx_int8".split()
)
ZEN_5: Final = frozenset(f"{_X86_64_V3} {_AVX512} {_ICE_LAKE} sse4a avx_vnni avx512_bf16".split())  # EPYC 9655
ZEN_4: Final = frozenset(f"{_X86_64_V3} {_AVX512} {_ICE_LAKE} sse4a avx512_bf16".split())  # Ryzen 9 7950X3D
# EPYC, family 23, model 1; Zen 2 and 3 have the same of those that matter here
ZEN_1: Final = frozenset(f"{_X86_64_V3} sse4a adx sha_ni".split())
HASWELL: Final = frozenset(_X86_64_V3.split())
_IVY_BRIDGE: Final = "ssse3 sse4_1 sse4_2 popcnt xsave avx f16c"
IVY_BRIDGE: Final = frozenset(_IVY_BRIDGE.split())
_GRAVITON_3: Final = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp asimddp sve i8mm bf16"
NEOVERSE: Final = frozenset(_GRAVITON_3.split())
