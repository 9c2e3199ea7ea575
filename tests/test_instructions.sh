#!/usr/bin/env bash
# Instructions of one training step, counted by valgrind's callgrind: a small fixed model, one thread, the AVX2 kernels. Unlike
# a time the count repeats, on a busy machine too, so a step that has become longer shows. Budgets: tests/data/instructions.txt.
#   tests/test_instructions.sh            fails when the total is 3 % above its budget, or a function 10 %, and names what grew
#   tests/test_instructions.sh --update   writes the budgets anew: after a change that is worth its instructions
# The counts are those of gcc 12 on x86-64 with AVX2 and FMA; elsewhere, and where valgrind is not, the test is skipped (77).
set -u
cd "$(dirname "$0")/.."
bin=${MOE_BUILD:-build} budgets=tests/data/instructions.txt compiler=12
skip() { echo "$*"; exit 77; }
[ "$bin" = build ] || skip "counted in build/ only, not in $bin"
command -v valgrind >/dev/null || skip "no valgrind (scripts/deps.sh installs it)"
grep -qw avx2 /proc/cpuinfo && grep -qw fma /proc/cpuinfo || skip "this processor has no AVX2 and FMA, the budgets are for them"
[ "$(gcc -dumpversion)" = $compiler ] && grep -q 'gcc -std=.* -O3 ' "$bin/flags" || skip "the budgets are for gcc $compiler with -O3"
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

for i in $(seq 400); do echo "sentence $i of a text that never changes, $((i * i % 97)) and $((i * 7919 % 1009))."; done >"$tmp/text"
"$bin/prepare" --out "$tmp/data" "$tmp/text" >/dev/null || exit 1
# OMP_WAIT_POLICY: the program stays the process that was started (kernels/start.h)
OMP_WAIT_POLICY=passive valgrind --tool=callgrind --toggle-collect=trainer_step --callgrind-out-file="$tmp/counts" \
    "$bin/train" --virtual-ranks 1 --threads 1 --layers 2 --width 64 --heads 4 --kv-heads 2 --head-size 16 --experts 8 --topk 2 \
    --expert-width 64 --seq 64 --batch 4 --steps 1 --eval-every 0 --save-every -1 --data "$tmp/data" --out "$tmp/run" >"$tmp/log" 2>&1 ||
    { tail -n 20 "$tmp/log"; exit 1; }

# "function instructions", largest first; a function's inlined parts and its clones and outlined loops count as one
awk '/^c?fn=/ { id = name = $0
                sub(/^[^(]*/, "", id); sub(/\).*/, ")", id); sub(/^[^)]*\) ?/, "", name)
                if (name != "") names[id] = name
                if (/^fn=/) { now = names[id]; sub(/[.@].*/, "", now) }
                next }
     /^calls=/ { getline; next }
     /^[0-9+*-]/ { n[now] += $2; total += $2 }
     END { print "total", total; for (f in n) print f, n[f] }' "$tmp/counts" | sort -k 2,2nr >"$tmp/now"
if [ "${1:-}" = --update ]; then
    awk 'NR == 1 { total = $2 } $2 >= total / 200' "$tmp/now" >$budgets
    echo "$(wc -l <$budgets) budgets written to $budgets"
    exit
fi
awk 'NR == FNR { budget[$1] = $2; next }
     NR != FNR && !seen++ { total = $2 }
     { now[$1] = $2 }
     END {
         for (f in now) {
             was = f in budget ? budget[f] : 0
             if (now[f] - was > total / 200 && now[f] > (f == "total" ? 1.03 : 1.10) * was) {
                 printf "%s: %d instructions, its budget is %d (%+.1f %% of the whole step)\n", f, now[f], was, 100 * (now[f] - was) / budget["total"]
                 bad = 1
             }
         }
         printf "%d instructions, the budget is %d (%+.2f %%)%s\n", now["total"], budget["total"], 100 * (now["total"] / budget["total"] - 1),
             now["total"] < 0.97 * budget["total"] ? ": less, write the budgets anew (--update)" : ""
         exit bad
     }' $budgets "$tmp/now"
