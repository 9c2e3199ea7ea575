#!/usr/bin/env bash
# scripts/testbed: membership, equal training, the throttle, and that nothing is left behind. 77 where namespaces are not permitted.
set -u
cd "$(dirname "$0")/.."
bin=${MOE_BUILD:-build} me=t$$ # testbeds of this test's own
tmp=$(mktemp -d)
trap 'for t in $me ${me}b ${me}c; do scripts/testbed down --name $t; done >/dev/null 2>&1; rm -rf "$tmp"' EXIT
. tests/common/checks.sh

# ---- bad input ----------------------------------------------------------------------------------------------------------
ends 2 "expected up, run" scripts/testbed upp
ends 2 "nodes is '0'" scripts/testbed up --name $me --nodes 0
ends 2 "rate is 'fast'" scripts/testbed up --name $me --rate fast
ends 2 "name is 'a b'" scripts/testbed up --name "a b"
ends 2 "name needs a value" scripts/testbed down --name ""
ends 2 "needs a command" scripts/testbed run --name $me
ends 2 "not known" scripts/testbed up --name $me --colour red

# ---- up -----------------------------------------------------------------------------------------------------------------
ip -br link >"$tmp/links"
scripts/testbed up --name $me >"$tmp/out" 2>&1
status=$?
[ $status != 77 ] || { tail -n 1 "$tmp/out" && exit 77; }
ok "up ($(cat "$tmp/out"))" test $status = 0
ends 0 "up already" scripts/testbed up --name $me
ends 2 "is up with" scripts/testbed up --name $me --rate 100mbit
ends 2 "is up with" scripts/testbed run --name $me --nodes 3 -- true
ends 0 "2 nodes x 2 ranks, 400mbit" scripts/testbed status --name $me
ok "hosts" sh -c "scripts/testbed run --name $me hostname | sort | tr '\n' ' ' | grep -x 'node0 node0 node1 node1 '"
ok "arguments arrive as they are" sh -c "scripts/testbed run --name $me echo 'a  b' '\$HOME' | grep -qxF 'a  b \$HOME'"
[ "$(nproc)" -lt 2 ] || ok "a node has cores of its own" sh -c "scripts/testbed run --name $me sh -c 'echo \$(hostname) \$(taskset -pc \$\$ | sed s/.*://)' |
    sort -u | awk 'NR == 1 { a = \$2 } END { exit !(NR == 2 && a != \$2) }'"
ends 5 "" scripts/testbed run --name $me -- sh -c 'exit 5'

# ---- training is the same as without the network ---------------------------------------------------------------------------
cat */*.h >"$tmp/text"
ok prepare "$bin/prepare" --out "$tmp/data" "$tmp/text"
train="$bin/train --layers 2 --width 32 --heads 2 --kv-heads 1 --head-size 16 --experts 8 --topk 2 --expert-width 24 --seq 32 --batch 8 \
    --router-skew 1.0 --data $tmp/data --lr 0.01 --steps 6 --eval-every 0 --save-every 6 --slots 2"
ok "2 x 2 processes" scripts/testbed run --name $me -- $train --out "$tmp/cluster"
ok "2 x 2 threads" $train --out "$tmp/threads" --virtual-ranks 4 --nodes 2
ok "one rank" $train --out "$tmp/one"
ok "the log says 2 nodes of 4 ranks" grep -q '"ranks":4,"nodes":2,' "$tmp/cluster/log.jsonl"
for f in "$tmp"/threads/step_*/*.safetensors; do ok "the same bits" cmp "$f" "$tmp/cluster/${f#"$tmp"/threads/}"; done
losses() { sed -n 's/^{"step":.*"loss":\([0-9.]*\),.*/\1/p' "$1/log.jsonl"; }
ok "losses as on one rank" sh -c "[ \$(wc -l <$tmp/a) = 6 ] || exit 1; paste $tmp/a $tmp/b | awk '(\$1-\$2)^2 > 1e-6 { exit 1 }'" \
    "$(losses "$tmp/cluster" >"$tmp/a"; losses "$tmp/one" >"$tmp/b")"

# ---- the throttle: a second testbed at a quarter of the rate, side by side ----------------------------------------------------
ok "a second one" scripts/testbed up --name ${me}b --rate 100mbit
measure() { # NAME RATE TRIES: bytes between nodes per second within 25 % of RATE, inside a node far more; a busy machine may need more than one
    local i
    for ((i = 0; i < $3; i++)); do
        scripts/testbed run --name "$1" -- "$bin/calibrate" --seconds 0.2 >"$tmp/rates" || return 1
        awk -v want="$2" '$1 == "inter_bytes_s" { node = 2 * $3; one = $NF } $1 == "intra_bytes_s" { inside = $3 }
            END { print node, one, inside; exit !(node > 0.75 * want && node < 1.25 * want && one > 0.75 * want && one < 1.25 * want && inside > 5 * node) }' \
            "$tmp/rates" && return
    done
    return 1
}
ok "400 Mbit/s are 50 MB/s" measure $me 50e6 3
ok "100 Mbit/s are 12.5 MB/s" measure ${me}b 12.5e6 3
checks=$((checks + 1))
measure ${me}b 50e6 1 >/dev/null && faults=$((faults + 1)) && echo "FAULT: 100 Mbit/s pass for 400"

# ---- nothing is left ---------------------------------------------------------------------------------------------------------
gone() { # NAME: no namespace, interface, folder or process
    ! ip netns list | grep "moe-$1-" && ip -br link | awk '{ print $1 }' | cmp - <(awk '{ print $1 }' "$tmp/links") && ! [ -e "/run/moe-testbed/$1" ] &&
        ! pgrep -f "of $1 sleeps"
}
sleeper() { echo "sleep 300; : of $1 sleeps"; }
scripts/testbed run --name ${me}c -- sh -c "$(sleeper ${me}c)" 2>/dev/null & # makes one of its own
pid=$!
for _ in $(seq 100); do pgrep -f "^sh -c.*of ${me}c sleeps" >/dev/null && break || sleep 0.1; done
kill -TERM $pid
wait $pid
ok "a stopped run takes its testbed down" gone ${me}c
scripts/testbed run --name $me -- sh -c "$(sleeper $me)" 2>/dev/null &
pid=$!
for _ in $(seq 100); do pgrep -f "^sh -c.*of $me sleeps" >/dev/null && break || sleep 0.1; done
ok "down while something runs" scripts/testbed down --name $me
wait $pid
ok "nothing is left" gone $me
ends 1 "not up" scripts/testbed status --name $me
ends 0 "was not up" scripts/testbed down --name $me
ok "the other still is there" scripts/testbed run --name ${me}b true
ok "down" scripts/testbed down --name ${me}b
ok "nothing is left of the other" gone ${me}b

echo "$checks checks, $faults faults"
[ $faults = 0 ]
