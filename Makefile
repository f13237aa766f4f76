# make demo    train a small model on the embedded corpus, then score it; sets up .venv the first time
# make test    the test suite          make lint    formatting, lint, types          make clean    remove .venv and caches
#
# Variables: PYTHON (3.11 or newer), VENV, EXTRAS (of pyproject.toml, for test and lint), PYTEST_ARGS.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev
# Two to four processes: each compiles for itself and holds about a gigabyte. The tests of a file, which share programs
# and runs, run in one of them, in the order of tests/conftest.py.
PYTEST_ARGS ?= -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

BIN := $(VENV)/bin/python
MAKEFLAGS += --no-print-directory

.DELETE_ON_ERROR:
.PHONY: demo test lint clean

demo: $(VENV)/.installed
	$(BIN) train.py --config configs/demo.py --workdir runs/demo

test: $(VENV)/.installed-$(EXTRAS)
	$(BIN) -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-$(EXTRAS)
	$(BIN) -m ruff format --check .
	$(BIN) -m ruff check .
	$(BIN) -m mypy

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# An environment is made anew when the file that marks it complete is missing: an interrupted set-up leaves no half one.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	  "error: $(PYTHON) is missing or older than Python 3.11; name another one: make PYTHON=python3.11" >&2; exit 1; }
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# One stamp for each set of extras: .installed has none, .installed-dev,parity has two.
$(VENV)/.installed $(VENV)/.installed-$(EXTRAS): $(VENV)/.created pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (JAX and the rest; a few minutes the first time)"
	@$(BIN) -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -e ".$(if $(findstring .installed-,$@),[$(EXTRAS)])"
	@touch $@
