#!/usr/bin/env bash
# The gateway in front of a real vLLM: installs it, starts it, runs the tests, writes what was seen.
#   VLLM_VENV     where vLLM is, or goes (.cache/vllm)
#   VLLM_REPORT   where what was seen goes (.cache/vllm-seen.json)
#   TIDEGATE_BIN  the gateway's binary; "direct" runs the tests on vLLM itself
set -eu
cd "$(dirname "$0")/../.."
tests/vllm/install.sh
export VLLM_VENV="${VLLM_VENV:-.cache/vllm}" VLLM_REPORT="${VLLM_REPORT:-.cache/vllm-seen.json}"
"$VLLM_VENV/bin/python" -m pytest -c tests/pytest.ini tests/vllm -v --timeout 1500 "$@"
echo "what was seen: $VLLM_REPORT"
