# Everything from a bare clone: each target makes .venv, installs into it, and runs.
#
#   make pretrain    train a small GPT on as many pipeline ranks as the machine has cores for, with a planned schedule
#   make compare     train it in turn with megatron-core's schedules and with ours, and compare times and losses
#   make examples    train plain PyTorch layers, AlexNet on photographs and a Hugging Face Llama on two pipeline ranks,
#                    and compare each with one process
#   make test        the tests of every feature, in about 14 minutes on two cores
#   make test-rest   the other tests: further combinations of parallelism, schedules, precisions and ways to end
#   make test-all    both
#   make playground  a page that draws any schedule as it runs, served to your browser
#   make test-browser  the playground in a headless Chromium, which apt-get installs
#   make test-slurm  the Slurm examples on a Slurm of two nodes, which apt-get installs; as root
#   make test-megatron  the launcher under the trainers of megatron-core's wheels, which it fetches from PyPI, and our
#                    trainer over them; MEGATRON_LM=FOLDER takes a checkout of Megatron-LM instead
#   make docs        the documentation as a site, in build/site
#   make docs-check  run the commands that README.md and docs/ show
#   make lint        ruff (format, check) and mypy
#   make gpu-check   numerics, times, memory and messages on one CUDA device; with the torch that is there, if it is
#
# PYTHON=python3.12 chooses the interpreter that .venv is made from; FLAGS='...' are passed on. WORKERS=2 is how many
# files of tests run at once: many of them start up to eight ranks, which wait for each other more than they compute.
# SHARE=1 or SHARE=2 runs half of the files of test-rest, or test-megatron with one of its two Megatrons.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
BY_FILE := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
PIP_FLAGS := --disable-pip-version-check --constraint constraints.txt
INSTALLED := $(VENV)/.installed
ENGINES := $(addprefix $(CURDIR)/build/transformer_engine-,2.11.0 2.20.2)
MEGATRONS := $(addprefix $(CURDIR)/build/megatrons/,0.18.2 0.19.2)
MEGATRON_LM ?= $(if $(SHARE),$(word $(SHARE),$(MEGATRONS)),$(MEGATRONS))
IN_SHARE = $(if $(SHARE),$$(grep -rl exhaustive tests --include='test_*.py' --exclude-dir=megatrons | sort | awk 'NR % 2 == $(SHARE) % 2'))

PLAYGROUND := megatron/zero_bubble/cli/playground/npm
PYODIDE := $(PLAYGROUND)/node_modules/pyodide/package.json

.PHONY: pretrain compare examples playground test test-rest test-all test-browser test-megatron screenshots test-slurm docs docs-check gpu-check lint format clean

$(INSTALLED): pyproject.toml constraints.txt setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "make: $(PYTHON) is older than Python 3.10; choose another with PYTHON=..." >&2; exit 1; }
	@echo "making $(VENV) (once): torch, megatron-core and what the tests and tools need"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP_FLAGS) torch
	$(BIN)/pip install $(PIP_FLAGS) --editable '.[dev,solver,examples]'
	@touch $@

pretrain: $(INSTALLED)
	$(BIN)/python tools/make_sample_data.py
	PATH="$(CURDIR)/$(BIN):$$PATH" examples/pretrain_sample.sh $(FLAGS)

compare: $(INSTALLED)
	$(BIN)/python tools/make_sample_data.py
	PATH="$(CURDIR)/$(BIN):$$PATH" examples/compare_sample.sh $(FLAGS)

examples: $(INSTALLED)
	for name in plain_pytorch alexnet llama; do \
		OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/$$name.py || exit 1; \
	done

# Python for the browser, in the version that package-lock.json pins: a wheel that is built after this carries it.
$(PYODIDE): $(PLAYGROUND)/package-lock.json
	@command -v npm >/dev/null || { echo "make: npm fetches Python for the browser; install it (apt-get install npm)" >&2; exit 1; }
	npm ci --prefix $(PLAYGROUND) --ignore-scripts --no-audit --no-fund
	@touch $@

playground: $(INSTALLED) $(PYODIDE)
	$(BIN)/zero-bubble playground $(FLAGS)

test: $(INSTALLED)
	$(PYTEST) $(BY_FILE) $(FLAGS)

test-rest: $(INSTALLED)
	$(PYTEST) $(BY_FILE) -m exhaustive --durations 10 $(IN_SHARE) $(FLAGS)

