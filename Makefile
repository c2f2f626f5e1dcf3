# `make check` is what CI runs. Everything runs in .venv, which only python3 is needed for.

PYTHON ?= python3
PYTHONS ?= $(PYTHON)
BIN := .venv/bin
READY := .venv/ready

CODE ?= 4,3
RANKS ?= 4
QUESTION ?= kernels
MINUTES ?= 15
VERSION ?= 2.14
WORKERS ?= 3
SEEDS ?= 200
IN_ORDER = --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder
S3_TESTS := tests/baselines/check_n_run/test_object_storage.py tests/baselines/check_n_run/test_storage_faults.py
KUBERNETES_TESTS := tests/docs/test_kubernetes_schemas.py
ARGS ?=

# Modules are compiled once, also where an image asks for the opposite: tests start thousands of processes.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo check all-but-test lint types test test-fast test-long test-seeds test-s3 test-kubernetes docs site pages package release-check model compat arm simulator defects mutants failures cluster cluster-compare moves rebuilds kills follower-kills soak hunt bench bench-quick report gpu-packages gpu clean

help:  ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

setup: $(READY)  ## make .venv, with the versions that constraints.txt pins

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e ".[test,bench,docs,metrics,top,lightning,torchrec-cpu]"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps torchrec
	@touch $@

demo: $(READY)  ## train, kill workers and their memory, compare byte by byte (CODE=4,3 RANKS=4)
	$(BIN)/python examples/demo.py --code $(CODE) --ranks $(RANKS) $(ARGS)

check: all-but-test test  ## what CI runs

all-but-test: lint types site docs test-s3 test-kubernetes  ## what `make check` runs besides the tests

lint: $(READY)  ## format, lint and words, without changing a file
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python docs/scripts/words.py

types: $(READY)  ## pyright, strict on ecemb/; names and attributes in bench/, baselines/, tests/cluster/ and tests/failures/
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/pyright --pythonpath $(BIN)/python --project bench

test: $(READY)  ## the tests
	$(BIN)/pytest -m "not long" --ignore=tests/docs/test_docs.py $(addprefix --ignore=,$(S3_TESTS) $(KUBERNETES_TESTS)) \
		$(IN_ORDER) $(ARGS)

test-fast: WORKERS = 2  # its tests wait for nothing
test-fast: $(READY)  ## the tests that neither start processes, nor need TorchRec, nor take long
	$(BIN)/pytest -m "not processes and not torchrec and not slow and not long" \
		--ignore=tests/docs/test_docs.py $(IN_ORDER) $(ARGS)

test-long: $(READY)  ## variants of the tests that take too long for CI
	$(BIN)/pytest -m long $(IN_ORDER) $(ARGS)

test-seeds: $(READY)  ## the tests of drawn cases, each with SEEDS=200 fresh seeds: hours (ARGS="tests/unit/memory")
	$(BIN)/pytest -m "not long" --seeds=$(SEEDS) -o tmp_path_retention_policy=failed \
		--numprocesses=$(WORKERS) --dist=worksteal $(ARGS)

test-s3: $(READY) build/s3/ready  ## the tests of object storage, with the packages of constraints-s3.txt in build/s3
	PYTHONPATH=build/s3 $(BIN)/pytest $(S3_TESTS) $(ARGS)

build/s3/ready: $(READY) constraints-s3.txt
	rm -rf build/s3
	$(BIN)/pip install --quiet --disable-pip-version-check --target build/s3 -c constraints-s3.txt \
		s3fs 'moto[s3]' flask flask-cors
	@touch $@

test-kubernetes: $(READY) build/kubernetes/ready  ## the manifests in examples/kubernetes, by published schemas, with the packages of constraints-kubernetes.txt
	PYTHONPATH=build/kubernetes $(BIN)/pytest $(KUBERNETES_TESTS) $(ARGS)

build/kubernetes/ready: $(READY) constraints-kubernetes.txt
	rm -rf build/kubernetes
	$(BIN)/pip install --quiet --disable-pip-version-check --target build/kubernetes -c constraints-kubernetes.txt \
		kubernetes-validate kubeflow-trainer-api
	@touch $@

docs: $(READY)  ## run the code in README.md and docs/
	$(BIN)/pytest tests/docs/test_docs.py $(ARGS)

site: $(READY)  ## build the site of docs/ into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

pages: $(READY)  ## write the pages and pictures that are made of the source and of bench/results
	$(BIN)/python docs/scripts/errors.py
	$(BIN)/python docs/scripts/api.py
	$(BIN)/python docs/scripts/torchrec.py
	$(BIN)/python docs/scripts/pictures.py
	$(BIN)/python -m bench report

package: $(READY)  ## build wheel and sdist into dist/, and try the wheel in a clean environment
	rm -rf dist build/package
	$(BIN)/python -m hatchling build
	$(PYTHON) -m venv build/package
	build/package/bin/pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	build/package/bin/pip check
	cd build && package/bin/ecemb --version
	cd build && package/bin/python -c "import ecemb"

