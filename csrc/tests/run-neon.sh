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
    command -v "$tool" >/dev/null || \
        { echo "run-neon.sh: $tool is missing: install g++-aarch64-linux-gnu and qemu-user" >&2; exit 77; }
done
attention=$(ls "$csrc"/attention/*.cpp | grep -v -e kernels-avx)
for test in test-attention test-invariance test-recall; do
    # shellcheck disable=SC2086  # a list of files
    "$cxx" -std=c++17 -O2 -Wall -Wextra -fno-math-errno -ffp-contract=off -static -pthread -DKVT_TEAM_STD_THREADS \
        -o "$build/$test-neon" \
        "$here/$test.cpp" "$csrc"/store/*.cpp $attention
    qemu-aarch64 "$build/$test-neon" neon 16   # every 16th case: emulation is a hundred times as slow
done
