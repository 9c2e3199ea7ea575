#!/usr/bin/env bash
# Every test. `make test` calls it; tests/run.sh --asan does the same under the address and undefined-behaviour sanitizers, --emu
# runs the CUDA backend's on the CPU only.
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

build() { # build FOLDER VARIABLES...: $targets, or all tests and programs
    echo "---- $*"
    make --no-print-directory -j"$(nproc)" BUILD="$@" ${targets:-tests} >/dev/null || { echo "the build of $1 failed"; exit 1; }
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

# start NAME COMMAND...: as run, beside the others, one for each core; finish: waits for all of them
started=$(mktemp -d)
start() {
    while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done
    (
        passed=0 failed=0 skipped=0 failures=""
        run "$@" >"$started/$BASHPID.said"
        cat "$started/$BASHPID.said"
        echo "$passed $failed $skipped $failures" >"$started/$BASHPID.counts"
    ) &
}
finish() {
    local p f s names
    wait
    while read -r p f s names; do
        passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s)) failures="$failures $names"
    done < <(cat "$started"/*.counts)
    rm -rf "$started"
}

# The CUDA backend: its sources emulated, in fp32, in bf16 and under the address sanitizer, and compared with build/train; compiled for
# GPUs where nvcc is. A program runs on one core: the longest come first. Tests of ops try three orders of threads by themselves.
emulated() {
    local emu=build/cuda-emu bf16=build/cuda-emu-bf16 asan=build/cuda-emu-asan test order
    local of_emu="cuda_plan layout moe model attention gemm checkpoint ops router route comm_dev cuda_step emu_kernels emu_host"
    local of_bf16="attention gemm ops router cuda_step"
    local of_asan="attention gemm ops router route cuda_step emu_kernels emu_host"
    targets="build/train build/prepare" build build
    targets="$emu/train $(printf "$emu/test_%s " $of_emu)" build $emu BACKEND=emu REAL=float
    targets="$bf16/train $(printf "$bf16/test_%s " $of_bf16)" build $bf16 BACKEND=emu REAL=bf16
    targets=$(printf "$asan/test_%s " $of_asan) build $asan BACKEND=emu REAL=float OPT="-O1 -g" SAN=-fsanitize=address
    start "cuda-emu/ways" tests/emu/ways.sh
    start "cuda-emu/steps" tests/emu/steps.sh build $emu $bf16
    start "cuda-emu/start" tests/emu/start.sh
    for test in $of_emu; do start "cuda-emu/test_$test" $emu/test_$test; done
    for test in $of_bf16; do start "cuda-emu-bf16/test_$test" $bf16/test_$test; done
    for test in $of_asan; do ASAN_OPTIONS=detect_leaks=0 start "cuda-emu-asan/test_$test" $asan/test_$test; done
    for order in reverse random:1; do
        for test in route comm_dev; do EMU_ORDER=$order EMU_STREAMS=random:1 start "cuda-emu/test_$test, $order" $emu/test_$test; done
    done
    finish
    if ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ]; then
        echo "skip  cuda: nvcc was not found, nothing is compiled for GPUs"
        return
    fi
    targets="build/cuda/train build/cuda/generate build/cuda/test_router" build build/cuda BACKEND=cuda
    [ -e /dev/nvidiactl ] || run "cuda without a GPU" bash -c "$(declare -f no_gpu); no_gpu"
}
no_gpu() {
    local said status
    said=$(build/cuda/train --steps 1 2>&1)
    status=$?
    echo "status $status: $said"
    [ $status = 6 ] && [[ $said == *"no NVIDIA driver here"* ]] || return 1
    said=$(build/cuda/test_router 2>&1)
    status=$?
    echo "status $status: $said"
    [ $status = 77 ] && [[ $said == *skipped* ]]
}

if [ "${1:-}" = --emu ]; then
    emulated
elif [ "${1:-}" = --asan ]; then
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
    emulated
fi
[ "${1:-}" = --emu ] || for script in tests/test_*.sh; do run "$script" bash "$script"; done
echo "$failures" | tr ' ' '\n' | sed '/^$/d; s/^/failed: /'
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
