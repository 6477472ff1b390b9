#!/usr/bin/env bash
# Makes the virtual environment that demo.sh and test.sh share, or leaves it alone when it is up to date.
#
#   scripts/install.sh [EXTRAS]       for instance: scripts/install.sh test
#
#   FLASHSPARK_VENV      where the environment lives   (default: .venv at the repository root)
#   FLASHSPARK_PYTHON    which Python makes it         (default: python3)
#   FLASHSPARK_PIP_ARGS  more arguments for pip, such as an --extra-index-url that offers CPU builds of torch
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${FLASHSPARK_VENV:-$root/.venv}"
python="${FLASHSPARK_PYTHON:-python3}"
extras="${1:-}"
read -ra pip_args <<<"${FLASHSPARK_PIP_ARGS:-}"

say() { echo "install: $*"; }
fail() { echo "install: $*" >&2; exit 1; }

command -v "$python" >/dev/null ||
  fail "'$python' was not found. Install Python 3.10 or newer, or name one with FLASHSPARK_PYTHON=/path/to/python."
version="$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  fail "Python 3.10 or newer is needed, '$python' is $version. Name a newer one with FLASHSPARK_PYTHON=/path/to/python."

# The key names everything the environment was made from. An environment made with the test extra serves the demo too.
key="$(cat "$root/pyproject.toml" "$root/scripts/install.sh" | cksum) $version $root"
stamp="$venv/.flashspark"
for done in "[$extras] $key" "[test] $key"; do
  if [[ -f "$stamp" && "$(<"$stamp")" == "$done" ]]; then
    say "$venv is up to date"
    exit 0
  fi
done

if [[ ! -x "$venv/bin/python" ]] || [[ "$("$venv/bin/python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')" != "$version" ]]; then
  say "making $venv with Python $version"
  "$python" -m venv --clear "$venv" ||
    fail "could not make a virtual environment; some systems package the venv module apart (python3-venv)."
fi
rm -f "$stamp"

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

# torch first and by itself: asked for as a range, a resolver may settle on a GPU build of several GB.
say "1/2 torch 2.13.0 (about 200 MB as a CPU build; several GB where the index gives a CUDA build)"
pip install ${pip_args[@]+"${pip_args[@]}"} "torch==2.13.0"
say "2/2 flashspark and what it needs${extras:+, with [$extras]}"
pip install ${pip_args[@]+"${pip_args[@]}"} --editable "$root${extras:+[$extras]}"
echo "[$extras] $key" >"$stamp"
say "done: $venv"
