#!/usr/bin/env bash
# The programs as a user runs them: several processes, resume, observation, bad input, killed ranks. Ends with the number of checks.
set -u
cd "$(dirname "$0")/.."
. scripts/mpi_env.sh
bin=${MOE_BUILD:-build}
tmp=$(mktemp -d)
trap 'pkill -KILL -f -- "--out $tmp" 2>/dev/null; rm -rf "$tmp"' EXIT
. tests/common/checks.sh

refused() { # refused STATUS TEXT COMMAND...: ends with that status and exactly one message, which says TEXT, within a minute
    local want=$1 text=$2 status told
    shift 2
    checks=$((checks + 1))
    timeout --kill-after=5 60 "$@" >"$tmp/out" 2>&1 </dev/null
    status=$?
    told=$(grep -c -- "$text" "$tmp/out")
    [ "$status" = "$want" ] && [ "$told" = 1 ] && return
    faults=$((faults + 1))
    echo "FAULT: status $status, wanted $want; \"$text\" was said $told times, wanted once: $*"
    tail -n 20 "$tmp/out" | sed 's/^/    /'
}
same() { ok "$1: the same bits" cmp_checkpoints "$2" "$3"; }
differ() { ok "$1: other bits" cmp_differ "$2" "$3"; }
cmp_checkpoints() {
    local f
    for f in "$1"/*.safetensors; do cmp "$f" "$2/${f##*/}" || return 1; done
}
cmp_differ() { ! cmp_checkpoints "$1" "$2"; }

# ---- data: the project's own sources --------------------------------------------------------------------------------------
cat */*.h */*.c >"$tmp/text"
ok prepare "$bin/prepare" --out "$tmp/data" "$tmp/text"
model="--layers 2 --width 32 --heads 2 --kv-heads 1 --head-size 16 --experts 8 --topk 2 --expert-width 24 --seq 32"
bare="$bin/train $model --batch 8 --router-skew 1.0 --router-bias --bias-rate 0.001 --z-loss 0.001"
common="$bare --data $tmp/data --lr 0.01"
train() { # train OUT FLAGS...
    local out=$1
    shift
    $common --out "$tmp/$out" "$@"
}
mtrain() { # mtrain RANKS OUT FLAGS...
    local n=$1 out=$2
    shift 2
    $MPIRUN -n "$n" $common --out "$tmp/$out" "$@"
}
last() { ls -d "$tmp/$1"/step_* | tail -n 1; }

# ---- the same run, however it is started -----------------------------------------------------------------------------------
quiet="--eval-every 0 --sample-every 0 --trace-every 0"
ok "one rank" train one --steps 12 $quiet --save-every 12 --threads 1
ok "four processes" mtrain 4 four --steps 12 $quiet --nodes 2 --save-every 12
ok "four virtual ranks" train virtual --steps 12 $quiet --virtual-ranks 4 --nodes 2 --save-every 12
same "processes and threads" "$(last four)" "$(last virtual)"
again() { # again OUT: the log of a run that had too little room tells of steps run again
    grep -q '"reruns":[1-9]' "$tmp/$1/log.jsonl"
}
ok "little room for rows" train room --steps 12 $quiet --virtual-ranks 4 --nodes 2 --save-every 12 --recv-room 0.6
ok "steps were run again" again room
ok "none without" eval '! again virtual'
same "little room" "$(last room)" "$(last virtual)"
ok "little room, processes" mtrain 4 proom --steps 12 $quiet --nodes 2 --save-every 12 --recv-room 0.6
ok "steps were run again" again proom
same "little room, processes" "$(last proom)" "$(last virtual)"
for n in 2 3; do
    ok "$n threads" train threads$n --steps 12 $quiet --save-every 12 --threads $n
    same "1 and $n threads" "$(last one)" "$(last threads$n)"
done
ok "another seed" train seed --steps 12 $quiet --virtual-ranks 4 --nodes 2 --save-every 12 --seed 9
differ "another seed" "$(last four)" "$(last seed)"

