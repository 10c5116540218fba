#!/bin/sh
# Every proof of the limiter, one after the other. Exits with 1 if one of them fails, after the others have run.
#
#   crates/limiter/prove.sh [step..]
#
# Steps: tests loom shuttle protocol brownout mutations. Can be called from anywhere. Builds under target/prove of
# the workspace, a directory for each checker, as their flags differ; PROVE_TARGET chooses another. What a step
# prints is shown if it fails, its last lines otherwise.
set -u
cd "$(dirname "$0")/../.." || exit 2
unset RUSTFLAGS RUSTC_WORKSPACE_WRAPPER CARGO_BUILD_TARGET CARGO_ENCODED_RUSTFLAGS
target="${PROVE_TARGET:-target/prove}"
mkdir -p "$target" || exit 2
target=$(cd "$target" && pwd)
# Whole-program optimisation takes longer than it saves here, and nobody debugs these.
export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16
export CARGO_PROFILE_TEST_DEBUG=0 CARGO_PROFILE_DEV_DEBUG=0
cargo="cargo test --quiet --locked -p tidegate-limiter"

tests() { # the unit tests, the model, the conformance suite, the examples of the documentation
    CARGO_TARGET_DIR="$target" $cargo --all-features
}

checker() { # a test that has a flag of its own
    RUSTFLAGS="--cfg $1" CARGO_TARGET_DIR="$target/$1" timeout 600 $cargo --test "$1" --release -- --nocapture
}

loom() { checker loom; }         # every interleaving of a few threads, up to three preemptions
shuttle() { checker shuttle; }   # the threads for blocking work, random and PCT schedules
protocol() { checker protocol; } # every state of four calls

brownout() { # recovers with the defaults
    CARGO_TARGET_DIR="$target" cargo run --quiet --locked --release -p tidegate-limiter --example brownout
}

mutations() { # deliberate faults, each of which must be caught
    TARGET="$target/mutations" LOOM="${LOOM:-1}" crates/limiter/mutations.sh
}

about() { # what a step says of itself, above
    sed -n "s/^$1() {.*# //p" crates/limiter/prove.sh
}

all="tests loom shuttle protocol brownout mutations"
failed=""
begin=$(date +%s)
for step in ${*:-$all}; do
    case " $all " in *" $step "*) ;; *) echo "no step is called $step: $all" >&2; exit 2 ;; esac
    printf '== %s: %s\n' "$step" "$(about "$step")"
    since=$(date +%s)
    if "$step" >"$target/$step.log" 2>&1; then
        case $step in
        tests) grep -E '^test result' "$target/$step.log" | grep -v ' 0 passed' ;;
        protocol) grep -E 'states,|^test result' "$target/$step.log" ;;
        loom | shuttle) grep -E '^test result' "$target/$step.log" ;;
        *) tail -n 40 "$target/$step.log" ;;
        esac
        printf -- '-- %s: ok, %s s\n\n' "$step" $(($(date +%s) - since))
    else
        cat "$target/$step.log"
        failed="$failed $step"
        printf -- '-- %s: FAILED, %s s\n\n' "$step" $(($(date +%s) - since))
    fi
done
if [ -n "$failed" ]; then
    printf '== failed:%s, after %s s\n' "$failed" $(($(date +%s) - begin))
    exit 1
fi
printf '== all proved in %s s\n' $(($(date +%s) - begin))
