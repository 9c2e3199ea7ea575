# What the script tests share; source it from the project's root. $tmp: a folder that the caller made; checks, faults: how many so far.
checks=0 faults=0
fault() {
    faults=$((faults + 1))
    echo "FAULT: $*"
    tail -n 20 "$tmp/out" | sed 's/^/    /'
}
ok() { # ok WHAT COMMAND...: the command succeeds
    local what=$1
    shift
    checks=$((checks + 1))
    "$@" >"$tmp/out" 2>&1 </dev/null || fault "$what: $*"
}
ends() { # ends STATUS TEXT COMMAND...: with that status, and says TEXT
    local want=$1 text=$2 status
    shift 2
    checks=$((checks + 1))
    timeout --kill-after=5 100 "$@" >"$tmp/out" 2>&1 </dev/null
    status=$?
    [ $status = "$want" ] && grep -q -- "$text" "$tmp/out" || fault "status $status, wanted $want and \"$text\": $*"
}
