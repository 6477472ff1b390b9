#!/usr/bin/env bash
# Installs (or reuses) the environment, then lints, type-checks and tests.
#
#   scripts/test.sh [--full] [PYTEST ARGUMENTS]
#
# Without --full: what runs on every change, under 25 minutes on 2 cores. With it: the long storms and sweeps too.
# With pytest arguments (a path, -k NAME) only those tests run, and nothing is linted.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
tier="not full" name="fast"
if [[ "${1:-}" == "--full" ]]; then
  tier="(full or not full)" name="full"
  shift
fi
bash scripts/install.sh test
bin="${FLASHSPARK_VENV:-$root/.venv}/bin"

# One thread per process: the same sums in the same order on every machine, and two workers share two cores well.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

if (($#)); then
  exec "$bin/python" -m pytest -m "$tier" "$@"
fi

failed=()
step() {
  local title="$1" start=$SECONDS
  shift
  echo "== $title"
  if "$@"; then echo "== $title: ok, $((SECONDS - start)) s"; else
    echo "== $title: FAILED, $((SECONDS - start)) s"
    failed+=("$title")
  fi
}

step "ruff check" "$bin/ruff" check .
step "ruff format" "$bin/ruff" format --check .
step "mypy" "$bin/mypy"
step "unit tests" "$bin/python" -m pytest -q -n "${FLASHSPARK_TEST_WORKERS:-2}" -m "not e2e and $tier"
# Live servers one at a time: they measure time-outs and use the cores themselves.
step "end-to-end tests" "$bin/python" -m pytest -q -m "e2e and $tier"

if ((${#failed[@]})); then
  printf -v list '%s, ' "${failed[@]}"
  echo "FAILED ($name tier, $SECONDS s): ${list%, }"
  exit 1
fi
echo "PASSED ($name tier, $SECONDS s): lint, types, unit tests, end-to-end tests"