release-check: $(READY)  ## build wheel and sdist into dist/, and try the wheel alone with each Python (PYTHONS="python3.10 python3.13")
	rm -rf dist build/release
	$(BIN)/python -m hatchling build
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w build/release/sdist dist/*.tar.gz
	for python in $(PYTHONS); do \
		$$python -m venv build/release/$$python && \
		build/release/$$python/bin/pip install --quiet --disable-pip-version-check --no-deps --no-index dist/*.whl && \
		build/release/$$python/bin/python -I build/release/$$python/bin/ecemb --help > /dev/null && \
		(cd build/release && $$python/bin/python -I -m ecemb --help > /dev/null && \
			$$python/bin/python -I -c "import ecemb, sys; print('ecemb', ecemb.__version__, 'on', sys.version.split()[0])") \
		|| exit 1; \
	done

model: $(READY)  ## search all states of the protocol, and what each of its rules prevents (ARGS=--table)
	$(BIN)/python tests/model $(ARGS)

compat: $(READY)  ## another set of torch, TorchRec and FBGEMM, in build/compat (VERSION=2.14): contracts, scenarios, demo
	$(BIN)/python tests/support/compat.py $(VERSION) --json bench/results/compat-$(VERSION).json $(ARGS)

arm: $(READY)  ## tests of kernels and arenas on aarch64, emulated by qemu: downloads arm64 packages (ARGS=tests/contracts)
	$(BIN)/python tests/support/arm.py $(ARGS)

simulator: $(READY)  ## whole jobs in one process, with failures by seed: SEEDS=200 (ARGS="--first 1000")
	$(BIN)/python tests/simulator --seeds $(SEEDS) $(ARGS)

defects: $(READY)  ## defects planted in the product: which seed of the simulator, or which test, notices each (ARGS="--seeds 200")
	PYTHONPATH=.:tests $(BIN)/python tests/simulator defects --json bench/results/defects.json $(ARGS)

mutants: $(READY)  ## what share of small changes to the product the tests notice; goes on where it was ended (hours)
	$(BIN)/python tests/mutants --json bench/results/mutants.json $(ARGS)

failures: $(READY)  ## the failure matrix: real processes killed in every phase (30 minutes)
	$(BIN)/python tests/failures --json bench/results/failures.json $(ARGS)

cluster: $(READY)  ## as root, a Slurm cluster on this machine, and what happens to trainings on it (15 minutes)
	$(BIN)/python tests/cluster --json bench/results/cluster.json $(ARGS)

cluster-compare: $(READY)  ## as root, methods compared on four nodes of a Slurm cluster on this machine (20 minutes; ARGS="--rate 10gbit")
	PYTHONPATH=.:tests $(BIN)/python tests/support/cluster_compare.py --json bench/results/compare-cluster.json $(ARGS)

kills: $(READY)  ## kill Check-N-Run's writers at 200 random moments (ARGS="--kills 200")
	PYTHONPATH=.:tests $(BIN)/python tests/support/check_n_run/kills.py --json bench/results/kills.json $(ARGS)

follower-kills: $(READY)  ## kill 100 followers, and the trainings that they follow (ARGS="--kills 100")
	PYTHONPATH=.:tests $(BIN)/python tests/support/follower/kills.py --json bench/results/follower_kills.json $(ARGS)

soak: $(READY)  ## random kills every few seconds, for MINUTES=15 (ARGS="--start stays")
	$(BIN)/python tests/failures soak --minutes $(MINUTES) --json bench/results/soak.json $(ARGS)

moves: $(READY)  ## a second failure in each stage of a move to another number of ranks (15 minutes)
	$(BIN)/python tests/failures/moves.py $(ARGS)

rebuilds: $(READY)  ## a failure in each phase of a rebuild beside training (20 minutes)
	$(BIN)/python tests/failures/rebuilds.py $(ARGS)

hunt: $(READY)  ## kill all that a warm start has, at 200 random moments (ARGS="--kills 200")
	$(BIN)/python tests/failures hunt $(ARGS)

bench: $(READY)  ## answer one question of bench/ (QUESTION=kernels)
	$(BIN)/python -m bench $(QUESTION) $(ARGS)

bench-quick: $(READY)  ## ask what `bench all --quick` asks, and make the report of it, in build/bench
	$(BIN)/python -m bench all --quick --json-dir build/bench
	$(BIN)/python -m bench report --json-dir build/bench

report: $(READY)  ## make the pages of results, and build/results.html with all tables, from bench/results
	$(BIN)/python -m bench report

gpu-packages: $(READY)  ## put into build/gpu what `make gpu` needs beyond torch, Triton, numba and pytest
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/gpu \
		-c constraints.txt galois pytest-timeout

gpu: SHELL := /bin/bash
gpu: .SHELLFLAGS := -o pipefail -c
gpu:  ## with a CUDA device, its own PYTHON and build/gpu, in 8 minutes: tests, kills, bench, in build/gpu.json and .log
	mkdir -p build
	PYTHONPATH=.:build/gpu $(PYTHON) -u -m bench gpu --json build/gpu.json $(ARGS) 2>&1 | tee build/gpu.log

clean:  ## remove .venv and all that is generated
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
