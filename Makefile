# Run from a fresh clone: each target makes the virtual environment it needs.
#
#     make demo          install, fetch the demo model, answer a question, compare with transformers
#     make test          the tests, in one process (minutes; none that needs a GPU)
#     make test-kernels  every Triton kernel through the operators' tests, interpreted on a CPU
#     make check         format, lint, types, and the rules of the house
#     make test-slow     the tests that take minutes each: every kernel compiled for five targets among them
#     make test-gpu      the kernels on this machine's GPU, then compute-sanitizer over them (PY= a CUDA build of torch)
#     make clean         remove what the other targets made
#
# PYTHON=python3.12      the interpreter that the environment is made with (3.11 or newer)
# VENV=path              where the environment lies
# PY=path/to/python      use an environment of your own (CUDA torch, say): nothing is installed

PYTHON ?= python3
VENV ?= .venv
STAMP := $(VENV)/installed.stamp

ifdef PY
READY :=
else
PY := $(VENV)/bin/python
READY := $(STAMP)
endif

PIP := $(VENV)/bin/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
# A CUDA build of torch brings a triton of its own. With another one, the version that the GPU's rows are measured with.
TRITON := triton==3.6.0; platform_system == "Linux" and platform_machine == "x86_64"
PYTEST := $(PY) -m pytest
ARCHITECTURE := tests/test_architecture.py

.PHONY: demo venv test test-kernels test-slow test-gpu check format clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(PY) -m microllm generate --model demo --prompt "What is the capital of France?" --temperature 0 --max-tokens 32
	$(PY) -m microllm align --model demo --quick

venv: $(STAMP)

# torch comes first and pinned: a later step then has no reason to take another build of it.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "got Python %d.%d; need 3.11 or newer; run: make PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip setuptools
	$(PIP) torch
	$(VENV)/bin/python -c 'import triton' 2>/dev/null || $(PIP) '$(TRITON)'
	$(PIP) --no-build-isolation --editable '.[hf,plot,serve,guided,dev]'
	touch $@

test: $(READY)
	$(PYTEST)

# A process of its own: Triton reads TRITON_INTERPRET when a kernel is decorated.
test-kernels: $(READY)
	TRITON_INTERPRET=1 $(PYTEST) -m "interpreter and not gpu" tests/ops

test-slow: $(READY)
	$(PYTEST) -m "slow and not gpu"

test-gpu: $(READY)
	$(PYTEST) -m gpu
	$(PY) tools/sanitize.py --out sanitizer.json

check: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(PY) -m pyright --pythonpath $(PY)
	$(PYTEST) -q $(ARCHITECTURE)

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
