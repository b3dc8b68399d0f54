# Everything a person or CI runs. `make test` and `make serve` install what they need first.
PYTHON ?= python3
VENV ?= .venv
ENGINES ?= .engines
BIN := $(VENV)/bin

# `make engines` installs other people's engines (4 GB) for `make integration`, which `make test` does not run.
.PHONY: engines integration install model serve test compiled test-compiled check lint types contracts size fmt clients fuzz soak clean

$(BIN)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

install: $(BIN)/.installed

model: install
	$(BIN)/weighbridge model fetch

serve: model
	$(BIN)/weighbridge serve

test: check model
	$(BIN)/python -m pytest

engines:
	$(PYTHON) scripts/install_engines.py $(ENGINES)

integration: model
	WEIGHBRIDGE_ENGINES=$(abspath $(ENGINES)) $(BIN)/python -m pytest -s tests/real --timeout 900 -rs

# The request path as machine code in build/compiled; run it with PYTHONPATH=build/compiled. Needs a C compiler.
compiled: install
	$(BIN)/python scripts/compile.py

test-compiled: compiled
	PYTHONPATH=build/compiled $(BIN)/python -P -c 'import weighbridge.gateway.flight as f; assert f.__file__.endswith(".so")'
	$(BIN)/python -m pytest --import-mode=importlib -o pythonpath='build/compiled .' \
		tests/unit/test_http_*.py tests/unit/test_gateway_*.py tests/unit/test_routing_*.py \
		tests/property/test_http_*.py tests/property/test_gateway_*.py tests/property/test_routing_*.py \
		tests/integration/test_gateway_history.py

check: lint types contracts size

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

contracts: install
	$(BIN)/lint-imports --no-cache

size: install
	$(BIN)/python scripts/size.py

fmt: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# clients of other makers in environments of their own: results are in docs/gateway.md
CLIENT_VENV ?= .venv-clients
clients: model
	test -x $(CLIENT_VENV)/bin/python || $(PYTHON) -m venv $(CLIENT_VENV)
	$(CLIENT_VENV)/bin/python -m pip install --quiet openai langchain-openai anthropic
	npm install --silent --no-audit --no-fund --prefix $(CLIENT_VENV)/node openai
	$(BIN)/python -m tests.clients.run $(CLIENT_VENV)/bin/python $(CLIENT_VENV)/node

# Schemathesis and Atheris, FUZZ_S seconds for each target
FUZZ_S ?= 120
FUZZ_VENV ?= .venv-fuzz
fuzz: install
	test -x $(FUZZ_VENV)/bin/python || $(PYTHON) -m venv $(FUZZ_VENV)
	$(FUZZ_VENV)/bin/python -m pip install --quiet schemathesis atheris -e .
	$(BIN)/python -m tests.fuzz.openapi $(FUZZ_VENV)/bin/schemathesis $(FUZZ_S)
	for target in sse scanner splice head reply; do \
	  $(FUZZ_VENV)/bin/python -m tests.fuzz.run $$target $(FUZZ_S) || exit 1; done

# a mix of everything: the requests of an hour at SOAK_RATE a second, in at most SOAK_S seconds; memory, descriptors and
# threads must stay flat
SOAK_RATE ?= 60
SOAK_S ?= 690
soak: install
	$(BIN)/python -m benchmarks.gateway_soak --hour-at $(SOAK_RATE) --seconds $(SOAK_S)

clean:
	rm -rf $(VENV) .venv-* .fuzz .schemathesis .mypy_cache .ruff_cache .hypothesis