# ---- observing changes nothing ----------------------------------------------------------------------------------------------
ok "observed" train observed --steps 12 --virtual-ranks 4 --nodes 2 --eval-every 2 --sample-every 3 --trace-every 2 --save-every 4 --check-plans
same "observed or not" "$(last virtual)" "$(last observed)"
# eplb plans by the past: near balance, with one slot, its plans turn on little, so a past that observing had moved would show
eplb="$bin/train $model --data $tmp/data --batch 8 --lr 0.01 --steps 24 --save-every 12 --virtual-ranks 4 --nodes 2 --balance eplb --slots 1"
ok "eplb" $eplb --out "$tmp/eplb" $quiet
ok "eplb observed" $eplb --out "$tmp/eplb2" --eval-every 1 --sample-every 1
same "eplb, observed or not" "$(last eplb)" "$(last eplb2)"
rm -rf "$(last eplb2)" # as if it had stopped after step 12
ok "eplb resumed" "$bin/train" --resume "$tmp/eplb2" --virtual-ranks 4 --nodes 2
same "eplb, stopped between or not" "$(last eplb)" "$(last eplb2)"
ok "overlap" bash -c "'$bin/overlap' --virtual-ranks 4 --nodes 2 --rounds 2 --tokens 256 --skew 2 | grep -q '^overlap_permille = [0-9]'"
ok "uniform" train uniform --steps 2 $quiet --virtual-ranks 2 --balance uniform
ok "uniform says what it is" grep -qi "not a training method" "$tmp/uniform/log.jsonl"
ok "trace is there" test -s "$tmp/observed/route.bin"
for field in step tokens loss val_loss lr grad_norm tok_s step_ms wait_ms aux_loss z_loss maxvio rank_max_mean_before \
    rank_max_mean_after pairs_self pairs_node pairs_inter crossings counts_us moe_us bytes_node bytes_inter weight_bytes plan_us; do
    ok "log has $field" grep -q "\"$field\"" "$tmp/observed/log.jsonl"
done

# ---- resume ------------------------------------------------------------------------------------------------------------------
ok "first half" mtrain 2 half --steps 12 --save-every 6 $quiet
ok "whole" mtrain 2 whole --steps 12 --save-every 12 $quiet
rm -rf "$(last half)" # as if it had stopped after step 6
ok "second half" $MPIRUN -n 2 "$bin/train" --resume "$tmp/half" --data "$tmp/data"
same "resumed" "$(last whole)" "$(last half)"
rm -rf "$(last half)"
ok "on four ranks" $MPIRUN -n 4 "$bin/train" --resume "$tmp/half" --data "$tmp/data" --nodes 2
loss_of() { grep '"step": *12[,}]' "$1/log.jsonl" | tail -n 1 | sed 's/.*"loss": *\([0-9.]*\).*/\1/'; }
ok "loss after resuming on other ranks" awk -v a="$(loss_of "$tmp/half")" -v b="$(loss_of "$tmp/whole")" 'BEGIN { exit !(a > 0 && (a-b)^2 < 1e-6) }'
ok "generate" "$bin/generate" --checkpoint "$tmp/half" --prompt "int " --tokens 20
ok "generate on two ranks" $MPIRUN -n 2 "$bin/generate" --checkpoint "$tmp/half" --prompt "int " --tokens 20

# ---- stopped from outside ---------------------------------------------------------------------------------------------------
$MPIRUN -n 2 $common --out "$tmp/term" --steps 100000 $quiet >"$tmp/term.log" 2>&1 &
pid=$!
for _ in $(seq 100); do [ "$(grep -c '"step"' "$tmp/term/log.jsonl" 2>/dev/null)" -gt 3 ] 2>/dev/null && break || sleep 0.2; done
pkill -TERM -n -f -- "train .*--out $tmp/term "
wait $pid
ok "SIGTERM: a checkpoint and status 0" test $? = 0 -a -n "$(ls -d "$tmp"/term/step_* 2>/dev/null)"
$MPIRUN -n 4 $common --out "$tmp/kill" --steps 100000 $quiet >"$tmp/kill.log" 2>&1 &
pid=$!
for _ in $(seq 100); do [ "$(grep -c '"step"' "$tmp/kill/log.jsonl" 2>/dev/null)" -gt 3 ] 2>/dev/null && break || sleep 0.2; done
pkill -KILL -n -f -- "train .*--out $tmp/kill "
start=$SECONDS
wait $pid
status=$?
ok "a killed rank ends the run (status $status, $((SECONDS - start)) s)" test $status != 0 -a $((SECONDS - start)) -lt 30

# ---- memory: what a run takes is what its start said, within 15 % -------------------------------------------------------------
foretold() { # foretold COMMAND...
    checks=$((checks + 1))
    "$@" >"$tmp/out" 2>&1 </dev/null
    awk '/^memory / { said = $2 } /peak memory/ { for (i = 1; i < NF; i++) if ($i == "memory") peak = $(i + 1) }
         END { exit !(said > 0 && peak > 0.85 * said && peak < 1.15 * said) }' "$tmp/out" && return
    faults=$((faults + 1))
    echo "FAULT: memory said and peak are more than 15 % apart: $*"
    grep memory "$tmp/out" | sed 's/^/    /'
}
case $bin in
*asan*) ;; # the sanitizer's shadow counts too
*)
    wide="$bin/train --layers 2 --width 128 --heads 4 --kv-heads 2 --head-size 32 --experts 8 --topk 2 --expert-width 256 --seq 128
          --batch 16 --steps 2 --save-every -1 --data $tmp/data --threads 1 $quiet"
    foretold $wide --out "$tmp/m1"
    foretold $MPIRUN -n 2 $wide --out "$tmp/m2"
    foretold $wide --recompute 3 --out "$tmp/m3"
    ;;
