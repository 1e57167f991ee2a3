# Targets: env demo env-test test test-slow notebooks budgets lint clean.  `make demo` on a fresh clone installs the base only.

SHELL := /bin/bash
PY := .venv/bin/python
BASE_STAMP := .venv/.stamp-base
TEST_STAMP := .venv/.stamp-test
SOURCES := src pallas_kernels tests $(wildcard notebooks/*.py) run_decode.py
# Two workers: the suite compiles JAX programs, and each one fills a core.
WORKERS ?= 2
BUDGET_BACKENDS ?= xla fused
COMPILER := jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-nvvm
PROMPT ?= What is a generator?
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: env demo env-test test test-slow notebooks budgets lint clean

env: $(BASE_STAMP)

$(BASE_STAMP): pyproject.toml constraints.txt
	@py=""; for candidate in python3.12 python3; do \
	  if "$$candidate" -c 'import sys; raise SystemExit(sys.version_info[:2] != (3, 12))' 2>/dev/null; \
	  then py=$$candidate; break; fi; done; \
	if [ -z "$$py" ]; then echo "v4flash needs Python 3.12, and neither python3.12 nor python3 is one:" \
	  "install it (with pyenv: pyenv install 3.12) and run make again." >&2; exit 1; fi; \
	if [ ! -x $(PY) ]; then echo "making .venv with $$("$$py" --version)"; "$$py" -m venv .venv; fi
	$(PY) -m pip install --quiet -c constraints.txt -e .
	@touch $@

demo: env
	$(PY) run_decode.py --prompt '$(PROMPT)'

env-test: $(TEST_STAMP)

$(TEST_STAMP): $(BASE_STAMP)
	$(PY) -m pip install --quiet -c constraints.txt -e '.[test,notebooks,compile]'
	@# Without dependencies: compiling needs plugin and assembler, not 2 GB of libraries that only a GPU uses.
	$(PY) -m pip install --quiet --no-deps -c constraints.txt $(COMPILER)
	@touch $@

lint: env-test
	$(PY) -m ruff check $(SOURCES)
	$(PY) -m ruff format --check $(SOURCES)

test: lint
	JAX_PLATFORMS=cpu $(PY) -m pytest -n $(WORKERS)

# Hours on two cores: law by a million draws, thousands of echoed names, states at every alignment. Recorded results:
# docs/measurements/*-speculation.md and *-long-sweeps.md.
test-slow: lint
	JAX_PLATFORMS=cpu $(PY) -m pytest -n $(WORKERS) -m "slow or not slow"

# Executes every notebook and writes its outputs into the .ipynb beside it.
notebooks: env-test
	JAX_PLATFORMS=cpu $(PY) notebooks/execute.py

# Compiles the step of both checkpoints for both GPUs and records what it launches: minutes each, 3 GB of memory.
budgets: env-test
	@for config in v4-flash-0731 v4.1-flash; do for target in h200 gb300; do for backend in $(BUDGET_BACKENDS); do \
	  $(PY) -m v4flash kernels budget --config $$config --target $$target --backend $$backend --json \
	    > docs/budgets/new.json && mv docs/budgets/new.json docs/budgets/$$config-$$target-$$backend.json \
	    || exit 1; done; done; done
	@for backend in $(BUDGET_BACKENDS); do \
	  $(PY) -m v4flash kernels budget --config v4.1-flash --target h200 --backend $$backend --experts peer --json \
	    > docs/budgets/new.json && mv docs/budgets/new.json docs/budgets/v4.1-flash-h200-$$backend-peer.json \
	    || exit 1; done

clean:
	rm -rf .venv build dist results .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src pallas_kernels tests notebooks -name __pycache__ -type d -prune -exec rm -rf {} +