test-all: $(INSTALLED)
	$(PYTEST) $(BY_FILE) -m "" $(FLAGS)

# Skipped, with the reason, where it cannot be: without root, without namespaces, on a system without apt-get.
test-slurm: $(INSTALLED)
	@command -v slurmctld >/dev/null && command -v munged >/dev/null && command -v ip >/dev/null || \
		{ apt-get update && apt-get install --yes --no-install-recommends slurm-wlm munge iproute2; } || true
	PATH="$$PATH:/usr/sbin:/sbin" $(PYTEST) tests/slurm $(FLAGS)

# Skipped, with the reason, where there is no Chromium and apt-get does not give one.
test-browser: $(INSTALLED) $(PYODIDE)
	@command -v chromium >/dev/null || { apt-get update && apt-get install --yes --no-install-recommends chromium; } || true
	$(BIN)/pip install --quiet $(PIP_FLAGS) --editable '.[browser]'
	$(BIN)/python -m pytest tests/browser $(FLAGS)

# The launcher under Megatron's trainer, and our own trainer: its checkpoints, and sequences cut for several ranks.
# At the end, the layers of Transformer Engine: its Python, with torch's functions in the places of its kernels.
test-megatron: $(INSTALLED) $(MEGATRON_LM) $(ENGINES)
	for folder in $(MEGATRON_LM); do \
		echo "== Megatron of $$folder"; \
		PYTHONPATH=$$folder $(PYTEST) $(BY_FILE) tests/megatrons $(FLAGS) && \
		PYTHONPATH=$$folder $(PYTEST) $(BY_FILE) -m "" \
			tests/end_to_end/test_resume.py::test_killed_and_resumed_equals_uninterrupted \
			tests/end_to_end/test_resume.py::test_megatron_cores_schedule_resumes_from_ours \
			tests/end_to_end/test_checkpoint_schedule.py::test_the_flags_schedule_takes_its_place \
			tests/end_to_end/test_multi_token.py::test_their_losses_are_logged_as_megatron_lm_does \
			tests/end_to_end/test_multi_token.py::test_the_losses_of_experts_are_collected_in_rehearsals_and_recomputed_blocks \
			tests/end_to_end/test_hybrid_trainings.py::test_a_resumed_training_equals_an_uninterrupted_one \
			tests/end_to_end/test_parallelism.py::test_context_parallelism_computes_what_one_rank_computes \
			|| exit 1; \
	done
	for folder in $(ENGINES) $(lastword $(MEGATRON_LM)):$(lastword $(ENGINES)); do \
		PYTHONPATH=$$folder $(PYTEST) tests/engines $(FLAGS) || exit 1; \
	done

$(CURDIR)/build/transformer_engine-%: | $(INSTALLED)
	rm -rf $@ $@.part
	$(BIN)/pip install --quiet $(PIP_FLAGS) --no-deps --target $@.part transformer-engine==$*
	mv $@.part $@

$(CURDIR)/build/megatrons/%: tests/megatrons/unpack.py | $(INSTALLED)
	rm -rf $@ $@.part
	$(BIN)/python $< $* $@.part
	mv $@.part $@

# Pictures of the page at three widths, to be looked at; those of docs/playground.md are among them.
screenshots: $(INSTALLED) $(PYODIDE)
	$(BIN)/python -m tests.browser.screenshots

# A container has its own torch, which knows the device: .venv is used if it is there, and made only where there is none.
gpu-check:
	@[ -e $(INSTALLED) ] || $(PYTHON) -c 'import torch' 2>/dev/null || $(MAKE) $(INSTALLED)
	@$$([ -e $(INSTALLED) ] && echo $(BIN)/python || echo $(PYTHON)) -m megatron.zero_bubble.cli check $(FLAGS)

# The playground is on the site if it has been fetched: make playground.
docs: $(INSTALLED)
	$(BIN)/pip install --quiet $(PIP_FLAGS) --editable '.[docs]'
	@[ ! -e $(PYODIDE) ] || $(BIN)/zero-bubble playground --output build/playground
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build $(FLAGS)
	@echo "the site is in build/site; to read it: $(BIN)/python -m http.server --directory build/site"

docs-check: $(INSTALLED)
	$(PYTEST) --numprocesses $(WORKERS) --dist loadgroup -m "" tests/test_documentation_commands.py tests/documentation \
		$(FLAGS)

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .cache build dist *.egg-info