esac

# ---- bad input --------------------------------------------------------------------------------------------------------------
x="--out $tmp/x --steps 1"
refused 2 "leyers" $common $x --leyers 3
refused 2 "experts" $MPIRUN -n 3 $common $x
refused 2 "batch" $bare --data "$tmp/data" $x --virtual-ranks 8 --micro-batch 3
refused 2 "cannot be cut" $MPIRUN -n 4 $common $x --ep 3
refused 2 "topk\|per token" $bin/train --layers 2 --experts 8 --topk 9 --data "$tmp/data" $x
refused 2 "renorm" $bin/train --layers 2 --experts 8 --topk 1 --data "$tmp/data" $x
refused 2 "nodes" $MPIRUN -n 4 $common $x --nodes 3
refused 3 "build/prepare" $bare --data "$tmp/nowhere" $x
refused 3 "nowhere" "$bin/train" --resume "$tmp/nowhere"
mkdir -p "$tmp/bad"
cp "$tmp/data/val.bin" "$tmp/bad/"
head -c 5000 "$tmp/data/train.bin" >"$tmp/bad/train.bin"
refused 3 "train.bin" $MPIRUN -n 2 $bare --data "$tmp/bad" $x
echo "<html>404</html>" >"$tmp/bad/train.bin"
refused 3 "train.bin" $bare --data "$tmp/bad" $x
cp -r "$(last whole)" "$tmp/broken"
f=$(ls "$tmp"/broken/model*.safetensors | head -n 1)
head -c 3000 "$f" >"$f.cut" && mv "$f.cut" "$f"
refused 3 "safetensors" $MPIRUN -n 2 "$bin/train" --resume "$tmp/broken" --data "$tmp/data" --out "$tmp/x" --steps 20
echo '{"model_type": "qwen3_moe"}' >"$tmp/broken/config.json"
refused 3 "config.json" "$bin/generate" --checkpoint "$tmp/broken"
damaged() { # damaged SED: a copy of a checkpoint whose trainer.json was edited
    rm -rf "$tmp/damaged"
    cp -r "$(last half)" "$tmp/damaged"
    sed -i "$1" "$tmp/damaged/trainer.json"
}
resume="$bin/train --resume $tmp/damaged --data $tmp/data --out $tmp/x --steps 20"
damaged 's/"samples": [0-9]*/"samples": 9223372036854775807/'
refused 3 "samples" $resume
damaged 's/"tokens": [0-9]*/"tokens": 9223372036854775000/'
refused 3 "tokens" $resume
damaged 's/"batch": [0-9]*/"batch": "x"/'
refused 3 "trainer.json" $resume
damaged 's/"kv-heads": 1/"kv-heads": 2/'
refused 3 "num_key_value_heads" $MPIRUN -n 2 $resume
damaged 's/"flags"/"flag"/'
refused 3 "trainer.json" $resume
refused 3 "standard output" sh -c "$bin/generate --checkpoint $tmp/half --tokens 3 >/dev/full"
refused 3 "standard output" sh -c "$bin/prepare --out $tmp/full $tmp/text >/dev/full"
refused 6 "GB are free" $bin/train --layers 256 --width 8192 --expert-width 8192 --experts 64 --data "$tmp/data" $x
refused 6 "GB are free.*--recompute 1 takes.*with it --micro-batch 256" $bin/train --layers 8 --width 512 --experts 8 --seq 4096 --batch 512 --micro-batch 512 --data "$tmp/data" $x
refused 6 "GB are free.*--zero 1 takes.*with it --recompute 1 takes.*with it --micro-batch 128" $bin/train --virtual-ranks 2 --zero 0 --layers 8 --width 512 --experts 8 --seq 4096 --batch 512 --micro-batch 256 --data "$tmp/data" $x
refused 2 "UTF-8" $common --out "$tmp/one" --overwrite --sample-prompt "$(printf '\377')"
ok "the old run is still there" test -s "$(last one)/trainer.json"
ok "a closed pager" sh -c "{ $common --out $tmp/pager --steps 30 $quiet && touch $tmp/pager/ended; } | head -n 1; sleep 2; test -e $tmp/pager/ended"
echo "nodes = two" >"$tmp/cluster.conf"
refused 3 "cluster.conf" $common $x --cluster "$tmp/cluster.conf"
refused 4 "not a finite" $MPIRUN -n 2 $bare --data "$tmp/data" --out "$tmp/nan" --steps 200 $quiet --lr 1e30 --clip 0 --optimizer sgd

echo "$checks checks, $faults faults"
[ $faults = 0 ]
