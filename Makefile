# Two commands do everything on a Debian machine with Python: `make demo` and `make test`.
#
#   PYTHON  the interpreter of .venv; by default the first of python3.11, 3.12, 3.13, 3.10, python3 that has venv.
#   TORCH   what pip installs as torch, before anything else; pinned, so that two runs test the same thing. Any pip
#           arguments will do, e.g. those that the PyTorch site gives for a CPU-only build, or a wheel on disk.
#   ARGS    handed to pytest: make test ARGS="-k page -x"; make bench ARGS="--only hot_path" has options of its own
#   JOBS    how many tests run at a time, by default 4; 0: in one process, as for `--pdb`
TORCH ?= torch==2.13.0
JOBS ?=
ARGS ?=
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.10 python3; do \
	$$python -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$python && break; done)

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help dist demo gpu gpu-kit check test flakes lint format bench bounds long soak churn faults attacks lock screenshots compat arm torch-tests docs docs-serve clean

help: ## say what can be made
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name text; do \
		printf 'make %-11s %s\n' "$$name" "$$text"; done

demo: .venv/.runtime ## attach to a live training process, watch a NaN being born, detach (under a minute)
	@$(BIN)/hookd demo

test: lint ## everything that must hold: lint, types, import contracts, tests
	$(BIN)/python -m tests.gate $(if $(JOBS),-n $(JOBS)) $(ARGS)

check: lint ## what is quick: lint, types, import contracts, the tests of single modules and of the plugins (3 minutes; neither root nor a network)
	$(BIN)/python -m pytest -n $(or $(JOBS),4) --dist loadscope tests/unit tests/plugins $(ARGS)

flakes: .venv/.dev ## all tests in random order beside busy processes, five times, and once on a slow machine: none may fail (three hours)
	$(BIN)/python -m tests.flakes $(ARGS)

lint: .venv/.dev ## ruff, mypy, the import contracts, and the language of prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.language

format: .venv/.dev ## let ruff rewrite the sources
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

bench: .venv/.bench ## measure what hookd costs beside its peers into docs/benchmarks.md (three quarters of an hour; ARGS=--quick: a few minutes)
	$(BIN)/python -m tests.bench $(ARGS)

bounds: .venv/.dev ## what hookd may cost: benches that fail above it
	$(BIN)/python -m pytest -m bench -s tests/bench $(ARGS)

long: .venv/.long ## what is too long for `make test`: more attacks, faults and containers, 2,000 healthy steps of each workload, all of torch's modules (an hour and a half)
	$(BIN)/python -m pytest -m "load and not bench" $(ARGS)

soak: .venv/.dev ## 5,000 injections and 500 attaches to busy and hostile processes (an hour)
	$(BIN)/python -m tests.bench.attach.soak

churn: .venv/.dev ## a day of a busy node: 5,000 targets come, live and die, the daemon is killed; what it holds stays flat (7 minutes)
	$(BIN)/python -m tests.faults.churn $(ARGS)

faults: .venv/.dev ## make every fault for real and write what hookd said of it into docs/reliability.md (7 minutes, as root for all)
	$(BIN)/python -m tests.faults $(ARGS)

attacks: .venv/.dev ## attack hookd as other users, targets and network peers would, and write the table in docs/security.md (as root)
	$(BIN)/python -m tests.attacks $(ARGS)

# Compiled for every Python and processor that hookd supports.
LOCK = $(BIN)/uv pip compile --quiet --no-config --universal --python-version 3.10 \
	--generate-hashes --no-annotate --no-emit-index-url --custom-compile-command "make lock" --upgrade
lock: .venv/.dev ## renew the versions and hashes of what the container image and a release are made of: deploy/docker/*.txt, deploy/dist/requirements.txt
	$(PIP) uv==0.13.9
	$(LOCK) pyproject.toml --output-file deploy/docker/requirements.txt > /dev/null
	echo hatchling | $(LOCK) - --output-file deploy/docker/build.txt > /dev/null
	printf '%s\n' cyclonedx-bom hatchling pyelftools twine ziglang | $(LOCK) - --output-file deploy/dist/requirements.txt > /dev/null

screenshots: .venv/.dev ## make the pictures of docs/screenshots from real runs (needs Debian's chromium; 4 minutes)
	$(BIN)/python -m tests.screenshots $(ARGS)

