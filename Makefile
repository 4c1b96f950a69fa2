# make            what there is to make
# make demo       three nodes, a killed leader, nothing lost; the group stays
# make test       whether it works here, in minutes

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
unexport PYTHONDONTWRITEBYTECODE # every process would compile everything anew

VENV ?= .venv
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
BIN := $(VENV)/bin
PYTHON ?= python3 python3.14 python3.13 python3.12 python3.11

BASE_IMAGE ?=
SEEDS ?= 2000
CONSUMER_SEEDS ?= 50
POP_SEEDS ?= 100000
OPERATIONS ?= 500000
MUTANTS ?=
TESTS ?= tests
# more than there are processors, for tests often wait
WORKERS ?= $(shell n=$$((2 * $$(getconf _NPROCESSORS_ONLN))); echo $$((n < 8 ? n : 8)))
FUZZ ?= 40
DRILL ?= kill-leader
DEMO_ARGS ?= --keep
CLUSTER ?= start
SPARK_VERSIONS ?= 4.2.1 4.3.0

.PHONY: help install lock demo test test-all test-rest durations nightly coverage soak test-spark-matrix spark-cluster interop check format bench bench-compare flame sim sim-store sim-consumer sim-pop sim-map mutants image-base image compose-check drill proto screenshots tidy docs clean

help: ## This list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

install: $(STAMP) ## The virtual environment .venv with everything in it

$(VENV)/.python:
	@for python in $(PYTHON); do \
		if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			$$python -m tools.environment $(VENV); touch $@; exit; \
		fi; \
	done; \
	echo "Python 3.11 or newer is needed: install it, or say make PYTHON=/path/to/python3" >&2; exit 1

$(STAMP): pyproject.toml requirements-dev.lock | $(VENV)/.python
	@$(BIN)/python -m tools.install requirements-dev.lock --size "about 650 MB to download, 1 GB on disk, mostly Spark and pyarrow"
	@touch $(DEMO_STAMP) $@

$(DEMO_STAMP): pyproject.toml cluster/deploy/requirements.lock | $(VENV)/.python
	@if ! $(MAKE) --question --no-print-directory $(STAMP) >/dev/null 2>&1; then \
		$(BIN)/python -m tools.install cluster/deploy/requirements.lock --no-compile --size "about 40 MB to download, 146 MB on disk"; \
	fi
	@touch $@

lock: ## The exact versions, with hashes, of what development and the image need, from pyproject.toml (needs uv)
	for want in "requirements-dev.lock --extra dev" "cluster/deploy/requirements.lock --extra console"; do \
		set -- $$want; file=$$1; shift; \
		uv pip compile pyproject.toml "$$@" --universal --python-version 3.11 --generate-hashes --no-annotate \
			--no-header --quiet --upgrade -o $$file; \
		sed -i '1i # Exact versions with hashes, made by `make lock` from pyproject.toml.' $$file; \
	done

$(VENV)/.installed-bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,bench]'
	touch $@

demo: $(DEMO_STAMP) ## Three nodes, a killed leader, nothing lost; they stay (DEMO_ARGS="--console", "" to end them)
	@$(BIN)/dledger demo $(DEMO_ARGS)

test: $(STAMP) ## What needs Python only, in minutes: all units, some seeds, a dozen process tests (PYTEST_ARGS=-x)
	@$(BIN)/python -m tests.support.bytecode --tier=test
	$(BIN)/python -m pytest --tier=test -n $(WORKERS) --dist loadgroup $(PYTEST_ARGS) $(TESTS)

test-all: $(STAMP) ## Everything but hours: with processes, faults, containers, browser, Spark (installs Debian's packages as root)
	@tools/system-packages.sh || true
	@$(BIN)/python -m tests.support.bytecode
	tools/with-dockerd.sh $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(PYTEST_ARGS) $(TESTS)

test-rest: $(STAMP) ## What `make test-all` runs and `make test` does not
	@$(BIN)/python -m tests.support.bytecode --tier=rest
	tools/with-dockerd.sh $(BIN)/python -m pytest --tier=rest -n $(WORKERS) --dist loadgroup $(PYTEST_ARGS) $(TESTS)

