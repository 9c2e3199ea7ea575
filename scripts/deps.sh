#!/bin/sh
# Installs what is missing to build, test and fetch data, with the distribution's package manager; does nothing, and asks
# nothing of the network, when all is there.
#
# usage: scripts/deps.sh [build] [data] [url] [testbed] [count]     groups of needs; default: build data
#   build   compiler, make, Open MPI (not with MPI=0 in the environment), cmocka, jansson
#   data    perl, to unpack texts from packages
#   url     curl, to download texts
#   testbed iproute2, for scripts/testbed
#   count   valgrind, for tests/test_instructions.sh
# Exit status: 0 all is there; 2 something is missing and cannot be installed here: the message says what to do.
set -eu

for group in "$@"; do
    case $group in
    build | data | url | testbed | count) ;;
    *) echo "deps: '$group' is not known, expected build, data, url, testbed or count" >&2; exit 2 ;;
    esac
done
groups=" ${*:-build data} "
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM HUP

# A probe compiles and links with the flags that the build uses; its output is kept to be shown when it fails for good.
links() { # SOURCE FLAGS...
    source=$1
    shift
    echo "$source" | gcc -x c - -o "$work/probe" "$@"
}
probe_gcc() { links 'int main(void) { return 0; }' -std=c11 -fopenmp; }
probe_make() { make --version; }
probe_jansson() { links '#include <jansson.h>
int main(void) { json_decref(json_object()); return 0; }' -ljansson; }
probe_cmocka() { links '#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>
int main(void) { return cmocka_run_group_tests_name("", (const struct CMUnitTest *)0, 0, 0) != 0; }' -lcmocka; }
# shellcheck disable=SC2046
probe_mpi() {
    compile=$(mpicc --showme:compile) && link=$(mpicc --showme:link) || return 1
    links '#include <mpi.h>
int main(int argc, char **argv) { return MPI_Init(&argc, &argv); }' $compile $link
}
probe_mpirun() { mpirun --version; }
probe_perl() { perl -MCompress::Zlib -e 1; }
probe_curl() { curl --version; }
probe_ip() { ip -V && tc -V; }
probe_valgrind() { valgrind --version; }

# name | group | packages | what it is for
needs='gcc|build|gcc libc6-dev|C compiler with OpenMP: compiles everything
make|build|make|runs the build
jansson|build|libjansson-dev|reads and writes JSON: checkpoints, logs, data
cmocka|build|libcmocka-dev|runs the tests
mpi|build|libopenmpi-dev|Open MPI headers and library: training on several ranks (make MPI=0 does without)
mpirun|build|openmpi-bin|Open MPI launcher: starts the ranks
perl|data|perl|perl with Compress::Zlib: unpacks texts from packages
curl|url|curl|downloads texts
ip|testbed|iproute2|ip and tc: nodes with a throttled network between them on one machine
valgrind|count|valgrind|counts the instructions of a training step, in a test'

# Sets `names` and `packages` to what is missing.
look() {
    names="" packages=""
    while IFS='|' read -r name group package why; do
        case $groups in *" $group "*) ;; *) continue ;; esac
        case ${MPI:-1}$name in 0mpi | 0mpirun) continue ;; esac
        "probe_$name" > "$work/$name.log" 2>&1 < /dev/null && continue
        names="$names $name" packages="$packages $package"
    done <<EOF
$needs
EOF
}

tell() { # of what is missing and what it is for
    while IFS='|' read -r name group package why; do
        case "$names " in *" $name "*) echo "  $name ($why): package $package" ;; esac
    done <<EOF
$needs
EOF
}

give_up() {
    echo "deps: $*" >&2
    exit 2
}

# Another program may hold the lists' lock, which apt does not wait for, and mirrors have bad moments.
try() { # TIMES COMMAND...
    left=$1
    shift
    until "$@"; do
        left=$((left - 1))
        [ "$left" -gt 0 ] || return 1
        echo "deps: that failed; once more in 10 s"
        sleep 10
    done
}

look
if [ -z "$names" ]; then
    echo "deps: all is there"
    exit 0
fi
echo "deps: missing here:"
tell
if ! command -v apt-get > /dev/null; then
    give_up "this system has no apt-get: install the above with its own package manager (the names are Debian's), then run this again"
fi
as_root=""
if [ "$(id -u)" -ne 0 ]; then
    if command -v sudo > /dev/null && sudo -n true 2> /dev/null; then
        as_root=sudo
    else
        give_up "not root, and there is no sudo without a password: run this as root, then start again:
  apt-get update && apt-get install -y --no-install-recommends$packages"
    fi
fi
echo "deps: installing$packages"
apt="$as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300"
# stale lists may still do, so a failed update is not the end
# shellcheck disable=SC2086
try 3 $apt update || echo "deps: the lists of packages could not be renewed; trying with those that are here"
# shellcheck disable=SC2086
try 3 $apt install -y --no-install-recommends $packages ||
    give_up "apt-get could not install$packages (hint: its messages are above; is there a network?)"
look
if [ -n "$names" ]; then
    for name in $names; do cat "$work/$name.log"; done >&2
    echo "deps: installed, but still not usable:" >&2
    tell >&2
    exit 2
fi
echo "deps: all is there now"
