#!/usr/bin/env bash
# What the CUDA backend says, and with which status it ends, where something that it needs is missing: on the emulated device, which can
# pretend that (EMU_LACKS, EMU_DEVICES). Also the ways to go on where that is possible.
#   tests/emu/start.sh [BUILD]
set -u
cd "$(dirname "$0")/../.."
. scripts/mpi_env.sh
emu=${1:-build/cuda-emu} tmp=$(mktemp -d) failed=0
trap 'rm -rf "$tmp"' EXIT
build/prepare --out "$tmp/data" LICENSE >"$tmp/out" 2>&1 || { cat "$tmp/out"; exit 1; }
small="--data $tmp/data --out $tmp/run --overwrite --steps 1 --batch 4 --seq 8 --layers 1 --width 16 --heads 2 --kv-heads 1 --head-size 8
    --experts 4 --topk 2 --expert-width 8 --eval-every 0 --sample-every 0 --save-every -1 --threads 1"

# says STATUS "PART|PART..." VARIABLE=VALUE... PROGRAM FLAGS...: ends with STATUS and says all parts, within a minute
says() {
    local want=$1 parts=$2 status part
    shift 2
    timeout 60 env "$@" $small >"$tmp/out" 2>&1
    status=$?
    [ $status = "$want" ] || { echo "status $status, expected $want: $*" && tail -n 8 "$tmp/out" && failed=1; }
    while read -r part; do
        grep -qF -- "$part" "$tmp/out" || { echo "nothing says \"$part\": $*" && tail -n 8 "$tmp/out" && failed=1; }
    done < <(tr '|' '\n' <<<"$parts")
}

says 6 "no NVIDIA driver here|(hint: " EMU_DEVICES=-1 $emu/train
says 6 "no NVIDIA driver here|(hint: " EMU_DEVICES=-1 $emu/train --virtual-ranks 2
says 6 "knows CUDA 11.8, this program was built with CUDA 13.0|(hint: a newer driver" EMU_LACKS=driver $emu/train
says 6 "shows no GPU, CUDA_VISIBLE_DEVICES is \"\"|(hint: " EMU_DEVICES=0 CUDA_VISIBLE_DEVICES= $emu/train
says 6 "no kernel image is available|make BACKEND=cuda CUDA_ARCHS=" EMU_LACKS=image $emu/train
says 6 "GPU 0 cannot reach the memory of GPU 1|(hint: " EMU_DEVICES=2 EMU_LACKS=peer $emu/train --virtual-ranks 2
says 2 "MOE_GROUPED is \"fast\"|expected portable or sm90" MOE_GROUPED=fast $emu/train
says 0 "grouped products portable" MOE_GROUPED=portable $emu/train
says 0 "ranks by plain pointers, nodes by NCCL's messages" EMU_DEVICES=2 $emu/train --virtual-ranks 2 --nodes 2
says 0 "nodes by copies (rank 0: |NCCL is not here" EMU_DEVICES=2 EMU_LACKS=nccl $emu/train --virtual-ranks 2 --nodes 2
nodes="EMU_DEVICES=4 EMU_LSA=2 MOE_WINDOWS=nccl" two="$emu/train --virtual-ranks 4 --nodes 2"
says 0 "ranks by NCCL's windows, nodes by NCCL's puts" $nodes $two
says 0 "ranks by NCCL's windows, nodes by NCCL's messages" $nodes MOE_WIRE=messages $two
says 0 "nodes by NCCL's messages (rank 0: puts between nodes (GIN): " $nodes EMU_LACKS=puts $two
says 0 "nodes by NCCL's messages (rank 0: a trial put did not arrive within 5 s" $nodes MOE_PATIENCE=5 EMU_LACKS=arrivals $two
says 5 "MOE_WIRE=puts, but they cannot be used: rank 0: puts between nodes" $nodes EMU_LACKS=puts MOE_WIRE=puts $two
says 5 "MOE_WINDOWS=nccl, but they cannot be used: rank 0: NCCL makes no" $nodes EMU_LACKS=windows $two
says 5 "but they cannot be used: rank 0: NCCL is version 22808 here|(hint: build with the same)" $nodes EMU_LACKS=version $two
says 5 "but they cannot be used: rank 0: NCCL has pointers among 1 ranks, a node is 2" $nodes EMU_LSA=1 $two
says 2 "MOE_WIRE is \"fast\"|expected messages or puts" EMU_DEVICES=2 MOE_WIRE=fast $emu/train --virtual-ranks 2
if command -v mpirun >/dev/null && [ -n "${MPIRUN:-}" ]; then
    says 6 "rank 1 of this machine finds 1 GPU" EMU_DEVICES=1 $MPIRUN -n 2 $emu/train
    says 6 "cannot reach the window|rank 1 on the same machine" EMU_DEVICES=2 EMU_LACKS=peer $MPIRUN -n 2 $emu/train
    says 0 "ranks by CUDA IPC (NCCL cannot begin" EMU_DEVICES=2 $MPIRUN -n 2 $emu/train
    says 5 "2 nodes of several processes, which exchange by NCCL: NCCL cannot begin|for threads of one process" EMU_DEVICES=2 $MPIRUN -n 2 $emu/train --nodes 2
fi
[ $failed = 0 ] && echo "each says what it is, what to do, and ends"
exit $failed
