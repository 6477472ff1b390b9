#!/usr/bin/env bash
# The tables of docs/performance.md on a bare machine with one GPU (an H200: 25 GB of its disk, some 15 GPU minutes).
#
#   scripts/gpu_table.sh OUT          writes OUT/table.json, simulated.json, random.json, *breakdown, logs, and a plot
#   scripts/performance_tables.py --record OUT    then puts them under benchmark/results and into the page
#
# Run again after an interruption, it goes on with what OUT lacks: leave OUT where it is.
#
#   PAIR          where the inflated pair lies or is made  (default: $TMPDIR or /tmp, flashspark-qwen3-8b)
#   PIECES        concurrencies, one engine for each group (default: 1,2,4,8,16,32,64,128,256 on one: a start takes 80 s)
#   LENGTHS       where compact is compared with every fixed block length (default: "W2:0 W1:0"; "none": nowhere)
#   PARTS         of table, breakdown, simulated, random, kernels  (default: "table breakdown simulated random");
#                 breakdowns are of the engines of table and simulated, or of one of its own if neither is asked for;
#                 random is simulated with random weights of the target too, as the peer's were
#   SERVER_ARGS   further flags of the engine              (default: none)
#   TABLE_ARGS    further flags of benchmark/gpu_serving.py for the table, for instance --budget-seconds 400
#   PEER_ARGS     the same for the comparison with a peer  (default: none)
#   COMMIT        to record, where OUT's machine has no repository to ask
#   PYTHON        an interpreter that has what pyproject.toml asks for (default: python3; scripts/install.sh makes one)
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
[[ $# -eq 1 ]] || { sed -n '2,20s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
out="$1"
pair="${PAIR:-${TMPDIR:-/tmp}/flashspark-qwen3-8b}"
python="${PYTHON:-python3}"
read -ra pieces <<<"${PIECES:-1,2,4,8,16,32,64,128,256}"
read -ra lengths <<<"${LENGTHS:-W2:0 W1:0}"
read -ra parts <<<"${PARTS:-table breakdown simulated random}"
read -ra table_args <<<"${TABLE_ARGS:-}"
read -ra peer_args <<<"${PEER_ARGS:-}"
export PYTHONPATH="$root/python${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"

wants() { [[ " ${parts[*]} " == *" $1 "* ]]; }

"$python" -c 'import flashspark.scheduler.process' ||
  { echo "gpu_table: $python lacks what the engine needs; see scripts/install.sh" >&2; exit 1; }

if [[ ! -f "$pair/dspark/config.json" ]]; then
  echo "== inflating the demo pair into $pair"
  "$python" scripts/inflate_checkpoint.py --geometry qwen3-8b --out "$pair" 2>&1 | tee "$out/inflate.log"
fi

measure() { # NAME CONCURRENCY DRAFT FLAGS…
  local name="$1" concurrency="$2" draft="$3"
  shift 3
  echo "== $name, concurrency $concurrency"
  "$python" benchmark/gpu_serving.py --in-process --model-path "$pair/target" --draft "$pair/$draft" \
    --concurrency "$concurrency" --resume --out "$out/$name.json" ${COMMIT:+--commit "$COMMIT"} "$@" 2>&1 |
    tee -a "$out/$name.log"
}

if wants table; then
  flags=()
  [[ "${lengths[*]}" == none ]] || flags+=(--lengths "${lengths[@]}")
  for i in "${!pieces[@]}"; do
    last=()
    if wants breakdown && [[ $i -eq $((${#pieces[@]} - 1)) ]]; then last=(--breakdown "$out/breakdown"); fi
    measure table "${pieces[$i]}" dflash2 --server-args="${SERVER_ARGS:-}" ${flags[@]+"${flags[@]}"} \
      ${table_args[@]+"${table_args[@]}"} ${last[@]+"${last[@]}"}
  done
elif wants breakdown && ! wants simulated; then
  echo "== breakdown, on an engine of its own"
  # shellcheck disable=SC2086 # flags are words
  "$python" benchmark/step_breakdown.py --model-path "$pair/target" --speculative-draft-model-path "$pair/dflash2" \
    --speculative-algorithm DFLASH --out "$out/breakdown" ${COMMIT:+--commit "$COMMIT"} ${SERVER_ARGS:-} 2>&1 | tee "$out/breakdown.log"
fi
against_peer() { # NAME FLAGS-OF-THE-ENGINE FLAGS…
  local name="$1" engine="$2"
  shift 2
  # The peer's draft was a DFlash of the first kind.
  "$python" benchmark/peer_draft.py "$pair/dflash2" "$pair/peer-draft"
  measure "$name" 1,4,8,16,32,64,128 peer-draft --simulate-accept 4 --repeats 2 "$@" \
    --server-args="${SERVER_ARGS:-} --speculative-draft-load-format dummy$engine" ${peer_args[@]+"${peer_args[@]}"}
}

if wants simulated; then
  last=()
  if wants breakdown; then last=(--breakdown "$out/simulated-breakdown"); fi
  against_peer simulated "" ${last[@]+"${last[@]}"}
fi
if wants random; then against_peer random " --load-format dummy"; fi
if wants kernels; then
  "$python" benchmark/kernels.py --out "$out/kernels" 2>&1 | tee "$out/kernels.log"
fi

if [[ -f "$out/table.json" ]] && "$python" -c 'import matplotlib' 2>/dev/null; then
  "$python" benchmark/plot_serving.py "$out/table.json" --out "$out/table.svg"
fi
