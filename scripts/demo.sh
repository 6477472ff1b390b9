#!/usr/bin/env bash
# Installs (or reuses) the environment, then shows the same model without and with speculation.
#
#   scripts/demo.sh [--exit] [--port N] [--prompt TEXT] [--max-tokens N]
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/scripts/install.sh"
exec "${FLASHSPARK_VENV:-$root/.venv}/bin/python" "$root/scripts/demo.py" "$@"
