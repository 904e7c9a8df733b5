# Each target makes and reuses .venv by itself: nothing to install first but python3 with venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The real CuPy has an environment of its own, so that the other tests show what gradsync does without it.
CUPY := $(VENV)-cupy
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Where writing byte code is switched off, every start of a rank would compile the library again.
unexport PYTHONDONTWRITEBYTECODE

OUT ?= build/gpu
COMMA := ,
# Whatever these change, pip has to install anew: an editable install follows Python code only.
INSTALLED := pyproject.toml setup.py src/gradsync/communicators/shared_memory/_kernels.c
# CuPy has to fit the machine's driver, so the GPU targets take the Python that has it already, from source; where
# $(PYTHON) has none they run in .venv. Without make, and with nothing to install:
#   PYTHONPATH=src python3 benchmarks/gpu_first_light.py OUT
#   PYTHONPATH=src python3 tests/on_gpu.py OUT
#   PYTHONPATH=src python3 -m pytest benchmarks/test_gpu.py -m gpu -W default
define with_cupy
if $(PYTHON) -c 'import cupy, msgpack, click, rich, cloudpickle, $(2)' 2>/dev/null; then PYTHONPATH=src $(PYTHON) $(1); \
else $(MAKE) --no-print-directory $(VENV)/.dev && $(BIN)/python $(1); fi
endef

.PHONY: help demo test test-plain test-mpi test-cupy test-slow test-simulation lint docs wheel test-pythons test-gpu \
	first-light bench figures bench-gpu sanitize clean
help:            ## list the targets, and how long each takes on two cores
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

# pip installs the groups of pyproject.toml since 25.1.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'

# A stamp for each set of tools, so that no target waits for what another needs.
$(VENV)/.demo: $(INSTALLED) | $(BIN)/python
	@echo "Installing gradsync and scikit-learn into $(VENV), editable in place of pip install . (once, about 20 s) ..."
	$(BIN)/python -m pip install --quiet -e . scikit-learn
	@touch $@

$(VENV)/.test: $(INSTALLED) | $(BIN)/python
	@echo "Installing gradsync and its test tools into $(VENV) (once, about 30 s) ..."
	$(BIN)/python -m pip install --quiet -e . --group test
	@touch $@ $(VENV)/.demo

$(VENV)/.lint: pyproject.toml | $(BIN)/python
	@echo "Installing gradsync, ruff and mypy into $(VENV) (once, about 30 s) ..."
	$(BIN)/python -m pip install --quiet -e . --group dev
	@touch $@

$(VENV)/.dev: $(INSTALLED) | $(BIN)/python
	@echo "Installing gradsync and what its benchmarks need into $(VENV) (once) ..."
	$(BIN)/python -m pip install --quiet -e . --group test --group bench --group dev
	@touch $@ $(VENV)/.demo $(VENV)/.test $(VENV)/.lint

$(VENV)/.wheel: pyproject.toml | $(BIN)/python
	@echo "Installing what builds wheels into $(VENV) (once, about 20 s) ..."
	$(BIN)/python -m pip install --quiet --group wheel
	@touch $@

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	@echo "Installing gradsync and MkDocs into $(VENV) (once, about 20 s) ..."
	$(BIN)/python -m pip install --quiet -e . --group docs
	@touch $@

$(CUPY)/.cupy: $(INSTALLED)
	@echo "Installing the real CuPy, NCCL and NVRTC into $(CUPY) (once, 600 MB to download) ..."
	$(PYTHON) -m venv $(CUPY)
	$(CUPY)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(CUPY)/bin/python -m pip install --quiet -e . --group cupy
	@touch $@

demo: $(VENV)/.demo  ## train a digit classifier on two ranks (10 s, after a minute to install)
	$(BIN)/gradsync run -n 2 examples/train_digits.py

test: $(VENV)/.test  ## run the tests (4 minutes)
	$(BIN)/python -m pytest -n auto --dist worksteal

test-plain: $(VENV)/.test  ## run what shared memory does once more, in plain NumPy in place of C (1 minute)
	GRADSYNC_PLAIN_KERNELS=1 $(BIN)/python -m pytest tests/contract tests/backends/test_shared_memory.py \
		tests/backends/test_kernels.py -k "shm or kernels" -n auto --dist worksteal

test-cupy: $(CUPY)/.cupy  ## run the tests of the real CuPy over host memory (2 minutes, after a minute to install)
	$(CUPY)/bin/python -m pytest tests/real_cupy -m cupy -n 2 --dist loadgroup

test-mpi: $(VENV)/.test  ## run the tests over MPI, with the MPICH that pip installs (2 minutes)
	$(BIN)/python -m pytest -m mpi -n auto --dist worksteal

test-slow: $(VENV)/.test  ## run the tests that take long: faults of real processes, the wheel, 20,000 simulated runs
	$(BIN)/python -m pytest -m slow -n auto --dist worksteal

test-simulation: $(VENV)/.test  ## play 1,000 seeds of server and clients on a virtual network (30 s); SEEDS=20000: more
	$(BIN)/python -m pytest tests/simulation -n auto --dist worksteal --seeds $(or $(SEEDS),1000)

