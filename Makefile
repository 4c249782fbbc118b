# Python >= 3.12. `make test JAX=newest` tests against the newest JAX that is supported, `SHARE=1/2` with half of the
# tests.
PYTHON ?= python3
JAX ?= oldest
SHARE ?= 1/1
ENV := .venv/$(JAX)
BIN := $(ENV)/bin
PINS := constraints.txt constraints-$(JAX).txt

# Compiling, not running, is what the tests' tiny programs cost on a CPU: these flags halve it.
test: export XLA_FLAGS := $(XLA_FLAGS) --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true

.PHONY: demo test lint clean

demo: $(ENV)/ready
	$(BIN)/python examples/train_char.py

test: $(ENV)/ready
	$(BIN)/python -m pytest -n auto --dist worksteal --share $(SHARE)

lint: $(ENV)/ready-to-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

$(ENV)/ready: pyproject.toml $(PINS)
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 12))" || \
		{ echo "Python >= 3.12 is required, $(PYTHON) is older; use make PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(ENV)
	$(BIN)/python -m pip install --quiet $(addprefix -c ,$(PINS)) -e ".[examples,tests]"
	touch $@

$(ENV)/ready-to-lint: $(ENV)/ready
	$(BIN)/python -m pip install --quiet $(addprefix -c ,$(PINS)) -e ".[lint]"
	touch $@

clean:
	rm -rf .venv
