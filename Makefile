# Two commands do everything on a machine that has Python 3.11 or later: `make demo`, `make test`.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Files of tests side by side, as many as there are cores.
PYTEST := $(RUN) -m pytest -n auto --maxprocesses 8 --dist loadfile

# Copies of the real data, where they lie beside the checkout.
ifneq ($(wildcard ../shared/data),)
export TAMMES_DATA ?= $(abspath ../shared/data)
endif

.PHONY: setup demo test check docs bench gpu floor newest clean

# The constraint takes the CPU build of torch where one is on disk; users are not bound by it.
# Compiling as pip does takes longer than the demo, which imports a small part.
INSTALL := $(RUN) -m pip install --quiet --no-compile --constraint constraints.txt --editable

$(VENV)/demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[demo]'
	touch $@

# Everything else; tests start many processes, so all of it is compiled, on all cores.
$(VENV)/installed: $(VENV)/demo
	$(INSTALL) '.[dev]'
	-$(RUN) -m compileall -qq -j 0 $(VENV)/lib
	touch $@

setup: $(VENV)/installed

demo: $(VENV)/demo
	$(RUN) -m tammes demo

test: setup
	$(PYTEST) -m "not slow"

check: setup
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(PYTEST)

# Tables and outputs in docs/ that the code prints or measures, then the site: site/index.html.
docs: export NO_MKDOCS_2_WARNING := 1
docs: setup
	$(RUN) scripts/advice_evidence.py --write
	$(RUN) scripts/update_docs.py
	$(RUN) tests/test_contract.py
	$(RUN) scripts/results_document.py
	$(RUN) -m mkdocs build --quiet

bench: setup
	$(RUN) benchmarks/criterion.py
	$(RUN) benchmarks/head.py $(if $(shell command -v nvidia-smi),,--cpu)
	$(RUN) benchmarks/train.py $(if $(shell command -v nvidia-smi),,--cpu)

# Without a network: with the Python that is there, and nothing installed.
gpu:
	PYTHONPATH=src $(PYTHON) scripts/gpu.py

# The oldest torch that pyproject.toml allows (some 3 GB), where tests lean on its internals.
floor:
	$(PYTHON) -m venv .venv-floor
	.venv-floor/bin/python -m pip install --quiet 'torch==2.11.*' --editable '.[lab]' \
		hypothesis pytest pytest-xdist
	.venv-floor/bin/python -m pytest -n auto -m torch_version \
		$(shell grep -rl --include='test_*.py' mark.torch_version tests)

# What pip installs today where nothing is pinned, the newest torch among it (some 5 GB).
newest:
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --editable '.[dev]'
	.venv-newest/bin/python -m pytest -n auto --maxprocesses 8 --dist loadfile -m "not slow"

clean:
	rm -rf $(VENV) .venv-floor .venv-newest site .mypy_cache .ruff_cache .pytest_cache .hypothesis
