#!/usr/bin/env bash
# scripts/ablate on a tiny grid: the table against the logs, resumption, the report, bad input; scripts/policies: what it concludes
# from given measurements. Ends with the number of checks.
set -u
cd "$(dirname "$0")/.."
command -v python3 >/dev/null || { echo "python3 is missing" && exit 77; }
bin=${MOE_BUILD:-build}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
. tests/common/checks.sh
says() { checks=$((checks + 1)) && grep -q -- "$1" "${2:-$tmp/out}" || fault "\"$1\" is not in ${2:-the output}"; }

cat */*.h >"$tmp/text"
"$bin/prepare" --out "$tmp/data" "$tmp/text" >/dev/null
printf '%s\n' 'name = cheap' 'nodes = 1' 'ranks_per_node = 2' 'slots = 2' 'pair_compute_ps = 100' 'pair_inter_ps = 0' 'pair_intra_ps = 10' \
    'copy_inter_ps = 0' 'copy_intra_ps = 1' 'overlap_permille = 0' 'plan_fixed_ps = 0' >"$tmp/cheap.conf" # so that there are copies
grid="scripts/ablate balance=none,topoep seeds=2 steps=4 np=2 out=$tmp/abl data=$tmp/data layers=1 width=32 heads=2 kv-heads=1 head-size=16 experts=8
    topk=2 expert-width=24 seq=32 batch=4 router-skew=1 final-windows=4 cluster=$tmp/cheap.conf"

# ---- bad input: refused before anything runs ---------------------------------------------------------------------------------
ends 2 "balance=topoe is not known" scripts/ablate balance=none,topoe
ends 2 "seeds=x" scripts/ablate seeds=x
ends 2 "not KEY=VALUE" scripts/ablate steps
ends 2 "'steps' is given twice" scripts/ablate steps=3 steps=4
ends 2 "'seed' is set by the grid" scripts/ablate seed=3
ends 2 "one twice" scripts/ablate lr=1,1
ends 2 "not known" scripts/ablate --stetbed
ends 2 "own (hint" scripts/ablate --testbed np=4
ends 2 "leyers" scripts/ablate leyers=3 steps=1 out="$tmp/bad"
ends 0 "2 balancers x 2 configurations x 3 seeds = 12 runs" scripts/ablate --dry-run lr=1,2 out="$tmp/bad"

# ---- the grid; a run that was killed is done again, a finished one never ------------------------------------------------------------
ends 0 "4 runs on 2 ranks, 0 of them finished" $grid
says "\[4/4\]"
says "not significant\|n\.s\.\|significant difference"
cp "$tmp/abl/table.csv" "$tmp/first.csv"
stamp=$(stat -c %Y%i "$tmp/abl/runs/none-seed1/log.jsonl")
rm "$tmp/abl/runs/topoep-seed2/ablate.json"
printf '{"step"' >>"$tmp/abl/runs/topoep-seed2/log.jsonl"
ends 0 "3 of them finished" $grid
checks=$((checks + 1))
[ "$stamp" = "$(stat -c %Y%i "$tmp/abl/runs/none-seed1/log.jsonl")" ] || fault "a finished run was done again"
ends 0 "4 of them finished" $grid
ends 2 "made with other settings (lr differ)" $grid lr=0.5
ends 0 "tok/s" $grid --report
ends 2 "8 runs of the grid are not finished" $grid lr=0.1,0.2 --report
ends 3 "Not a directory" scripts/ablate data="$tmp/data" steps=1 out="$tmp/text"
cp "$tmp/abl/runs/topoep-seed1/log.jsonl" "$tmp/log"
printf '{"step": 5}\n' >>"$tmp/abl/runs/topoep-seed1/log.jsonl"
ends 2 "is damaged" $grid --report
mv "$tmp/log" "$tmp/abl/runs/topoep-seed1/log.jsonl"
printf '{"fl' >"$tmp/abl/runs/topoep-seed1/ablate.json" # stopped at its very end
ends 0 "3 of them finished" $grid
printf garbage >"$tmp/abl/runs/none-seed1/route.bin"
ends 2 "no routing trace" $grid

# ---- the numbers: same loss whatever the balancer and the second time; means and differences as in the logs ------------------------
for f in table.md table.csv report.html loss.svg maxvio.svg time.svg; do checks=$((checks + 1)) && [ -s "$tmp/abl/$f" ] || fault "$f is not there"; done
says "</html>" "$tmp/abl/report.html"
checks=$((checks + 1))
python3 - "$tmp/abl" "$tmp/first.csv" >"$tmp/out" 2>&1 <<'EOP' || fault "the table differs from the logs"
import csv, json, math, sys, xml.dom.minidom
out, first = sys.argv[1:]
logs = {}
for b in ("none", "topoep"):
    for s in (1, 2):
        rows = [json.loads(x) for x in open(f"{out}/runs/{b}-seed{s}/log.jsonl")]
        assert rows[0]["header"]["flags"]["seed"] == s and rows[0]["header"]["flags"]["balance"] == b
        logs[b, s] = [r for r in rows if "step" in r]
        assert [r["step"] for r in logs[b, s]] == [1, 2, 3, 4]
table = {(r["balance"], int(r["seed"])): r for r in csv.DictReader(open(f"{out}/table.csv"))}
before = {(r["balance"], int(r["seed"])): r for r in csv.DictReader(open(first))}
assert set(table) == set(logs)
speed = {}
for key, log in logs.items():
    row = {k: float(v) for k, v in table[key].items() if k not in ("balance", "seed")}
    near = lambda a, b: abs(a - b) <= 1e-12 * abs(b)
    assert near(row["val_bits"], log[-1]["val_bits_per_byte"]) and near(row["loss"], sum(x["loss"] for x in log) / 4)
    assert near(row["maxvio"], sum(x["maxvio"] for x in log) / 4) and row["maxvio_p95"] == max(x["maxvio"] for x in log)
    assert near(row["tok_s"], speed.setdefault(key, (log[2]["tok_s"] + log[3]["tok_s"]) / 2))
    assert near(row["weight_mb"], sum(x["weight_bytes"] for x in log) / 4e6)
    assert float(before[key]["loss"]) == row["loss"], "the same run twice"
for s in (1, 2):  # fp32, a few steps: rounding only
    assert logs["none", s][0]["maxvio"] == logs["topoep", s][0]["maxvio"]
    assert all(abs(a["loss"] - b["loss"]) < 1e-4 for a, b in zip(logs["none", s], logs["topoep", s]))
assert any(x["copies"] for x in logs["topoep", 1]) and logs["none", 1][3]["loss"] != logs["none", 2][3]["loss"]
d = [100 * (speed["topoep", s] / speed["none", s] - 1) for s in (1, 2)]
mean, sd = sum(d) / 2, abs(d[0] - d[1]) / math.sqrt(2)
line = next(x for x in open(f"{out}/table.md") if x.startswith("| topoep"))
told = f"{mean:+.1f} % " + ("*" if abs(mean) > 12.706 * sd / math.sqrt(2) else "(n.s.)")
assert told in line, (told, line)
for name in ("loss", "maxvio", "time"):
    xml.dom.minidom.parse(f"{out}/{name}.svg")
EOP

# ---- scripts/policies: verdicts from measurements made up for the purpose -------------------------------------------------------------
pol="scripts/policies --out $tmp/pol --balance none,llep,topoep --rounds 3"
ends 0 "no whole round" $pol --parts skew --tables
invent() { # POLICY TOK_S...: of rounds 0, 1, ...
    local policy=$1 round=0 rate
    shift
    for rate; do
        echo "{\"part\":\"skew\",\"round\":$round,\"balance\":\"$policy\",\"copies\":1,\"tok_s\":$rate,\"rank_before\":2,\"rank_after\":1,\"inter_mb\":3,
            \"weight_mb\":4,\"stage_ms\":{\"experts\":1,\"dispatch\":2,\"combine\":3,\"copies\":4,\"plan\":5,\"wait\":6}}" | tr -d '\n' && echo
        round=$((round + 1))
    done >>"$tmp/pol/results.jsonl"
}
invent none 100 200 300
invent llep 110 221 329
invent topoep 120 240 361 999
# ratios to none 1.2, 1.2, 1.20333: mean 1.201, sd 0.00192, half width 4.303 sd / sqrt(3) = 0.005; to llep 1.09091, 1.08597, 1.09726: 1.091 +- 0.014
ends 0 "topoep is first: 1.091 ± 0.014 x llep, the next or better; 1.201 ± 0.005 x none, aim 1.15: holds" $pol --parts skew --tables
says "| topoep | 240 | 1.201 ± 0.005 | - | 2.00 > 1.00 | 1.0 | 3.0 | 4.0 | 1 | 5 | 4 | 5.0 | 6 |"
sed -i 's/"llep","copies":1,"tok_s":110/"llep","copies":1,"tok_s":200/' "$tmp/pol/results.jsonl"
ends 0 "topoep is within noise of first: .* n.s. x llep" $pol --parts skew --tables
sed -i 's/"tok_s":221/"tok_s":400/; s/"tok_s":329/"tok_s":600/' "$tmp/pol/results.jsonl"
ends 0 "topoep is NOT FIRST: 0.601" $pol --parts skew --tables
sed -i 's/"steps": 6/"steps": 5/' "$tmp/pol/results.jsonl"
ends 2 "other settings" $pol --tables
printf '{"part"' >"$tmp/pol/results.jsonl"
ends 2 "jsonl:1 is not JSON" $pol --tables
ends 2 "expected some of skew" scripts/policies --out "$tmp/pol2" --parts skw
ends 2 "balance names 'lep'" scripts/policies --out "$tmp/pol2" --balance lep

echo "$checks checks, $faults faults"
[ $faults = 0 ]
