"""Decode speed of one request at a time: a server without a draft against one with it, in turn.

    python benchmark/decode_speed.py --out benchmark/results/decode_speed_cpu.json

Both servers run side by side and are asked alternately (A B A B …), so that a slow minute of the machine hits
both. Metric: decode tokens per second of a request = tokens after the first frame / time after the first frame;
the figure is the median over prompts of the median over rounds. A greedy loop ends a request's count.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from servers import provenance, serve  # noqa: E402

from demo_pair.decode import loop_end  # noqa: E402
from flashspark.demo import DEMO_PROMPTS  # noqa: E402

ARMS = {
    "plain": [],
    "dflash2": ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "demo-dflash2"],
}


def measure(port: int, input_ids: list[int], max_new_tokens: int) -> tuple[float, int, float]:
    """One greedy request: decode tokens/s, tokens counted, acceptance length."""
    body = {
        "input_ids": input_ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"/generate answered {response.status}: {response.read()[:500]!r}")
    frames: list[tuple[float, int]] = []
    last: dict = {}
    for line in response:
        if line.startswith(b"data: {"):
            last = json.loads(line[6:])
            frames.append((time.perf_counter(), len(last["output_ids"])))
    counted = loop_end(last["output_ids"]) or len(last["output_ids"])
    inside = [frame for frame in frames if frame[1] <= counted] or frames[:1]
    (start, first), (end, final) = inside[0], inside[-1]
    speed = (final - first) / (end - start) if end > start else float("nan")
    return speed, final, last["meta_info"].get("spec_accept_length", 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--prompts", type=int, default=20, help="the first N held-out prompts by id")
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--min-counted", type=int, default=32, help="leave out requests that loop earlier")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    prompts = json.loads(DEMO_PROMPTS.read_text())[: options.prompts]

    speeds: dict[str, dict[str, list[float]]] = {arm: {p["id"]: [] for p in prompts} for arm in ARMS}
    counted: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        ports = {
            arm: stack.enter_context(serve(["--model-path", "demo", *flags])) for arm, flags in ARMS.items()
        }
        for round_index in range(options.rounds + 1):  # round 0 warms up
            for prompt in prompts:
                for arm, port in ports.items():
                    speed, tokens, _ = measure(port, prompt["token_ids"], options.max_new_tokens)
                    if round_index:
                        speeds[arm][prompt["id"]].append(speed)
                    counted[prompt["id"]] = tokens
            print(f"round {round_index} of {options.rounds} done", file=sys.stderr)

    kept = [p["id"] for p in prompts if counted[p["id"]] >= options.min_counted]
    medians = {arm: {i: statistics.median(speeds[arm][i]) for i in kept} for arm in ARMS}
    ratios = sorted(medians["dflash2"][i] / medians["plain"][i] for i in kept)
    by_round = [
        statistics.median(speeds["dflash2"][i][k] / speeds["plain"][i][k] for i in kept)
        for k in range(options.rounds)
    ]
    result = {
        **provenance(),
        "prompts_counted": kept,
        "decode_tokens_per_s": {arm: round(statistics.median(medians[arm].values()), 1) for arm in ARMS},
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_quartiles": [round(q, 3) for q in statistics.quantiles(ratios, n=4)],
        "ratio_by_round": [round(r, 3) for r in by_round],
        "per_prompt": {i: {arm: round(medians[arm][i], 1) for arm in ARMS} for i in kept},
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    summary = ("decode_tokens_per_s", "ratio_median", "ratio_quartiles", "ratio_by_round")
    print(json.dumps({key: result[key] for key in summary}, indent=1))


if __name__ == "__main__":
    main()