durations: $(STAMP) ## Measure how long each module takes, which decides the order of `make test-all`
	tools/with-dockerd.sh $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --measure $(PYTEST_ARGS) $(TESTS)

nightly: ## What takes hours: soak, all seeds, all planted bugs, other examples, interop, Spark matrix, bench
	$(MAKE) test-all
	FUZZ=$(FUZZ) $(MAKE) test TESTS="tests/fuzz tests/unit" PYTEST_ARGS="--tier=all $(PYTEST_ARGS)"
	for target in soak sim sim-store sim-consumer sim-pop sim-map mutants interop test-spark-matrix bench; do $(MAKE) $$target || exit; done

coverage: $(STAMP) ## `make test-all` with branch coverage, which takes longer
	@rm -f .coverage .coverage.*
	@status=0; \
	tools/with-dockerd.sh $(BIN)/coverage run -m pytest -n $(WORKERS) --dist loadgroup $(PYTEST_ARGS) $(TESTS) || status=$$?; \
	$(BIN)/coverage combine --quiet && $(BIN)/coverage report || true; \
	exit $$status

$(VENV)/.installed-soak: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,spark-connect]'
	touch $@

soak: $(VENV)/.installed-soak ## Tests of minutes: Spark clusters, processes killed again and again (PYTEST_ARGS=-x)
	$(BIN)/python -m pytest -m soak -o faulthandler_timeout=2400 -o timeout=3600 $(PYTEST_ARGS) tests

test-spark-matrix: $(STAMP) ## The tests of Spark with each version that is meant to work (SPARK_VERSIONS="4.2.1 4.3.0")
	@for version in $(SPARK_VERSIONS); do \
		venv=build/spark-$$version; \
		if [ ! -e $$venv/.installed ]; then \
			echo "installing Spark $$version into $$venv"; \
			$(BIN)/python -m venv $$venv; \
			$$venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' "pyspark==$$version"; \
			touch $$venv/.installed; \
		fi; \
		echo "Spark $$version"; \
		$$venv/bin/python -m pytest -m spark $(PYTEST_ARGS) tests; \
	done

spark-cluster: $(STAMP) ## A Spark master and two workers on this machine (CLUSTER=start; status, stop)
	@$(BIN)/python -m tools.spark_standalone $(CLUSTER)

interop: $(STAMP) ## Both directions with the real Java RocketMQ and DLedger (needs JDK 17, Maven, Maven Central)
	$(BIN)/python -m pytest -m interop -o timeout=3600 $(PYTEST_ARGS) tests/interop

check: $(STAMP) ## What CI checks besides the tests: format, lint, types, imports, generated code, planted bugs' texts
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	PYTHON=$(BIN)/python proto/generate.sh --check
	$(BIN)/python -m tools.docs_reference --check
	$(BIN)/python -m tests.mutants --check

format: $(STAMP) ## Format the sources and fix what can be fixed
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

sim: $(STAMP) ## The deterministic simulation (SEEDS=2000 FROM=0; SEED=7 replays one, TRACE=1 with every event)
	@$(BIN)/python -m tests.sim $(if $(SEED),--seed $(SEED) $(if $(TRACE),--trace),--seeds $(SEEDS) --jobs $(WORKERS)) \
		$(if $(FROM),--from $(FROM)) $(if $(EVENTS),--events $(EVENTS)) $(if $(PLANT),--plant $(PLANT))

sim-map: $(STAMP) ## A million operations on maps under faults, half simulated, half of processes (OPERATIONS=500000 each)
	@$(BIN)/python -m tests.sim --from 500000 --operations $(OPERATIONS) --jobs $(WORKERS)
	OPERATIONS=$(OPERATIONS) $(BIN)/python -m pytest -m soak -o timeout=36000 -rP $(PYTEST_ARGS) tests/soak/test_map_faults.py

