#!/usr/bin/env bash
# The serving table of docs/performance.md on a bare machine with one GPU (an H200: 25 GB of its disk, 10 GPU minutes).
#
#   scripts/gpu_table.sh OUT          writes OUT/table.json, OUT/simulated.json, logs, and plots where matplotlib is
#
# Run again after an interruption, it goes on with the points that OUT lacks: leave OUT where it is.
#
#   PAIR          where the inflated pair lies or is made  (default: $TMPDIR or /tmp, flashspark-qwen3-8b)
#   PIECES        concurrencies, one engine for each group (default: "1,2,4,8 16,32,64 128,256")
#   SERVER_ARGS   further flags of the engine              (default: none)
#   TABLE_ARGS    further flags of benchmark/gpu_serving.py, for instance --lengths
#   COMMIT        to record, where OUT's machine has no repository to ask
#   PYTHON        an interpreter that has what pyproject.toml asks for (default: python3; scripts/install.sh makes one)
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
[[ $# -eq 1 ]] || { sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
out="$1"
pair="${PAIR:-${TMPDIR:-/tmp}/flashspark-qwen3-8b}"
python="${PYTHON:-python3}"
read -ra pieces <<<"${PIECES:-1,2,4,8 16,32,64 128,256}"
read -ra table_args <<<"${TABLE_ARGS:-}"
export PYTHONPATH="$root/python${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"

"$python" -c 'import flashspark.scheduler.process' ||
  { echo "gpu_table: $python lacks what the engine needs; see scripts/install.sh" >&2; exit 1; }

if [[ ! -f "$pair/dspark/config.json" ]]; then
  echo "== inflating the demo pair into $pair"
  "$python" scripts/inflate_checkpoint.py --geometry qwen3-8b --out "$pair" 2>&1 | tee "$out/inflate.log"
fi

measure() { # NAME CONCURRENCY FLAGS…
  local name="$1" concurrency="$2"
  shift 2
  echo "== $name, concurrency $concurrency"
  "$python" benchmark/gpu_serving.py --in-process --model-path "$pair/target" --draft "${draft:-$pair/dflash2}" \
    --concurrency "$concurrency" --server-args="${SERVER_ARGS:-}${draft:+ --speculative-draft-load-format dummy}" --resume --out "$out/$name.json" \
    ${COMMIT:+--commit "$COMMIT"} "$@" 2>&1 |
    tee -a "$out/$name.log"
}

for piece in "${pieces[@]}"; do
  measure table "$piece" ${table_args[@]+"${table_args[@]}"}
done
# The peer's draft was a DFlash of the first kind.
"$python" benchmark/peer_draft.py "$pair/dflash2" "$pair/peer-draft"
draft="$pair/peer-draft" measure simulated 1,4,8,16,32,64,128 --simulate-accept 4

if "$python" -c 'import matplotlib' 2>/dev/null; then
  "$python" benchmark/plot_serving.py "$out/table.json" --out "$out/table.svg"
fi
