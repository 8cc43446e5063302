# demo, test and lint make the environment they need, in .venv.
PYTHON ?= $(shell command -v python3.12 || command -v python3)
VENV := .venv

.PHONY: demo test lint format clean

demo: $(VENV)/installed
	$(VENV)/bin/pallas-patch-embed demo --out demo.png

test: $(VENV)/installed
	$(VENV)/bin/python -m pytest

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
	  { echo "Python 3.12 or newer is needed: make PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info demo.png
