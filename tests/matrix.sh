#!/usr/bin/env bash
# Runs the short suite (`make test`) with every Python of VERSIONS that is found, each with the oldest
# and the newest jax that pyproject.toml allows. Prints a table, and fails if any line of it failed.
set -uo pipefail
cd "$(dirname "$0")/.."
VERSIONS="${*:-3.12 3.13 3.14 3.15}"
oldest=$(sed -n 's/^ *"jax>=\([0-9.]*\).*/\1/p' pyproject.toml)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

find_python() {
  local path
  for path in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
    "$path" -c "import sys; sys.exit(sys.version_info[:2] != tuple(map(int, '$1'.split('.'))))" 2>/dev/null &&
      command -v "$path" && return
  done
  return 1
}

row() {
  printf '| %s | %s | %s |\n' "$@" >>"$work/table"
}

for version in $VERSIONS; do
  if python=$(find_python "$version"); then
    for jax in "==$oldest" ">=$oldest"; do
      environment="$work/$version$jax"
      log="$work/log"
      "$python" -m venv "$environment"
      python_there="$environment/bin/python"
      if PATCH_EMBED_CUDA=OFF "$python_there" -m pip install --quiet --disable-pip-version-check \
        '.[test]' "jax$jax" >"$log" 2>&1; then
        JAX_DISABLE_MOST_OPTIMIZATIONS=1 "$python_there" -m pytest >"$log" 2>&1
      fi || { failed=1 && tail -n 40 "$log"; }
      found=$("$python_there" -c 'import jax; print(jax.__version__)' 2>/dev/null)
      row "$("$python" -V | cut -d' ' -f2)" "${found:-$jax}" "$(grep -E ' (passed|failed)' "$log" | tail -n 1)"
    done
  else
    row "$version, not found" "" "not run"
  fi
done
printf '\n| Python | jax | tests |\n|---|---|---|\n'
cat "$work/table"
exit "$failed"
