#!/bin/sh
# Puts deliberate faults into the limiter, one at a time, and fails unless the tests catch every one.
#
#   crates/limiter/mutations.sh [name..]
#
# A fault is a `cfg!(mutation = "..")` in src/. The flag goes to this crate only, through cargo's workspace
# wrapper, so the dependencies are built once. Each fault goes before the unit tests, and before the model if they
# miss it. ALL=1 asks the model in any case; LOOM=1 puts the races among the faults before loom as well. The faults of
# the threads alone go before shuttle instead. TARGET chooses the build directory.
set -u
cd "$(dirname "$0")" || exit 2
export CARGO_TARGET_DIR="${TARGET:-${CARGO_TARGET_DIR:-../../target}/mutations}"
mkdir -p "$CARGO_TARGET_DIR/wrappers" || exit 2
CARGO_TARGET_DIR=$(cd "$CARGO_TARGET_DIR" && pwd)
wrappers="$CARGO_TARGET_DIR/wrappers"
export PROPTEST_MAX_SHRINK_ITERS=0 SCHEDULES="${SCHEDULES:-5000}"
export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16
export CARGO_PROFILE_TEST_DEBUG=0 CARGO_PROFILE_DEV_DEBUG=0
unset RUSTFLAGS

# The classic first: the slot freed when the waiter leaves.
all=$(grep -rhoE 'mutation = "[a-z_]+"' src | cut -d'"' -f2 | sort -u)
classic=slot_follows_waiter
all="$classic $(echo "$all" | grep -vx "$classic")"
races="$classic lost_wakeup barging unclaimed_leaks"
threads="idle_thread_leaves_a_job thread_not_woken"

wrap() { # a compiler that sets one fault
    printf '#!/bin/sh\nexec "$@" --cfg "mutation=\\"%s\\""\n' "$1" >"$wrappers/$1"
    chmod +x "$wrappers/$1"
    export RUSTC_WORKSPACE_WRAPPER="$wrappers/$1"
}

among() { # a word and a list
    case " $2 " in *" $1 "*) true ;; *) false ;; esac
}

build() { # what does not build is not caught
    "$@" --no-run >"$CARGO_TARGET_DIR/log" 2>&1 && return
    cat "$CARGO_TARGET_DIR/log"
    echo "$name does not build"
    exit 1
}

suite() { # runs one of the suites; a hang is a failure too
    timeout 90 "$@" >"$CARGO_TARGET_DIR/log" 2>&1
}

test="cargo test --quiet -p tidegate-limiter"

under() { # a checker with a flag, a directory and a test of its own
    set -- env RUSTFLAGS="--cfg $1" CARGO_TARGET_DIR="${CARGO_TARGET_DIR%/*}/$1" $test --test "$1" --release
    build "$@"
    suite "$@"
}

name=none
wrap none
build $test --lib --test model
if ! { suite $test --lib && suite $test --test model; }; then
    cat "$CARGO_TARGET_DIR/log"
    echo "the suite fails without any fault"
    exit 1
fi

escaped=0
caught=0
for name in ${*:-$all}; do
    wrap "$name"
    by=""
    if among "$name" "$threads $classic"; then
        under shuttle || by="$by shuttle"
    fi
    if ! among "$name" "$threads"; then
        build $test --lib
        suite $test --lib || by="$by unit"
    fi
    if [ -z "$by" ] || [ "${ALL:-0}" = 1 ]; then
        build $test --test model
        suite $test --test model || by="$by model"
    fi
    if [ "${LOOM:-0}" = 1 ] && among "$name" "$races"; then
        if under loom; then
            by=""
            echo "$name: ESCAPED loom"
        else
            by="$by loom"
        fi
    fi
    echo "$name: ${by:-ESCAPED}"
    if [ -n "$by" ]; then caught=$((caught + 1)); else escaped=$((escaped + 1)); fi
done
echo "$caught faults caught, $escaped escaped"
[ "$escaped" = 0 ]
