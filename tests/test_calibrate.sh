#!/usr/bin/env bash
# scripts/calibrate: the file it writes is one that the tools take, its figures are of this run, bad input is refused.
set -u
cd "$(dirname "$0")/.."
bin=${MOE_BUILD:-build}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
. tests/common/checks.sh
figure() { awk -v key="$1" '$1 == key { print $3 }' "$tmp/rates"; }
is() { # is WHAT AWK-CONDITION
    checks=$((checks + 1))
    awk "BEGIN { exit !($2) }" && return
    faults=$((faults + 1))
    echo "FAULT: $1: not $2"
}

small="--seconds 0.1 --width 32 --expert-width 48 --tokens 256"
ends 0 "wrote" scripts/calibrate --ranks 2 --out "$tmp/rates" $small --nodes 2 --name here
for key in nodes:2 ranks_per_node:1 slots:2 sliced:1 dedup:1 measured:1; do is "$key" "\"$(figure "${key%:*}")\" == ${key#*:}"; done
is name "\"$(figure name)\" == \"here\""
# no machine of today is outside of these, and no figure is another's
is flops "$(figure flops) > 1e8 && $(figure flops) < 1e15"
is inter "$(figure inter_bytes_s) > 1e4 && $(figure inter_bytes_s) < 1e12"
is intra "$(figure intra_bytes_s) > 1e7 && $(figure intra_bytes_s) < 1e13"
is overlap "$(figure overlap_permille) >= 0 && $(figure overlap_permille) <= 1000"
is fixed "$(figure plan_fixed_ps) > 1e5 && $(figure plan_fixed_ps) < 1e12"
printf 'ranks 2 experts 4\n300 20 10 5\n200 10 0 1\n' >"$tmp/loads"
ends 0 "topoep" "$bin/plan" "$tmp/rates" "$tmp/loads" --width 32 --expert-width 48 --topk 2
cat */*.h >"$tmp/text"
"$bin/prepare" --out "$tmp/data" "$tmp/text" >/dev/null
ends 0 "costs: $tmp/rates" "$bin/train" --model demo --data "$tmp/data" --layers 1 --seq 32 --batch 4 --steps 1 --eval-every 0 --save-every -1 --out "$tmp/run" \
    --virtual-ranks 2 --nodes 2 --cluster "$tmp/rates"
ends 0 "one node\|inside it" scripts/calibrate --ranks 2 $small --experts 4 --topk 1
ends 2 "experts on 2 ranks" scripts/calibrate --ranks 2 $small --experts 7
ends 2 "topk is 9" scripts/calibrate --ranks 2 $small --topk 9
ends 2 "name is" scripts/calibrate --ranks 2 $small --name "a#b"
ends 2 "needs a value" scripts/calibrate --out
ends 2 "ranks is 'x'" scripts/calibrate --ranks x
ends 3 "cannot write" scripts/calibrate --ranks 1 $small --out "$tmp/nowhere/rates"

echo "$checks checks, $faults faults"
[ $faults = 0 ]
