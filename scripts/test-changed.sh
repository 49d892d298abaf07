#!/bin/sh
# Runs the C++ tests in build/ whose programs are not, byte for byte, those that passed last time. The programs
# contain all that they test, so one that did not change cannot answer otherwise. Copies of what passed are kept in
# build/passed.
# usage: scripts/test-changed.sh [--all] [JOBS]

set -eu
cd "$(dirname "$0")/../build"
all=no
if [ "${1:-}" = --all ]; then
    all=yes
    shift
fi
jobs=${1:-2}
mkdir -p passed

changed=
for program in test-*; do
    [ -f "$program" ] && [ -x "$program" ] || continue
    cmp -s "$program" "passed/$program" || changed="$changed $program"
done
if [ $all = yes ]; then
    rm -f passed/test-*
    ctest --output-on-failure --timeout 600 --parallel "$jobs"
    changed=$(echo test-*)
elif [ -z "$changed" ]; then
    echo "C++ tests: every program is the one that passed"
    exit 0
else
    pattern=$(echo $changed | tr ' ' '|')
    ctest --output-on-failure --timeout 600 --parallel "$jobs" --no-tests=error -R "^($pattern)\$"
fi
for program in $changed; do
    if [ -f "$program" ] && [ -x "$program" ]; then
        cp -p "$program" "passed/$program"
    fi
done
