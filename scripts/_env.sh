# Sourced by the scripts beside it. Makes .venv once and defines ROOT, PY (its interpreter) and say().
#
# The stamp in .venv holds what the environment was made from. While it matches, nothing is downloaded, so every script runs
# offline the second time, also after the folder was moved. Programs of .venv/bin are run as modules, since they name their
# interpreter by its old place then. Environment: PYTHON, the interpreter to build it with.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
PY="$VENV/bin/python"
EXTRAS="dev,docs,hf,gguf,sentencepiece"
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '==> %s\n' "$*" >&2; }
stop() { printf 'error: %s\n' "$*" >&2; exit 2; }

# PYTHON alone if it is set; otherwise the first that is new enough.
find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then set -- "$PYTHON"; else set -- python3 python3.13 python3.12 python3.11 python3.10; fi
  for candidate in "$@"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

fingerprint() {
  (cd "$ROOT" && printf '%s\n' "$EXTRAS" && cat pyproject.toml constraints.txt) | cksum
}

holds() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

environment_is_current() {
  holds "$VENV/.stamp" "$(fingerprint)" && holds "$VENV/.place" "$ROOT" && "$PY" -c 'import ghoststep' >/dev/null 2>&1
}

install() {
  "$PY" -m pip install --quiet --constraint "$ROOT/constraints.txt" "$@" ||
    stop "could not install: $*. The first run needs a package registry; got no answer from it or no such release (pip's" \
      "message is above). Connect, or set PIP_INDEX_URL to a mirror, and run the same command again: it goes on from here."
}

make_environment() {
  local base
  if [ -d "$VENV" ] && ! "$PY" -c 'import pip' >/dev/null 2>&1; then
    say "the environment in .venv is broken (its Python is gone?): rebuilding it"
    rm -rf "$VENV"
  fi
  if [ ! -d "$VENV" ]; then
    base="$(find_python)" || stop "no Python 3.10 or newer found (tried ${PYTHON:-python3, python3.10 to python3.13})." \
      "Install one, or name it: PYTHON=/path/to/python3 bash $0"
    say "making .venv with $("$base" --version 2>&1) (once; downloads about 300 MB besides torch)"
    "$base" -m venv "$VENV" || { rm -rf "$VENV"; stop "$base -m venv failed (on Debian: apt install python3-venv)."; }
  fi
  if holds "$VENV/.stamp" "$(fingerprint)"; then
    # Only the folder has another name: what is installed still serves, but points to the old place.
    say "this folder has moved: pointing .venv to its new place"
    install --no-index --no-deps --no-build-isolation --editable "$ROOT"
  else
    say "installing what pyproject.toml and constraints.txt name"
    # torch first and alone: a bare requirement may choose another build. Build tools next: with them inside, neither this
    # install nor the wheel's test needs a network of its own.
    install torch==2.13.0 numpy
    install hatchling editables
    install --no-build-isolation --editable "$ROOT[$EXTRAS]"
  fi
  printf '%s\n' "$ROOT" >"$VENV/.place"
  fingerprint >"$VENV/.stamp"
}

environment_is_current || make_environment
cd "$ROOT"
