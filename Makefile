# make test | make test-slow | make demo | make demo-full | make lint | make test-legacy
# The environment is made on first use and again when requirements-cpu.txt changes.
PYTHON ?= python3
PY := .venv/bin/python
# Wheels are unpacked beside the environment: they take 0.7 GB for a while, which /tmp does not have everywhere.
PIP_INSTALL := TMPDIR="$(CURDIR)/.venv" $(PY) -m pip install --quiet --disable-pip-version-check
SMOLLM2 := data/targets/smollm2-135m
PROMPTS := data/prompts
HELD_OUT := $(PROMPTS)/mt_bench.jsonl $(PROMPTS)/humaneval.jsonl $(PROMPTS)/gsm8k.jsonl

.PHONY: install lint test test-slow demo demo-full

install: .venv/installed

# torch first and with its own needs, so that it works with whatever build pip finds; the rest exactly as locked.
.venv/installed: requirements-cpu.txt
	$(PYTHON) -m venv --clear .venv
	$(PIP_INSTALL) "$$(grep '^torch==' requirements-cpu.txt)"
	$(PIP_INSTALL) --no-deps -r requirements-cpu.txt
	touch $@

lint: .venv/installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

test: .venv/installed lint
	$(PY) -m pytest

# One of these looks at the report in Chromium (apt-get install chromium) and is skipped without it.
test-slow: .venv/installed
	$(PY) -m pytest -m slow

$(SMOLLM2)/config.json: .venv/installed
	$(PY) data/get_smollm2.py $(SMOLLM2)

$(PROMPTS)/metadata.json: .venv/installed
	$(PY) data/get_prompts.py $(PROMPTS)

# The five stages on SmolLM2-135M, each of which skips what it finished before, and a page on what came of them.
define STAGES
$(PY) 00_generate_responses.py --config $(1) --model-path $(SMOLLM2) --input $(PROMPTS)/train.jsonl --output $(2)/answers.jsonl
$(PY) 01_prepare_data.py --config $(1) --model-path $(SMOLLM2) --input $(2)/answers.jsonl --output-dir $(2)/prepared
$(PY) 02_extract_hidden_states.py --config $(1) --model-path $(SMOLLM2) \
    --prepared-data $(2)/prepared/tokenized_data.jsonl --output-dir $(2)/hidden_states
$(PY) 03_train_draft.py --config $(1) --model-path $(SMOLLM2) --hidden-states $(2)/hidden_states --output-dir $(2)
$(PY) 04_evaluate_draft.py --config $(1) --draft $(2)/draft --prompts $(HELD_OUT) --output $(2)/evaluation.json
$(PY) -m eagle3.report $(2)
endef

demo demo-full: export VLLM_LOGGING_LEVEL ?= ERROR
demo: .venv/installed $(SMOLLM2)/config.json $(PROMPTS)/metadata.json
	$(call STAGES,configs/smollm2.yaml,out/demo)

demo-full: .venv/installed $(SMOLLM2)/config.json $(PROMPTS)/metadata.json
	$(call STAGES,configs/smollm2_full.yaml,out/demo-full)

include legacy.mk
