# make tables: the main job. make test: the test suite. Both make their environment in .venv first.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
WORKDIR ?= runs
TABLES := parameters cache_size kv_memory fractional inner_product rotation_mixing distortion
MODEL_TABLES := perplexity attention_fidelity needle_model

.PHONY: env tables models test lint bench clean

env: $(VENV)/.test

$(VENV)/.made: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	touch $@

$(VENV)/.tables: $(VENV)/.made
	$(RUN) -m pip install --quiet --editable '.[experiments]'
	touch $@

$(VENV)/.test: $(VENV)/.made
	$(RUN) -m pip install --quiet --editable '.[test,bench]'
	touch $@

tables: $(VENV)/.tables
	@for name in $(TABLES); do \
		$(RUN) -m experiments.run --config=configs/$$name.py --workdir=$(WORKDIR)/$$name || exit 1; \
	done

models: env
	@for name in $(MODEL_TABLES); do \
		$(RUN) -m experiments.run --config=configs/$$name.py --workdir=$(WORKDIR)/$$name || exit 1; \
	done

test: env
	$(RUN) -m pytest -n 2 --dist=worksteal tests

lint: env
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright --pythonpath $(RUN)

bench: env
	@for name in throughput kv_throughput generation_throughput; do \
		$(RUN) -m experiments.run --config=configs/$$name.py --workdir=$(WORKDIR)/$$name || exit 1; \
	done

clean:
	rm -rf $(VENV) $(WORKDIR)