sim-store: $(STAMP) ## The same with whole brokers on simulated disks (SEEDS=2000 FROM=0; WORLD=plain SEED=7 TRACE=1)
	@$(BIN)/python -m tests.sim_store $(if $(WORLD),--world $(WORLD)) $(if $(SEED),--seed $(SEED) $(if $(TRACE),--trace),--seeds $(SEEDS) --jobs $(WORKERS)) \
		$(if $(FROM),--from $(FROM))

sim-pop: $(STAMP) ## Consumption by pop: the real engine against a model of everything around it (POP_SEEDS=100000, SEED=7)
	@$(BIN)/python -m tests.sim_pop $(if $(SEED),--seed $(SEED),--seeds $(POP_SEEDS) --jobs $(WORKERS)) $(if $(FROM),--from $(FROM))

sim-consumer: $(STAMP) ## Consumers against a model of a broker (CONSUMER_SEEDS=50)
	@$(BIN)/python -m tests.sim_consumer --seeds $(CONSUMER_SEEDS)

mutants: $(STAMP) ## Plant every bug of tests/mutants, and see whether the tests catch it (MUTANTS="NAME ...", MUTANTS=--check)
	@$(BIN)/python -m tests.mutants --jobs $(WORKERS) $(MUTANTS)

bench: $(VENV)/.installed-bench ## Figures beside baselines (BENCH=append_pipelined,failover_p50; QUICK=1: all in 10 minutes)
	$(BIN)/python -m benchmarks --output build/bench.json  # BENCH reaches it through the environment

bench-compare: $(STAMP) ## Which figures moved between two runs of `make bench`, beyond noise (A=old.json B=new.json)
	@$(BIN)/python -m benchmarks.comparison $(A) $(B)

flame: $(VENV)/.installed-bench ## Flame graphs of a leader while a client appends, into docs/images (root)
	$(BIN)/python -m benchmarks.flame

image-base: $(STAMP) ## A base image of Debian's packages, where none can be pulled (root; build/image/dledger-base-….tar)
	@$(BIN)/python -m cluster.image --base

image: $(STAMP) ## The container image, in a running Docker (BASE_IMAGE=python:3.12-slim; without it, on a base of Debian's packages)
	@BASE_IMAGE="$(BASE_IMAGE)" $(BIN)/python -m cluster.image

drill: $(STAMP) ## Kill the leader of a group of containers under load; 0 only if nothing is lost (DRILL="all --html r.html")
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then missing=; \
		command -v dockerd >/dev/null || [ -S /var/run/docker.sock ] || missing="docker.io iptables"; \
		if [ -n "$$missing" ]; then echo "installing: $$missing"; \
			apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
				apt-get install -qq --no-install-recommends -y $$missing >/dev/null; fi; fi
	@BASE_IMAGE="$(BASE_IMAGE)" tools/with-dockerd.sh $(BIN)/python -m cluster.drill $(DRILL)

compose-check: $(STAMP) ## The image and compose.yaml, tried from the host (needs Docker, or root and docker.io)
	tools/with-dockerd.sh $(BIN)/python -m pytest $(PYTEST_ARGS) tests/compose/test_image.py tests/compose/test_compose.py tests/compose/test_compose_tls.py tests/compose/test_compose_groups.py

proto: $(STAMP) ## Generate dledger/pb and rocketstore/pb from proto/
	PYTHON=$(BIN)/python proto/generate.sh

screenshots: $(STAMP) ## The pictures in docs/images, from a real demo and a real group in chromium
	$(BIN)/python -m tools.demo_picture docs/images/demo.svg
	$(BIN)/python -m tests.browser.screenshots docs/images

tidy: $(STAMP) ## Figures of the sources: lines, public names, ports, calls of one append and of one send
	@$(BIN)/python -m tools.tidy

docs: $(STAMP) ## Write what docs say of settings, metrics and requests anew, from the code
	$(BIN)/python -m tools.docs_reference

clean: ## Remove what was made
	rm -rf $(VENV) build dist *.egg-info .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
