# Every target except clean creates .venv on first use and installs the package with its extra dev.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test test-all test-gpu results docs notebook lint format bench bench-gpu clean

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

demo: $(READY)  ## train without and with CE on digits, compare, and write a page (CPU, about three minutes)
	$(BIN)/cenet demo

test: $(READY)  ## the tests that CI runs, five to six minutes on two idle cores
	$(BIN)/pytest -n auto --dist worksteal --durations 25 -m "not slow and not gpu"

test-all: $(READY)  ## the tests of CI and the long tier
	@command -v chromium >/dev/null || echo "no chromium: the report page is not tested in a browser (apt install chromium)"
	$(BIN)/pytest -n auto --dist worksteal -m "not gpu"

test-gpu: $(READY)  ## the tests that need a CUDA device
	$(BIN)/pytest -m gpu

results: $(READY)  ## write the tables and figures of README and docs from experiments/results
	$(BIN)/python -m experiments build

docs: $(READY)  ## build the site into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebook: $(READY)  ## run the tutorial and save its outputs
	PYTHONWARNINGS=ignore:IProgress $(BIN)/jupyter execute --inplace docs/tutorial.ipynb

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## measure the cost of CE on this CPU, as ratios
	$(BIN)/python benchmarks/bench_resnet50_cpu.py

bench-gpu: $(READY)  ## measure the cost of the layer on this GPU, compared with batch norm
	$(BIN)/python benchmarks/bench_layer.py --out benchmarks/results/layer.csv

clean:
	rm -rf $(VENV) dist site .pytest_cache .mypy_cache .ruff_cache
