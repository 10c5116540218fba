#!/usr/bin/env bash
# Runs every step of `make test`, the later ones too when one fails, and says at the end what failed. The output
# of each step is kept in .cache/logs/steps. A step that hangs is ended and has failed.
set -u
cd "$(dirname "$0")/.."

steps=(setup lint deps build unit docs prove real real-old shipped js python)
logs=.cache/logs/steps
rm -rf "$logs" .cache/logs/*.log
mkdir -p "$logs"

failed=()
begin=$SECONDS
for step in "${steps[@]}"; do
  printf '\n=== %s: %s\n' "$step" "$(sed -n "s/^$step:.*## //p" Makefile)"
  since=$SECONDS
  timeout --kill-after=10 "${STEP_SECONDS:-1800}" make --no-print-directory "$step" 2>&1 | tee "$logs/$step.log"
  if [ "${PIPESTATUS[0]}" = 0 ]; then
    printf -- '--- %s: ok, %s s\n' "$step" $((SECONDS - since))
  else
    printf -- '--- %s: FAILED, %s s\n' "$step" $((SECONDS - since)) | tee -a "$logs/$step.log"
    failed+=("$step")
    touch "$logs/$step.failed"
  fi
done

printf '\n=== %s steps in %s s: ' ${#steps[@]} $((SECONDS - begin))
if [ ${#failed[@]} = 0 ]; then
  echo "all passed"
else
  echo "FAILED: ${failed[*]}"
  exit 1
fi
