#!/usr/bin/env bash
# The demo: a small mixture-of-experts model learns Jane Austen on four ranks, which pretend to sit on two machines, balanced by
# TopoEP at every layer and microbatch. `make demo` calls it.
#   MOE_DEMO_STEPS=60 scripts/demo.sh    a shorter one
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/mpi_env.sh
[ -f data/austen/train.bin ] && [ -f data/austen/val.bin ] || scripts/get_data.sh austen
$MPIRUN -n 4 build/train --model demo --nodes 2 --steps "${MOE_DEMO_STEPS:-800}" --out runs/demo --overwrite \
    --log-every 20 --eval-every 200 --trace-every 50
echo
echo "a sample, from build/generate --checkpoint runs/demo --prompt 'It is a truth' --tokens 300:"
echo
build/generate --checkpoint runs/demo --prompt "It is a truth" --tokens 300
echo
