#!/bin/sh
# Puts deliberate faults into the limiter, one at a time, and fails unless the tests catch every one.
#
#   crates/limiter/mutations.sh [name..]
#
# A fault is a `cfg!(mutation = "..")` in src/. The flag goes to this crate only, through cargo's workspace
# wrapper, so the dependencies are built once. TARGET chooses the build directory. With LOOM=1 the races among the
# faults are put before loom as well.
set -u
cd "$(dirname "$0")" || exit 2
export CARGO_TARGET_DIR="${TARGET:-${CARGO_TARGET_DIR:-../../target}/mutations}"
export PROPTEST_MAX_SHRINK_ITERS=0
wrappers="$CARGO_TARGET_DIR/wrappers"
mkdir -p "$wrappers" || exit 2
wrappers=$(cd "$wrappers" && pwd)

# The classic first: the slot freed when the waiter leaves.
all=$(grep -rhoE 'mutation = "[a-z_]+"' src | cut -d'"' -f2 | sort -u)
all="slot_follows_waiter $(echo "$all" | grep -vx slot_follows_waiter)"

wrap() { # a compiler that sets one fault
    printf '#!/bin/sh\nexec "$@" --cfg "mutation=\\"%s\\""\n' "$1" >"$wrappers/$1"
    chmod +x "$wrappers/$1"
    export RUSTC_WORKSPACE_WRAPPER="$wrappers/$1"
}

suite() { # runs one of the suites; a hang is a failure too
    timeout 90 cargo test --quiet -p tidegate-limiter "$@" >"$CARGO_TARGET_DIR/log" 2>&1
}

wrap none
if ! suite --lib --test model; then
    cat "$CARGO_TARGET_DIR/log"
    echo "the suite fails without any fault"
    exit 1
fi

escaped=0
for name in ${*:-$all}; do
    wrap "$name"
    if ! cargo test --quiet --no-run -p tidegate-limiter --lib --test model 2>"$CARGO_TARGET_DIR/log"; then
        cat "$CARGO_TARGET_DIR/log"
        echo "$name does not build"
        exit 1
    fi
    by=""
    suite --lib || by="$by unit"
    suite --test model || by="$by model"
    echo "$name: ${by:-ESCAPED}"
    [ -n "$by" ] || escaped=$((escaped + 1))
done
if [ "${LOOM:-0}" = 1 ]; then
    for name in slot_follows_waiter lost_wakeup barging unclaimed_leaks; do
        wrap "$name"
        RUSTFLAGS="--cfg loom" cargo test --quiet --no-run -p tidegate-limiter --test loom --release || exit 1
        if RUSTFLAGS="--cfg loom" suite --test loom --release; then
            echo "$name: ESCAPED loom"
            escaped=$((escaped + 1))
        else
            echo "$name: loom"
        fi
    done
fi
if [ "$escaped" -gt 0 ]; then
    echo "$escaped faults escaped"
    exit 1
fi
