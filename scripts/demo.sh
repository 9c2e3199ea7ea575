#!/usr/bin/env bash
# The demo: a small mixture-of-experts model learns Jane Austen on four ranks, balanced by TopoEP. `make demo` calls it.
#   MOE_DEMO_STEPS=60 scripts/demo.sh    a shorter one
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/mpi_env.sh
steps=${MOE_DEMO_STEPS:-}
[ -f data/austen/train.bin ] && [ -f data/austen/val.bin ] || scripts/get_data.sh austen
$MPIRUN -n 4 build/train --model demo --out runs/demo --overwrite --nodes 2 ${steps:+--steps "$steps"}
echo
build/generate --checkpoint runs/demo --prompt "It is a truth" --tokens 200
