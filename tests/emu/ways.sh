#!/usr/bin/env bash
# Training by every way between ranks, on the emulated CUDA backend: between nodes copies, NCCL's messages and NCCL's puts; in a node
# plain pointers, windows that NCCL makes, and processes with CUDA IPC; whatever the order of threads and streams, with and without a
# recorded step, with room for rows and (nccl, puts, ipc) too little at first. Losses within 1e-6 of the CPU backend's (fp32 rounding:
# 16 units in the last place; another seed differs by more than 1e-3); among ways not one bit differs.
set -u
cd "$(dirname "$0")/../.."
. scripts/mpi_env.sh
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
build/prepare --out "$tmp/data" README.md >"$tmp/out" 2>&1 || { cat "$tmp/out"; exit 1; }
flags="--data $tmp/data --steps 3 --batch 4 --seq 32 --layers 2 --width 64 --heads 2 --kv-heads 1 --experts 8 --topk 2 --expert-width 32
    --eval-every 0 --save-every -1 --router-skew 1.2 --balance llep --check-plans"

train() { # train NAME COMMAND...: its losses in NAME
    local name=$1
    shift
    EMU_WAIT=60 timeout 300 "$@" $flags --out "$tmp/run-$name" >"$tmp/out" 2>&1 || { echo "$name: $*"; tail -n 20 "$tmp/out"; exit 1; }
    sed -n 's/.*"loss": *\([0-9][0-9.e+-]*\).*/\1/p' "$tmp/run-$name/log.jsonl" >"$tmp/$name"
    [ "$(wc -l <"$tmp/$name")" = 3 ] || { echo "$name: expected three losses"; cat "$tmp/$name"; exit 1; }
}
near() { # near A B BOUND: every loss
    paste "$tmp/$1" "$tmp/$2" | awk -v bound="$3" '{d = ($1 - $2) / $2; if (d > bound || -d > bound) bad = 1} END {exit bad}'
}

train cpu build/train --virtual-ranks 4
train seed build/train --virtual-ranks 4 --seed 2
train one build/cuda-emu/train --virtual-ranks 4
train direct env EMU_ORDER=reverse EMU_STREAMS=early build/cuda-emu/train --virtual-ranks 4
train copies env EMU_STREAMS=random:5 build/cuda-emu/train --virtual-ranks 4 --nodes 2
train nccl env EMU_DEVICES=4 EMU_ORDER=random:3 build/cuda-emu/train --virtual-ranks 4 --nodes 2 --recv-room 0.6
train windows env EMU_DEVICES=4 MOE_WINDOWS=nccl EMU_ORDER=random:4 build/cuda-emu/train --virtual-ranks 4
train puts env EMU_DEVICES=4 EMU_LSA=2 MOE_WIRE=puts EMU_STREAMS=random:6 build/cuda-emu/train --virtual-ranks 4 --nodes 2 --recv-room 0.6
train plain build/cuda-emu/train --virtual-ranks 4 --no-cuda-graph
near seed cpu 1e-3 && { echo "the comparison would not see another seed"; exit 1; }
near one cpu 1e-6 || { echo "one node: not the CPU's losses"; paste "$tmp/one" "$tmp/cpu"; exit 1; }
near copies cpu 1e-6 || { echo "two nodes: not the CPU's losses"; paste "$tmp/copies" "$tmp/cpu"; exit 1; }
cmp "$tmp/one" "$tmp/direct" && cmp "$tmp/one" "$tmp/plain" && cmp "$tmp/copies" "$tmp/nccl" &&
    cmp "$tmp/one" "$tmp/windows" && cmp "$tmp/copies" "$tmp/puts" || exit 1
if command -v mpirun >/dev/null && [ -n "${MPIRUN:-}" ]; then
    train ipc env EMU_DEVICES=4 $MPIRUN -n 4 build/cuda-emu/train --recv-room 0.6
    cmp "$tmp/one" "$tmp/ipc" || exit 1
fi
echo "the same losses by every way between ranks"
