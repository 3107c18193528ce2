# The commands a person needs. `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PART ?= kill

.PHONY: help install demo test native-tests lint soak bench wheel docs clean

help:
	@echo "make demo              install into $(VENV), then train, kill, resume, export: at most 10 minutes"
	@echo "make test              install what tests need, then lint and run the whole suite"
	@echo "make native-tests      the C++ tests alone, under sanitizers (make test runs them too)"
	@echo "make soak PART=kill    long tests, apart from the suite: $$(ls tests/soak/*.py 2>/dev/null | xargs -n1 basename -s .py | tr '\n' ' ')"
	@echo "make wheel             a wheel with the native library, in dist/"
	@echo "make docs              the documentation as a site, in build/site"
	@echo "make bench             the benchmarks, one JSON object a line"
	@echo "make clean             remove $(VENV) and caches; runs/ stays"

install: $(VENV)/.installed

demo: install
	$(BIN)/bloomery demo

test: $(VENV)/.installed-dev $(VENV)/triton/.installed
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/lint-imports
	# Collecting compiles the tests' modules once for all workers, on the core that mypy leaves idle; what it finds wrong the
	# suite tells. The tests' processes share compiled modules, whatever the shell says.
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --collect-only > /dev/null 2>&1 & $(BIN)/mypy && wait
	# Tests wait for processes: 3 workers keep 2 cores busy.
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

# Beside the environment's packages, not among them: with Triton there torch would compile for CPUs in another way.
$(VENV)/triton/.installed: constraints.txt | $(BIN)/python
	rm -rf $(VENV)/triton
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -c constraints.txt --target $(VENV)/triton triton
	@touch $@

native-tests:
	$(MAKE) -C native/tests
	build/native-tests/address/ring_tests
	build/native-tests/thread/ring_tests
	build/native-tests/address/frame_mutator 5

soak: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow tests/soak/$(PART).py --timeout 7200 -s

wheel: $(VENV)/.installed
	BLOOMERY_NEEDS_NATIVE=1 $(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps -w dist .

docs: $(VENV)/.installed-dev
	$(BIN)/python -m mkdocs build --strict -q

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/train_throughput.py --json
	$(BIN)/python benchmarks/data.py --json

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "bloomery needs Python 3.11 or later; this is $$($(PYTHON) --version). Try: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	  { echo "Python's venv is missing. On Debian: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
