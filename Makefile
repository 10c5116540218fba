# `make` alone tells what there is. Each target can be run by itself, in a fresh clone too.

SHELL := /bin/bash
PYTEST := .cache/venv/bin/python -m pytest -c tests/pytest.ini
CARGO := cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
export CARGO_TERM_COLOR ?= never

.DEFAULT_GOAL := help
.PHONY: help run demo test bench soak fuzz test-vllm setup lint fmt deps build unit docs prove real real-old js python wheel shipped measure clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- use ------------------------------------------------------------------------------------------------------

run: ## Builds the gateway and starts its demo: no model server, no key, no network
	@$(CARGO) build --release --locked -p tidegate
	@exec "$(TARGET)/release/tidegate" demo

# --- all ------------------------------------------------------------------------------------------------------

test: ## Everything that a change must pass; installs what it needs
	@tests/all.sh

# BENCH=--quick for a look, BENCH='--only calls' for one load.
bench: build ## Side by side with nginx and HAProxy; writes docs/benchmarks.md
	@tests/setup.sh
	PATH="$$PATH:/usr/sbin"; $(CARGO) run --release --locked -p tidegate-rig --bin rig -- bench \
	  --tidegate "$(TARGET)/release/tidegate" --nginx "$$(command -v nginx)" --haproxy "$$(command -v haproxy)" \
	  --naive --out docs/benchmarks.md $(BENCH)

# SOAK_SECONDS=300 for a shorter one.
soak: build ## Mixed load with faults and reloads for half an hour: nothing grows, every call is counted once
	@tests/setup.sh
	cd tests && ../.cache/venv/bin/python -m soak

test-vllm: build ## The gateway in front of a real vLLM (6 GB, some minutes; not part of `make test`)
	@tests/vllm/run.sh

# RUSTC_BOOTSTRAP: the sanitizer flags of cargo-fuzz, on a stable compiler.
fuzz: ## Each fuzz target for FUZZ_SECONDS (60)
	@command -v cargo-fuzz > /dev/null || { echo 'needs: cargo install cargo-fuzz'; exit 1; }
	@export RUSTC_BOOTSTRAP=1; for target in $$(cargo fuzz list); do \
	  echo "=== $$target"; mkdir -p "fuzz/corpus/$$target" "fuzz/seeds/$$target"; \
	  cargo fuzz run "$$target" "fuzz/corpus/$$target" "fuzz/seeds/$$target" -- \
	    -max_total_time=$${FUZZ_SECONDS:-60} || exit 1; \
	done

# --- the steps of `make test` ---------------------------------------------------------------------------------

setup: ## Installs what the tests need: Debian packages, a Python environment, npm packages
	@tests/setup.sh

lint: ## Format and lints, Rust and Python
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --all-features --locked -- -D warnings
	$(CARGO) fmt --manifest-path python/Cargo.toml --check
	CARGO_TARGET_DIR="$(TARGET)" $(CARGO) clippy --manifest-path python/Cargo.toml --all-targets --locked -- -D warnings
	CARGO_TARGET_DIR="$(TARGET)" $(CARGO) clippy --manifest-path fuzz/Cargo.toml --bins --locked -- -D warnings
	.cache/venv/bin/ruff check tests python
	.cache/venv/bin/ruff format --check tests python
	cd python && $(CURDIR)/.cache/venv-python/bin/mypy
	cd python && $(CURDIR)/.cache/venv-python/bin/pyright --pythonpath $(CURDIR)/.cache/venv-python/bin/python

fmt: ## Formats Rust and Python in place
	$(CARGO) fmt --all; $(CARGO) fmt --manifest-path python/Cargo.toml
	.cache/venv/bin/ruff check --fix --quiet tests python; .cache/venv/bin/ruff format tests python

deps: ## Licences, duplicates and origins of the crates, as deny.toml says
	@python3 -m doctest tests/deps.py
	python3 tests/deps.py

build: ## The release binary
	$(CARGO) build --release --locked -p tidegate

unit: ## The tests of the crates
	@if cargo nextest --version > /dev/null 2>&1; then set -ex; \
	  $(CARGO) nextest run --workspace --all-features --locked --no-fail-fast --no-tests=pass; \
	  $(CARGO) test --workspace --all-features --locked --doc; \
	else set -ex; \
	  $(CARGO) test --workspace --all-features --locked --no-fail-fast; \
	fi

docs: ## The API documentation, without broken links
	RUSTDOCFLAGS='-D rustdoc::broken_intra_doc_links' $(CARGO) doc --workspace --no-deps --all-features --locked

prove: ## The limiter's proofs: every interleaving, random schedules, a protocol model, deliberate faults
	@crates/limiter/prove.sh loom shuttle protocol brownout mutations

real: build ## Real llama.cpp, the Python SDKs, nginx and HAProxy, against the gateway
	$(PYTEST) tests/real

real-old: build ## The same calls with the SDKs' generation before
	.cache/venv-old/bin/python -m pytest -c tests/pytest.ini tests/real/test_sdk_answers.py tests/real/test_abort.py

shipped: build ## The files of deploy/: nginx, HAProxy, Caddy, systemd, linters; a check fails without each line
	$(PYTEST) tests/shipped

measure: build ## The figures of docs/operations.md, Kernel (root, two minutes; not part of `make test`)
	cd tests && ../.cache/venv/bin/python -m shipped.measure

js: build ## The npm SDKs against the gateway
	@cd tests && ../.cache/venv/bin/python -m support.stack --cwd real/js -- \
	  timeout 600 node --test --test-force-exit --test-concurrency=1 --test-timeout=240000 --test-reporter=spec

python: wheel ## The Python package, installed from its wheel, against the libraries that it works with
	.cache/venv-python/bin/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall .cache/wheels/tidegate-*.whl
	cd python/tests && $(CURDIR)/.cache/venv-python/bin/python -m pytest -c ../pyproject.toml .

wheel: build ## The Python package with the gateway in it, as .cache/wheels/tidegate-*.whl
	rm -rf .cache/wheels
	PATH="$(CURDIR)/.cache/venv-python/bin:$$PATH" TIDEGATE_BIN="$(abspath $(TARGET))/release/tidegate" CARGO_TARGET_DIR="$(abspath $(TARGET))" .cache/venv-python/bin/pip wheel \
	  --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir .cache/wheels ./python

clean: ## Removes what was built, installed and logged here
	rm -rf target .cache tests/real/js/node_modules
