# Every target makes its own .venv when there is none (or when its dependencies have changed).
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
RESULTS ?= results
FIGURES ?= $(RESULTS)/figures
POLICIES := bundled-base,bundled-instruct,bundled-icl

.PHONY: reproduce test check figures bench clean install
.DEFAULT_GOAL := reproduce

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "error: $(PYTHON) cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 2; }
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

# The three policies on all cores, one process for each cell.
reproduce: $(STAMP)
	$(BIN)/grpo mse-eval -m hydra/launcher=joblib hydra.launcher.batch_size=1 model=$(POLICIES) methods=[components],[monte_carlo] results_dir=$(RESULTS)
	$(BIN)/grpo plot mse --results $(RESULTS) --out $(FIGURES)

figures: $(STAMP)
	$(BIN)/grpo plot --results $(RESULTS) --out $(FIGURES)

test: $(STAMP)
	$(BIN)/python -m pytest -q -n auto

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis outputs multirun
	find grpo_repro tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
