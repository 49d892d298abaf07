#!/bin/sh
# Builds the C++ tests with the sanitizers and runs them: address + undefined behaviour, then thread.
# usage: [JOBS=N] scripts/sanitize.sh [address,undefined | thread]...

set -eu
cd "$(dirname "$0")/.."
jobs=${JOBS:-$(getconf _NPROCESSORS_ONLN)}
if [ $# -eq 0 ]; then
    set -- address,undefined thread
fi

for kind in "$@"; do
    case $kind in
        address,undefined) dir=build/asan ;;
        thread)            dir=build/tsan ;;
        *) echo "sanitize: unknown sanitizer '$kind' (address,undefined or thread)" >&2; exit 2 ;;
    esac
    echo "== sanitizer: $kind"
    cmake -S . -B "$dir" -DKVTIER_BUILD_TESTS=ON -DKVTIER_SANITIZE="$kind" >/dev/null
    cmake --build "$dir" --parallel "$jobs" --target kvtier-tests
    # halt at the first report: a test that reports and passes is a test that fails
    (cd "$dir" && \
        ASAN_OPTIONS=detect_leaks=1:halt_on_error=1:strict_string_checks=1 \
        UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
        TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 \
        ctest --output-on-failure --parallel "$jobs" --timeout 1200)
done
