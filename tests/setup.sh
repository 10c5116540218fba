#!/usr/bin/env bash
# Installs what the tests need, where it is missing: Debian packages, a Python environment in .cache/venv, npm
# packages in tests/real/js/node_modules. Running it again costs a second.
set -eu
cd "$(dirname "$0")/.."

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

missing=()
for package in ca-certificates curl libgomp1 libstdc++6 nginx-light haproxy caddy openssl systemd strace chromium iproute2; do
  dpkg-query -W -f '${Status}\n' "$package" 2>/dev/null | grep -q ' installed$' || missing+=("$package")
done
command -v cc > /dev/null || missing+=(gcc libc6-dev)
command -v python3 > /dev/null || missing+=(python3)
python3 -c 'import ensurepip, venv' 2> /dev/null || missing+=(python3-venv)
command -v node > /dev/null || missing+=(nodejs)
command -v npm > /dev/null || missing+=(npm)

if [ ${#missing[@]} -gt 0 ]; then
  echo "apt: ${missing[*]}"
  # The tests start their own nginx and HAProxy; the packages must not start the machine's.
  policy=/usr/sbin/policy-rc.d
  if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" > /dev/null
    as_root chmod +x "$policy"
    trap 'as_root rm -f "$policy"' EXIT
  fi
  as_root apt-get update -qq
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null
fi

# up_to_date MARK FILE: whether MARK was written for FILE as it is now.
up_to_date() { [ -e "$1" ] && cmp -s "$1" "$2"; }

venv() { # FOLDER REQUIREMENTS
  up_to_date "$1/installed.txt" "$2" && return
  echo "pip: $2"
  rm -rf "$1"
  python3 -m venv "$1"
  "$1/bin/pip" install --quiet --disable-pip-version-check -r "$2"
  cp "$2" "$1/installed.txt"
}
mkdir -p .cache
venv .cache/venv tests/real/requirements.txt
venv .cache/venv-old tests/real/requirements-old.txt
venv .cache/venv-python python/tests/requirements.txt

js=tests/real/js
if ! up_to_date "$js/node_modules/installed.json" "$js/package-lock.json"; then
  echo "npm: $js/package-lock.json"
  (cd "$js" && npm ci --no-audit --no-fund --loglevel=error)
  cp "$js/package-lock.json" "$js/node_modules/installed.json"
fi