compat: .venv/.dev ## tool and target on every CPython found here (see HOOKD_COMPAT_PYTHONS, HOOKD_COMPAT_ROOTS)
	$(BIN)/python -m pytest -m "not load" tests/compat $(ARGS)

# The first run makes the root (two minutes, 1.5 GB); ARGS are files of tests and pytest's arguments: ARGS="tests/unit -k page".
ARM_ROOT ?= /var/tmp/hookd-arm64
arm: .venv/.dev dist ## 64-bit ARM, emulated: the tests without ptrace, and the wheel, in a Debian root in ARM_ROOT (needs root, apt and qemu-user-static; hours)
	$(PIP) ziglang
	$(BIN)/python -m tests.arm --root $(ARM_ROOT) $(ARGS)

# ROOT: whose torch is tested, a Debian root or /; SOURCES: torch's sources of that version, unpacked. Where not named,
# Debian's source package of the torch in ROOT is fetched. Nothing of either is kept.
ROOT ?= /
SOURCES ?=
torch-tests: .venv/.dev ## torch's own tests, plain and with all observers, compared by name, into docs/torch-tests.md (an hour, as root)
	$(BIN)/python -m tests.torch_tests --root $(ROOT) $(if $(SOURCES),--sources $(SOURCES)) $(ARGS)

gpu-kit: .venv/.dev ## what `make gpu` needs beside the checkout, into build/gpu-kit, for a machine without a registry (ARGS="--python 3.13")
	$(BIN)/python -m tests.gpu.kit $(ARGS)

# GPU_PYTHON: an interpreter with torch and CUDA, which need not have hookd: build/gpu-kit has the rest.
GPU_PYTHON ?= python3
gpu: ## all that has to be measured on a GPU, into docs/gpu.md and gpu.json; no network (half an hour; ARGS=--dry does the same on the processor)
	@test -d build/gpu-kit || { echo "build/gpu-kit is missing: run make gpu-kit where there is a package registry, and copy it here" >&2; exit 1; }
	cp -n build/gpu-kit/native/*.so hookd/native/
	PYTHONPATH=.:plugins:build/gpu-kit $(GPU_PYTHON) -m tests.gpu $(ARGS)

dist: build/dist/.tools ## a release of the last commit, into dist/: sdist, a wheel for each kind of machine, SBOM, checksums (reproducible; a minute, and once 100 MB)
	build/dist/bin/python deploy/dist/build.py

docs: .venv/.dev ## the documentation as a site, in site/; its pages about commands, metrics and hooks are made anew
	$(BIN)/python docs/generate.py
	$(BIN)/mkdocs build --strict

docs-serve: .venv/.dev ## the same on http://127.0.0.1:8000, made anew at every change
	$(BIN)/mkdocs serve --strict

clean: ## remove what was made
	rm -rf .venv site .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

build/dist/.tools: deploy/dist/requirements.txt
	@test -n "$(PYTHON)" || { echo "no Python >= 3.10 with venv found: apt-get install python3-venv, or PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv --clear build/dist
	build/dist/bin/python -m pip install --quiet --disable-pip-version-check --only-binary :all: --require-hashes --requirement $<
	@touch $@

# A stamp file for each part of the installation: the second call is quick, and the demo does without the test tools.
.venv/.runtime: pyproject.toml $(wildcard hookd/native/*.c hookd/native/*.h)
	@test -n "$(PYTHON)" || { echo "no Python >= 3.10 with venv found: apt-get install python3-venv, or PYTHON=..." >&2; exit 1; }
	@echo "installing $(TORCH) and hookd into .venv (once)" >&2
	$(PYTHON) -m venv .venv
	$(PIP) $(TORCH) numpy
	$(PIP) --editable .
	@touch $@

.venv/.dev: .venv/.runtime
	$(PIP) 'pip>=25.1'
	$(PIP) --editable . --group dev --group docs
	@touch $@

.venv/.long: .venv/.dev
	$(PIP) --editable '.[integrations]' --group dev --group docs --group long
	@touch $@

.venv/.bench: .venv/.dev
	$(PIP) --editable . --group dev --group docs --group bench
	@touch $@
