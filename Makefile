# Each target makes its environment in .venv first; `make help` lists them.
PYTHON ?= python3
# Python 3.12 or newer, for the newest jax: the first that is on the path or in pyenv.
NEWEST ?= $(shell for p in python3.13 python3.12 $$HOME/.pyenv/versions/3.1[2-9].*/bin/python3; do \
	$$p -c "" 2> /dev/null && echo $$p && break; done)
VENV ?= .venv
RUN := $(VENV)/bin/python
# Python compiles what it imports and keeps that; all of it at once is half of an installation. Told to keep nothing, it
# takes two more seconds for each of the processes that tests start.
export PYTHONDONTWRITEBYTECODE :=
# Quiet about what can be had, and about editable installations.
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
PIP := PYTHONWARNINGS=ignore $(RUN) $(INSTALL)
WORKDIR ?= runs
# As in the extra `metal` of pyproject.toml, which is for macOS only.
METAL := jax==0.5.0 jaxlib==0.5.0 'numpy<2.3' 'optax<0.2.6' 'flax<0.11'
# google-tunix and gemma, and of all that they name what is imported: the whole would be gigabytes.
ENGINES := google-tunix==0.1.7 gemma==4.0.1 kauldron==1.4.4 google-metrax==0.2.4 clu==0.0.12 dialog==1.1.0 \
	chex==0.1.92 toolz lark typeguard immutabledict wrapt perfetto pandas python-dateutil six
MODEL_TABLES := perplexity attention_fidelity needle_model qet_theory

.PHONY: help env gpu-compile-env tpu-compile-env tables models test test-full test-x64 test-newest test-metal test-engines goldens lint bench clean

help:
	@grep -E '^[a-z-]+:.*## ' Makefile | sed 's/\([a-z-]*\):.*## /make \1: /'

env: $(VENV)/.test-full ## an environment with all that tests need

gpu-compile-env: $(VENV)/.gpu-compile ## the compiler for NVIDIA GPUs, 250 MB

tpu-compile-env: $(VENV)/.tpu-compile ## the compiler for TPUs, 680 MB

