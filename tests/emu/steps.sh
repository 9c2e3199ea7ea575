#!/usr/bin/env bash
# Training on the emulated GPU, four virtual ranks on one and on two nodes, against the CPU backend: losses and gradient norms of
# four steps. The first step differs by the rounding of its sums: 8 fp32 epsilons; with bf16 (2^-8) activations, whose errors a
# mean over tokens mostly cancels, by an eighth of 2^-8 in the loss and by 2^-8 in the norm. AdamW makes the rounding of small gradients
# visible, so that later steps may differ by twice as much. Then each resumes the other's checkpoints.
#   tests/emu/steps.sh CPU_BUILD EMU_BUILD BF16_BUILD
set -eu
cpu=$1 emu=$2 bf16=$3
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cat model/*.c moe/*.c train/*.c >"$tmp/text"
"$cpu/prepare" --out "$tmp/data" "$tmp/text" >"$tmp/said"

shape="--virtual-ranks 4 --layers 2 --width 32 --heads 2 --kv-heads 1 --head-size 16 --experts 8 --topk 2 --expert-width 16 --seq 16
    --batch 8 --micro-batch 1 --steps 4 --eval-every 0 --sample-every 0 --threads 1"

train() { # train BUILD NAME FLAGS...
    local build=$1 name=$2
    shift 2
    "$build/train" --data "$tmp/data" --out "$tmp/$name" "$@" >"$tmp/said" 2>&1 || { cat "$tmp/said"; exit 1; }
}
compare() { # compare NAME STEPS LOSS_BOUND NORM_BOUND: the last STEPS of it, relative, against $tmp/cpu
    python3 - "$tmp/cpu/log.jsonl" "$tmp/$1/log.jsonl" "$2" "$3" "$4" <<'P'
import json, sys
a, b = ([s for s in map(json.loads, open(f)) if "step" in s and "loss" in s] for f in sys.argv[1:3])
n = int(sys.argv[3])
assert [s["step"] for s in a] == [1, 2, 3, 4] and [s["step"] for s in b] == list(range(5 - n, 5)), (a, b)
for x, y in zip(a[-n:], b):
    for key, bound in (("loss", float(sys.argv[4])), ("grad_norm", float(sys.argv[5]))):
        off, bound = abs(x[key] - y[key]) / x[key], bound * (1 if x["step"] == 1 else 2)
        print(f"step {x['step']} {key:9} {x[key]:.7f} {y[key]:.7f} off by {off:.1e} of {bound:.0e}")
        assert off <= bound, "too far off"
P
}
for nodes in 1 2; do
    rm -rf "$tmp/cpu" "$tmp/emu" "$tmp/bf16"
    train "$cpu" cpu $shape --nodes $nodes --save-every -1
    train "$emu" emu $shape --nodes $nodes --save-every 2
    compare emu 4 1e-6 1e-6
    train "$bf16" bf16 $shape --nodes $nodes --save-every 2
    compare bf16 4 5e-4 4e-3
done
# A checkpoint of one backend goes on on the other, and back: weights, masters and moments are as good there. On two nodes.
for from in emu bf16; do
    bounds="1e-6 1e-6" back=$emu
    [ $from = emu ] || bounds="5e-4 4e-3" back=$bf16
    train "$cpu" "$from-there" --resume "$tmp/$from/step_00000002" --virtual-ranks 4 --nodes 2 --save-every 1
    compare "$from-there" 2 $bounds
    train "$back" "$from-back" --resume "$tmp/$from-there/step_00000003" --virtual-ranks 4 --nodes 2 --save-every -1
    compare "$from-back" 1 $bounds
done
echo "steps agree"
