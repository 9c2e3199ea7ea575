#!/bin/sh
# scripts/deps.sh and scripts/get_data.sh with fake tools: PATH holds one folder of stand-ins, which log how they are called.
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset MPI BUILD FAKE_UID # as `make MPI=0 test` would hand down
passed=0 failed=0

# ---- stand-ins -------------------------------------------------------------------------------------------------------

# A folder of real basic tools; whatever else a case needs, it gets from `fake`.
begin() {
    case_name=$1
    rm -rf "$work/bin" "$work/log" "$work/state"
    mkdir "$work/bin" "$work/state"
    : > "$work/log"
    for tool in sh env cat rm mkdir mktemp mv head tr wc ls dirname printf sha256sum; do
        ln -s "$(command -v $tool)" "$work/bin/$tool"
    done
    fake id 'echo "${FAKE_UID:-0}"'
    fake sleep 'exit 0'
}

fake() { # NAME BODY
    printf '#!/bin/sh\necho "%s $*" >> "%s/log"\nstate="%s/state"\n%s\n' "$1" "$work" "$work" "$2" > "$work/bin/$1"
    chmod +x "$work/bin/$1"
}

# A compiler that finds the headers of $work/state/NAME.h only; the probes hand it a source on standard input.
fake_gcc() {
    fake gcc 'source=$(cat)
for header in mpi jansson cmocka; do
    case $source in *"<$header.h>"*) [ -e "$state/$header.h" ] || { echo "fatal error: $header.h" >&2; exit 1; } ;; esac
done'
}

fake_all() {
    fake_gcc
    for tool in make mpicc mpirun perl curl; do fake $tool 'exit 0'; done
    for header in mpi jansson cmocka; do : > "$work/state/$header.h"; done
}

# An apt-get that brings a package's tool or header, unless $state says it is broken.
fake_apt() {
    fake apt-get 'case "$*" in
*update*) [ ! -e "$state/update-fails" ] || exit 100 ;;
*install*)
    if [ -e "$state/lock" ]; then rm "$state/lock"; exit 100; fi
    [ ! -e "$state/install-fails" ] || exit 100
    [ ! -e "$state/install-is-hollow" ] || exit 0
    case "$*" in *libjansson-dev*) : > "$state/jansson.h" ;; esac
    case "$*" in *libcmocka-dev*) : > "$state/cmocka.h" ;; esac
    case "$*" in *libopenmpi-dev*) : > "$state/mpi.h" ;; esac ;;
esac'
}

run() { # COMMAND...
    out=$(PATH="$work/bin" "$@" 2>&1 < /dev/null)
    status=$?
}

# ---- assertions ------------------------------------------------------------------------------------------------------

check() { # WHAT COMMAND...
    what=$1
    shift
    if "$@"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        printf 'FAILED %s: %s\n  status %s, output:\n%s\n  log:\n%s\n' "$case_name" "$what" "$status" "$out" "$(cat "$work/log")"
    fi
}
status_is() { check "status $1" [ "$status" -eq "$1" ]; }
says() { check "says '$1'" contains "$out" "$1"; }
calls() { check "calls '$1'" contains "$(cat "$work/log")" "$1"; }
never_calls() { check "never calls '$1'" lacks "$(cat "$work/log")" "$1"; }
contains() { case $1 in *"$2"*) return 0 ;; *) return 1 ;; esac; }
lacks() { ! contains "$1" "$2"; }

# ---- deps.sh ---------------------------------------------------------------------------------------------------------

deps=$root/scripts/deps.sh

begin 'all is there'
fake_all; fake_apt
run "$deps"
status_is 0; says 'all is there'; never_calls apt-get; never_calls curl

begin 'one header is missing'
fake_all; fake_apt; rm "$work/state/jansson.h"
run "$deps"
status_is 0; says 'libjansson-dev'; says 'reads and writes JSON'; says 'all is there now'
calls 'DPkg::Lock::Timeout=300 update'; calls 'DPkg::Lock::Timeout=300 install -y --no-install-recommends libjansson-dev'
never_calls libcmocka-dev
check 'update comes before install' contains "$(tr '\n' ' ' < "$work/log")" 'update apt-get'

begin 'several are missing'
fake_all; fake_apt; rm "$work/state/cmocka.h" "$work/state/mpi.h"
run "$deps"
status_is 0; calls 'libcmocka-dev libopenmpi-dev'; never_calls libjansson-dev

begin 'a library is found by linking, not by its name'
fake_all; fake_apt
run "$deps"
calls '-lcmocka'; calls '-ljansson'; calls 'mpicc --showme:link'; calls '-fopenmp'

begin 'MPI=0 wants no MPI'
fake_all; fake_apt; rm "$work/state/mpi.h" "$work/bin/mpicc" "$work/bin/mpirun"
run env MPI=0 "$deps"
status_is 0; says 'all is there'; never_calls apt-get

begin 'groups'
fake_all; fake_apt; rm "$work/bin/curl" "$work/state/cmocka.h"
run "$deps" data
status_is 0; never_calls apt-get; never_calls gcc
fake curl 'exit 0'; mv "$work/bin/curl" "$work/state/curl"
fake apt-get 'case "$*" in *install*curl*) mv "$state/curl" "${0%/*}/curl" ;; esac'
run "$deps" url
status_is 0; calls 'recommends curl'
fake apt-get 'case "$*" in *install*iproute2*) for t in ip tc; do cp "${0%/*}/make" "${0%/*}/$t"; done ;; esac'
ln -s "$(command -v cp)" "$work/bin/cp"
run "$deps" testbed
status_is 0; calls 'recommends iproute2'
run "$deps" nonsense
status_is 2; says "'nonsense' is not known"

