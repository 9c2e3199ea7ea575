#!/bin/sh
# Finds out what this machine has, by compiling and linking a small program with the very flags the build will use.
#   scripts/probe.sh OUT.mk CC "CFLAGS" MPI(0|1)
# Writes make variables to OUT.mk and what was tried, how and with what result to OUT.log (shown by `make info`).
set -u
out=$1 cc=$2 cflags=$3 mpi=$4
log=${out%.mk}.log
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
: >"$log"

# try NAME FLAGS <program: compiles and links it; the answer is the exit status
try() {
    name=$1 flags=$2
    cat >"$dir/probe.c"
    if $cc $cflags "$dir/probe.c" -o "$dir/probe" $flags >"$dir/out" 2>&1; then found="found"; else found="NOT FOUND"; fi
    printf '%-10s %-9s  %s\n' "$name" "$found" "$cc $cflags probe.c $flags" >>"$log"
    [ "$found" = found ] || sed -n '1,3s/^/             /p' "$dir/out" >>"$log"
    [ "$found" = found ]
}

missing=""
try compiler "" <<'C' || missing="$missing a C compiler (gcc);"
int main(void) { return 0; }
C
try openmp "-fopenmp" <<'C' || missing="$missing OpenMP (part of gcc);"
#include <omp.h>
int main(void) { return omp_get_max_threads() < 1; }
C
try jansson "-ljansson" <<'C' || missing="$missing jansson (libjansson-dev);"
#include <jansson.h>
int main(void) { json_decref(json_object()); return 0; }
C
if try cmocka "-lcmocka" <<'C'; then cmocka=1; else cmocka=0; fi
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
int main(void) { return cmocka_run_group_tests_name("none", (struct CMUnitTest *)0, 0, 0); }
C
mpi_cflags="" mpi_libs=""
if [ "$mpi" = 1 ]; then
    mpi_cflags=$(mpicc --showme:compile 2>/dev/null) mpi_libs=$(mpicc --showme:link 2>/dev/null)
    try mpi "$mpi_cflags $mpi_libs" <<'C' || missing="$missing Open MPI (libopenmpi-dev openmpi-bin, or build for one rank with make MPI=0);"
#include <mpi.h>
int main(int n, char **v) { MPI_Init(&n, &v); return MPI_Finalize(); }
C
fi
{
    echo "HAVE_CMOCKA = $cmocka"
    echo "MPI_CFLAGS = $mpi_cflags"
    echo "MPI_LIBS = $mpi_libs"
    [ -z "$missing" ] || echo "MISSING = ${missing%;}"
} >"$out"