lint: $(VENV)/.lint  ## run ruff and mypy, and the C compiler with warnings as errors, where there is one (1 minute)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@if [ -n "$$REQUIRE_KERNELS" ] || command -v $(CC) >/dev/null; then \
		echo "setup.py build_ext, with warnings as errors"; \
		CFLAGS="$$CFLAGS -Wall -Wextra -Werror" REQUIRE_KERNELS=1 $(BIN)/python setup.py --quiet build_ext \
			--force --build-temp build/lint --build-lib build/lint; \
	else echo "no C compiler here: _kernels.c was not checked"; fi

# In containers cibuildwheel builds for each Python and processor of its table in pyproject.toml. Without Docker one wheel
# is built here, for this machine's processor and, because of the stable ABI, for all Pythons from 3.11 on.
wheel: $(VENV)/.wheel  ## build wheels that need no compiler, into dist (without Docker one of them, 1 minute)
	@if docker version >/dev/null 2>&1; then $(BIN)/python -m cibuildwheel --platform linux --output-dir dist; else \
		set -e; export REQUIRE_KERNELS=1 PATH="$(CURDIR)/$(BIN):$$PATH"; \
		echo "Docker does not answer, so one wheel is built, for this processor"; \
		rm -rf build/wheel; python -m build --wheel --outdir build/wheel; \
		for wheel in build/wheel/*-abi3-*.whl; do if [ -e "$$wheel" ]; then abi3audit --strict --summary "$$wheel"; fi; done; \
		auditwheel repair --strip --wheel-dir dist build/wheel/*.whl; fi

# Any warning is an error: of links, anchors, pages without a place, and docstrings.
docs: $(VENV)/.docs  ## build the documentation as a site, build/site/index.html (30 s)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "The documentation is in build/site/index.html"

test-pythons:    ## run the tests with every installed Python, 3.11 to 3.14 (3 minutes each)
	@for version in 3.11 3.12 3.13 3.14; do \
		if python$$version -c '' 2>/dev/null; then \
			echo "Python $$version"; \
			$(MAKE) --no-print-directory PYTHON=python$$version VENV=.venv-$$version test || exit 1; \
		else echo "Python $$version is not installed here"; fi; \
	done

test-gpu:        ## run the tests that need a GPU, with your CuPy (4 minutes); JUnit and JSON into OUT=build/gpu
	@$(call with_cupy,tests/on_gpu.py $(OUT),pytest$(COMMA) pytest_timeout$(COMMA) hypothesis$(COMMA) ml_dtypes)

first-light:     ## the first minutes on a GPU, with your CuPy: does NCCL work there? JSON into OUT=build/gpu
	@$(call with_cupy,benchmarks/gpu_first_light.py $(OUT),ml_dtypes)

bench: $(VENV)/.dev  ## time everything beside PyTorch and mpi4py, if they are installed (10 minutes)
	$(BIN)/python -m pytest benchmarks/

figures: $(VENV)/.dev  ## the same, into benchmarks/results, the tables of the pages and the picture; on a quiet machine
	$(BIN)/python -m pip install --quiet torch --index-url https://download.pytorch.org/whl/cpu
	$(BIN)/python -m pytest benchmarks/ --benchmark-json=benchmarks/results/cpu.json
	$(BIN)/python benchmarks/tables.py

bench-gpu:       ## time packing and a step on a GPU, with your CuPy and pytest-benchmark; JSON into OUT=build/gpu
	@mkdir -p $(OUT)
	@$(call with_cupy,-m pytest benchmarks/test_gpu.py -m gpu -W default --benchmark-json=$(OUT)/gpu_benchmarks.json,pytest$(COMMA) pytest_timeout$(COMMA) pytest_benchmark)

# A shared library, because only Python has the functions of Python's that the kernels name.
sanitize: $(VENV)/.test  ## run the kernels in C under the sanitizers of gcc, with ranks as threads (1 minute)
	@mkdir -p build
	@for kind in address,undefined thread; do \
		name=$${kind%%,*}; echo "$$kind"; \
		gcc -shared -fPIC -std=gnu11 -g -O2 -fsanitize=$$kind -fno-sanitize-recover=all -fno-strict-aliasing -pthread \
			-I$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))') -DPy_LIMITED_API=0x030B0000 \
			tests/backends/kernels_sanitised.c -o build/sanitised-$$name.so && \
		LD_PRELOAD="$$(gcc -print-file-name=lib$$(echo $$name | head -c 1)san.so) $$(gcc -print-file-name=libubsan.so)" \
			ASAN_OPTIONS=detect_leaks=0 $$(setarch -R true 2>/dev/null && echo setarch -R) $(BIN)/python -c \
			"import ctypes; raise SystemExit(ctypes.CDLL('build/sanitised-$$name.so').main())" || exit 1; \
	done

clean:           ## remove .venv, caches and builds (2 s)
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
	rm -rf $(VENV) $(CUPY) .venv-3.* .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info