$(VENV)/.made: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || { \
		echo "expected Python 3.11 or newer, got $$($(PYTHON) --version 2>&1): make PYTHON=python3.12, say"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.tables: $(VENV)/.made
	$(PIP) --editable '.[experiments]'
	touch $@

$(VENV)/.test: $(VENV)/.made
	$(PIP) --editable '.[test]'
	touch $@

$(VENV)/.test-full: $(VENV)/.made
	$(PIP) --editable '.[test-full]'
	touch $@

# The compiler for NVIDIA GPUs, 250 MB, in a folder of its own: a jax that finds its CUDA plugin complains without a GPU.
# Nothing is installed where the kernels do not exist: an older jax, or a platform without these wheels.
$(VENV)/.gpu-compile: $(VENV)/.test-full tests/tools/hopper.py
	@wheels="$$($(RUN) -m tests.tools.hopper --wheels)" && \
		if [ -n "$$wheels" ]; then \
			rm -rf $(VENV)/gpu-compile && \
			$(RUN) $(INSTALL) --no-deps --target $(VENV)/gpu-compile $$wheels; \
		fi
	touch $@

# The compiler for TPUs, in a folder of its own too: a jax that finds it looks for a TPU.
$(VENV)/.tpu-compile: $(VENV)/.test-full tests/tools/tpu.py
	@wheels="$$($(RUN) -m tests.tools.tpu --wheels)" && \
		if [ -n "$$wheels" ]; then \
			rm -rf $(VENV)/tpu-compile && \
			$(RUN) $(INSTALL) --no-deps --target $(VENV)/tpu-compile $$wheels; \
		fi
	touch $@

tables: $(VENV)/.tables ## an environment and seven tables on synthetic data and word vectors
	@$(RUN) -m experiments.tables --into=$(WORKDIR)

models: env ## tables on language models, an hour and a half
	@for name in $(MODEL_TABLES); do \
		$(RUN) -m experiments.run $$name --workdir=$(WORKDIR)/$$name || exit 1; \
	done

# A worker takes whole files, so that what their tests share is made once. One that dies ends the run: a new one would
# begin its file again, eight times.
PYTEST := -m pytest -n 2 --dist=loadfile --max-worker-restart=0
# Shapes and types in signatures are checked in the core alone: that takes a third of the time of what is not compiled.
TYPES := --jaxtyping-packages=rqjax,beartype.beartype

test: $(VENV)/.test ## an environment and the core of the test suite
	$(RUN) $(PYTEST) $(TYPES) -m "not full" tests

# With CORE, a file where `make test` kept the core's seconds (see .ci/run), the core does not run again.
test-full: env gpu-compile-env tpu-compile-env ## all tests, those of kernels compiled for GPUs and TPUs among them
	$(RUN) $(PYTEST) --core-share=0.25 $(if $(CORE),-m full --core-seconds=$(CORE)) tests

# Each kind of code, caches, search and a decoder, where arrays without a dtype have 64 bits.
X64 := turboquant_prod or trellis or affine or product_rounded or steps or schedule or attention_is or looks_ahead or \
	exact_codes or groups or rerank or counted or gpt_oss
test-x64: env ## a part of the core in 64 bits
	JAX_ENABLE_X64=1 $(RUN) $(PYTEST) -m "not full" -k "$(X64)" $(addprefix tests/, quantizers/test_laws.py \
		cache/test_cache.py search/test_index.py search/test_lists.py nn/test_decoder.py)

# Every kernel lowers for CUDA on the newest jax, and README's examples run; nothing to do where there is no Python for it.
test-newest: ## the kernels lower and the examples run on the newest jax
	@if [ -z "$(NEWEST)" ]; then echo "no Python 3.12 or newer for the newest jax"; else \
		$(NEWEST) -m venv $(VENV)-newest && \
		$(VENV)-newest/bin/python $(INSTALL) --upgrade jax jaxtyping scipy optax safetensors absl-py pytest && \
		$(VENV)-newest/bin/python -m pytest -q tests/backends/test_lowering.py tests/test_wheel.py -k "not types"; \
	fi

# On jax 0.5, the last that jax-metal runs with, and what goes with it: the core of caches, quantizers and rotations, of a
# decoder and of an index. The rest calls what these call, or says nothing more of it.
test-metal: ## a part of the core on jax 0.5.0, the last for jax-metal
	$(PYTHON) -m venv $(VENV)-metal
	$(VENV)-metal/bin/python $(INSTALL) --upgrade pip
	$(VENV)-metal/bin/python $(INSTALL) --editable '.[test]' $(METAL)
	$(VENV)-metal/bin/python $(PYTEST) -m "not full" $(addprefix tests/, cache paging core quantizers rotations \
		nn/test_decoder.py search/test_index.py)
	$(VENV)-metal/bin/python -m pytest -q tests/test_wheel.py -k "not types"

# Caches under the samplers of google-tunix and gemma; nothing to do where there is no Python for them.
test-engines: ## compressed caches under google-tunix and gemma
	@if [ -z "$(NEWEST)" ]; then echo "no Python 3.12 or newer for gemma"; else \
		$(NEWEST) -m venv $(VENV)-engines && \
		$(VENV)-engines/bin/python $(INSTALL) 'jax<0.13' 'flax<0.13' optax scipy jaxtyping safetensors \
			pytest pytest-xdist absl-py ml_collections einops sentencepiece huggingface_hub pillow requests \
			tensorboardX tqdm && \
		$(VENV)-engines/bin/python $(INSTALL) --no-deps $(ENGINES) && \
		$(VENV)-engines/bin/python -m pytest -n 2 -W ignore::DeprecationWarning tests/nn/test_compress.py; \
	fi

goldens: env gpu-compile-env tpu-compile-env ## renews what the kernels compile to
	$(RUN) -m tests.tools.hopper --goldens
	$(RUN) -m tests.tools.tpu --goldens

lint: env ## ruff and pyright
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright --pythonpath $(RUN)

bench: env ## the tables of speed
	@for name in throughput kv_throughput generation_throughput trellis_throughput qet_throughput search_throughput; do \
		$(RUN) -m experiments.run $$name --workdir=$(WORKDIR)/$$name || exit 1; \
	done

clean: ## removes environments and runs/
	rm -rf $(VENV) $(VENV)-newest $(VENV)-metal $(VENV)-engines $(WORKDIR)
