# tensortap: `make demo` and `make test` are all that a fresh clone needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.base
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
NATIVE := $(wildcard src/tensortap/native/*)

.PHONY: demo test lint types check bench bench-monitor bench-gpu matrix pictures clean

# Set-up for the demo: a virtual environment with the package alone (editable, core compiled).
$(BASE): pyproject.toml constraints.txt $(NATIVE)
	@test -x $(BIN)/python || { echo "Making a virtual environment in $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing torch: 200 MB where pip finds a build for CPUs, else some GB for CUDA"
	@$(PIP) torch
	@echo "Installing tensortap and compiling its core"
	@$(PIP) -e .
	@touch $@

# Set-up for the rest: all extras, and what the tests need.
$(STAMP): $(BASE)
	@echo "Installing what the tests need: all extras (over a gigabyte)"
	@$(PIP) -e '.[dev]'
	@touch $@

demo: $(BASE)
	$(BIN)/tensortap demo

# Two workers, a thread each: threads of torch that wait for one another spin, and double the time.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

check: lint types test

bench: $(STAMP)
	$(BIN)/python benchmarks/summary.py
	$(BIN)/python benchmarks/difference.py
	$(BIN)/python benchmarks/comparing.py
	$(BIN)/python benchmarks/recording.py
	$(BIN)/python benchmarks/streaming.py
	$(BIN)/python benchmarks/diagnosis.py
	$(BIN)/python benchmarks/compiled.py

# Watching against wandb.watch, TensorBoard histograms and torchlens, in one run.
bench-monitor: $(STAMP)
	$(PIP) torchlens
	$(BIN)/python benchmarks/monitor.py

# Every model with every runtime: the table in docs/compiled.md.
matrix: $(STAMP)
	$(BIN)/python tools/matrix.py --jobs 2 --page docs/compiled.md

# Needs a CUDA device; some four minutes.
bench-gpu: $(STAMP)
	$(BIN)/python benchmarks/gpu.py

# Remakes the pictures and the command reference under docs/.
pictures: $(STAMP)
	$(BIN)/python tools/pictures.py
	$(BIN)/python tools/minimax_pictures.py
	$(BIN)/python tools/quamba_pictures.py
	$(BIN)/python tools/devices.py
	$(BIN)/python tools/reference.py

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
