#!/usr/bin/env bash
# Every test. `make test` calls it; tests/run.sh --asan does the same under the address and undefined-behaviour sanitizers.
# Each program runs under a watchdog, in fp32 and in double, those named *_mpi also under mpirun. Ends with
# "N passed, N failed, N skipped" and status 0 only when none failed.
set -u
cd "$(dirname "$0")/.."
. scripts/mpi_env.sh
limit=600 passed=0 failed=0 skipped=0 failures=""

# run NAME COMMAND...: one line per program; its output only when it fails
run() {
    local name=$1 log status start=$SECONDS
    shift
    log=$(mktemp)
    timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1 </dev/null
    status=$?
    case $status in
    0) passed=$((passed + 1)) && echo "pass  $name ($((SECONDS - start)) s)" ;;
    77) skipped=$((skipped + 1)) && echo "skip  $name: $(tail -n 1 "$log")" ;;
    *)
        failed=$((failed + 1)) failures="$failures $name"
        echo "FAIL  $name: status $status$([ $status = 124 ] && echo " (no end within $limit s)")"
        tail -n 60 "$log" | sed 's/^/      /'
        ;;
    esac
    rm -f "$log"
}

build() { # build FOLDER VARIABLES...
    echo "---- $*"
    make --no-print-directory -j"$(nproc)" BUILD="$@" tests >/dev/null || { echo "the build of $1 failed"; exit 1; }
}

suite() { # suite FOLDER: all programs of a build
    local test name
    for test in "$1"/test_*; do
        [ -x "$test" ] || continue
        name=${test#build}
        case $test in
        *_mpi) for n in 2 3 4 8; do run "$test -n $n" $MPIRUN -n $n "$test"; done ;;
        *) run "$test" "$test" ;;
        esac
    done
}

if [ "${1:-}" = --asan ]; then
    export ASAN_OPTIONS=detect_leaks=0:abort_on_error=0:detect_stack_use_after_return=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
    export MOE_BUILD=build-asan
    build build-asan SAN="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -Wno-maybe-uninitialized" OPT="-O1 -g"
    suite build-asan
else
    export MOE_BUILD=build
    build build
    build build-double REAL=double
    suite build
    suite build-double
fi
for script in tests/test_*.sh; do run "$script" bash "$script"; done
echo "$failures" | tr ' ' '\n' | sed '/^$/d; s/^/failed: /'
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
