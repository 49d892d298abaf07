#!/bin/sh
# Cross-compiles the attention kernels for AArch64 and runs their test under qemu-user.
# Needs g++-aarch64-linux-gnu and qemu-user. Usage: run-neon.sh [BUILD_DIR]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
csrc=$(dirname "$here")
build=${1:-$(mktemp -d)}
mkdir -p "$build"
cxx=${CXX_AARCH64:-aarch64-linux-gnu-g++}
for tool in "$cxx" qemu-aarch64; do
    command -v "$tool" >/dev/null || { echo "run-neon.sh: $tool is missing: install g++-aarch64-linux-gnu and qemu-user" >&2; exit 77; }
done
"$cxx" -std=c++17 -O2 -Wall -Wextra -fno-math-errno -static -pthread -fopenmp -o "$build/test-attention-neon" \
    "$here/test-attention.cpp" "$csrc/store/format.cpp" "$csrc/store/page-layout.cpp" \
    "$csrc"/attention/attention.cpp "$csrc"/attention/decode.cpp "$csrc"/attention/prefill.cpp "$csrc"/attention/visibility.cpp \
    "$csrc"/attention/mass.cpp "$csrc"/attention/isa.cpp "$csrc"/attention/kernels-scalar.cpp "$csrc"/attention/kernels-neon.cpp
exec qemu-aarch64 "$build/test-attention-neon" neon