begin 'the package lock was held'
fake_all; fake_apt; rm "$work/state/cmocka.h"; : > "$work/state/lock"
run "$deps"
status_is 0; says 'once more'; says 'all is there now'

begin 'lists cannot be renewed, packages are there all the same'
fake_all; fake_apt; rm "$work/state/cmocka.h"; : > "$work/state/update-fails"
run "$deps"
status_is 0; says 'could not be renewed'; says 'all is there now'

begin 'packages cannot be had'
fake_all; fake_apt; rm "$work/state/cmocka.h"; : > "$work/state/install-fails"
run "$deps"
status_is 2; says 'could not install libcmocka-dev'

begin 'installed, yet not usable'
fake_all; fake_apt; rm "$work/state/cmocka.h"; : > "$work/state/install-is-hollow"
run "$deps"
status_is 2; says 'still not usable'; says 'fatal error: cmocka.h'

begin 'not root, no sudo'
fake_all; fake_apt; rm "$work/state/cmocka.h"
run env FAKE_UID=1000 "$deps"
status_is 2; says 'not root'; says 'apt-get install -y --no-install-recommends libcmocka-dev'; never_calls apt-get

begin 'not root, sudo wants a password'
fake_all; fake_apt; rm "$work/state/cmocka.h"; fake sudo '[ "$1" != -n ]'
run env FAKE_UID=1000 "$deps"
status_is 2; says 'not root'; never_calls apt-get

begin 'not root, sudo without password'
fake_all; fake_apt; rm "$work/state/cmocka.h"; fake true 'exit 0'
fake sudo '[ "$1" != -n ] || shift; exec "$@"'
run env FAKE_UID=1000 "$deps"
status_is 0; calls 'sudo env DEBIAN_FRONTEND=noninteractive apt-get'; says 'all is there now'

begin 'no apt'
fake_all; rm "$work/state/cmocka.h" "$work/bin/perl"
run "$deps"
status_is 2; says 'no apt-get'; says 'libcmocka-dev'; says 'Compress::Zlib'

begin 'no compiler at all'
fake_all; fake_apt; rm "$work/bin/gcc"; : > "$work/state/install-is-hollow"
run "$deps"
status_is 2; calls 'gcc libc6-dev'

# ---- get_data.sh -----------------------------------------------------------------------------------------------------

# A tree with the scripts and a build/prepare of its own, so that nothing of the real one is touched.
begin_data() {
    begin "$1"
    rm -rf "$work/tree"
    mkdir -p "$work/tree/scripts" "$work/tree/data" "$work/tree/build"
    cp "$root/scripts/get_data.sh" "$root/scripts/deps.sh" "$work/tree/scripts/"
    fake_all
    fake prepare ': > train.bin; : > val.bin'
    mv "$work/bin/prepare" "$work/tree/build/prepare"
}
get=$work/tree/scripts/get_data.sh

begin_data 'unknown name'
run "$get" wikipedia
status_is 2; says "'wikipedia' is not known"; says austen

begin_data 'there already'
mkdir "$work/tree/data/austen"; : > "$work/tree/data/austen/train.bin"; : > "$work/tree/data/austen/val.bin"
run "$get"
status_is 0; says 'there already'; never_calls apt-get

begin_data 'no apt'
run "$get" austen
status_is 3; says 'apt-get and dpkg-deb are needed'
check 'nothing is left' [ -z "$(ls -A "$work/tree/data")" ]

begin_data 'the archive cannot be reached'
fake apt-get 'exit 100'; fake dpkg-deb 'exit 0'
run "$get" austen
status_is 3; says 'could not be downloaded'
calls update; check 'nothing is left' [ -z "$(ls -A "$work/tree/data")" ]

begin_data 'another text than expected'
fake apt-get 'case "$*" in *download*) : > fake.deb ;; esac'
fake dpkg-deb 'mkdir -p "$3/usr/lib/R/site-library/janeaustenr/data"; : > "$3/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"'
fake perl 'echo "not by Jane Austen"'
run "$get" austen
status_is 3; says 'has sha256'; says 'expected db2cdbf6'; never_calls prepare
check 'nothing is left' [ -z "$(ls -A "$work/tree/data")" ]

# curl -fL ... -o FILE URL, with what $state/reply holds
fake_curl() {
    fake curl 'case "$*" in --version) exit 0 ;; esac
[ ! -e "$state/curl-fails" ] || exit 7
while [ "$1" != -o ]; do shift; done
cat "$state/reply" >> "$2"'
}

begin_data 'download is cut off, then resumed'
fake_curl; echo text > "$work/state/reply"; : > "$work/state/curl-fails"
run "$get" tinystories
status_is 3; says 'could not be downloaded'; never_calls prepare
rm "$work/state/curl-fails"
run "$get" tinystories
status_is 0; calls '-C - -o data/download/tinystories-train.txt.part'; calls 'TinyStoriesV2-GPT4-valid.txt'
calls 'prepare --out . --val-fraction 0'; calls 'prepare --out . --val-fraction 1'; says 'data/tinystories is ready'
check 'shards are in place' [ -e "$work/tree/data/tinystories/val.bin" ]

begin_data 'a web page instead of a file'
fake_curl; echo '<!DOCTYPE HTML><html>log in</html>' > "$work/state/reply"
run "$get" tinyshakespeare
status_is 3; says 'a web page instead of the file'
check 'the page is not kept' [ -z "$(ls -A "$work/tree/data/download")" ]

begin_data 'a shard of the wrong size'
fake_curl; echo short > "$work/state/reply"
run "$get" fineweb 2
status_is 3; says 'fineweb_val_000000.bin has 6 bytes, expected 200001024'

begin_data 'how many shards'
fake_curl
for count in 0 104 -1 two; do
    run "$get" fineweb $count
    status_is 2
done
never_calls 'curl -fL'

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
