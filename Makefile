# Two commands on a fresh machine, each doing its own set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test setup clean

demo: $(VENV)/.ready
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/demo.sh

test: $(VENV)/.ready
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check.sh

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt scripts/setup.sh
	scripts/setup.sh "$(PYTHON)" "$(VENV)"
	touch $@

clean:
	rm -rf $(VENV) runs
