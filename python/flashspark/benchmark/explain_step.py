"""Says in words why a decode step verified what it did: this budget, and these lengths.

python -m flashspark.benchmark.explain_step --base-url http://127.0.0.1:30000 --last 3
python -m flashspark.benchmark.explain_step records.json --forward-ct 812

Reads the records of a live server, or a file (`-`: stdin): `/server_info`, its `dspark_info_record`, a list of records,
or one record per line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .live_server import LiveServer, ProfileError

Record = dict[str, Any]
RECORDS_HINT = "start the server with SGLANG_DSPARK_DEBUG_DUMP=reqs"


def main(argv: Sequence[str] | None = None) -> int:
    """Process entry; 1 where there is nothing to explain, with the reason on stderr."""
    args = _parser().parse_args(argv)
    try:
        if args.base_url is not None:
            records = records_in(LiveServer(args.base_url, args.api_key).info(), args.rank)
        else:
            text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text(encoding="utf-8")
            records = records_in(parse(text), args.rank)
        text = "\n\n".join(explain(record) for record in choose(records, args.last, args.forward_ct))
    except (OSError, ValueError, ProfileError) as error:
        print(f"explain_step: {error}", file=sys.stderr)
        return 1
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        print(f"explain_step: these are no step records of a server ({error!r})", file=sys.stderr)
        return 1
    print(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flashspark.benchmark.explain_step", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("file", nargs="?", help="file with records, JSON or JSON lines; - is stdin")
    source.add_argument("--base-url", help="of a server that keeps records")
    parser.add_argument("--api-key", help="of the server")
    parser.add_argument("--rank", type=int, default=0, help="data-parallel rank (default 0)")
    parser.add_argument("--last", type=int, default=1, help="how many of the latest steps (default 1)")
    parser.add_argument("--forward-ct", type=int, help="the step with this number instead")
    return parser


def parse(text: str) -> Any:
    """One JSON value, or a list of the lines'.

    Raises:
        ValueError: it is neither.
    """
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise ValueError(f"neither JSON nor one JSON object per line: {error}") from None


def records_in(value: Any, rank: int = 0) -> list[Record]:
    """The step records of anything that holds some.

    Raises:
        ValueError: there are none, with what to do about it.
    """
    if isinstance(value, dict) and "internal_states" in value:
        states = value["internal_states"]
        if not 0 <= rank < len(states):
            raise ValueError(f"--rank {rank}: there are {len(states)} ranks")
        value = states[rank].get("dspark_info_record")
        if value is None:
            raise ValueError(f"the server keeps no records of its steps: {RECORDS_HINT}")
    if isinstance(value, dict):
        value = value.get("records", [value])
    if not isinstance(value, list) or not all(isinstance(r, dict) and "forward_ct" in r for r in value):
        raise ValueError(
            "no step records: expected objects with forward_ct, or dspark_info_record around them"
        )
    if not value:
        raise ValueError("no decode step has been recorded yet")
    return value


def choose(records: list[Record], last: int, forward_ct: int | None) -> list[Record]:
    """The latest `last`, or the one with that number.

    Raises:
        ValueError: it is not there.
    """
    if last < 1:
        raise ValueError(f"--last {last}: must be at least 1")
    if forward_ct is None:
        return records[-last:]
    found = [record for record in records if record["forward_ct"] == forward_ct]
    if not found:
        first, latest = records[0]["forward_ct"], records[-1]["forward_ct"]
        raise ValueError(f"--forward-ct {forward_ct}: no such decode step among {first} to {latest}")
    return found


def explain(record: Record) -> str:
    """Some paragraphs about one step."""
    lines = [_headline(record)]
    if "plan" in record:
        lines += [*_budget(record), *_times(record), "", "stages of the plan:", *_stages(record["plan"])]
    elif record.get("mode") == "static":
        lines.append("static: every block is verified in full, nothing is planned")
    if not record.get("reqs"):
        lines.append(f"nothing is recorded of its requests: {RECORDS_HINT}")
        return "\n".join(lines)
    return "\n".join([*lines, "", *_lengths(record), *(line for r in record["reqs"] for line in _request(r))])


def _headline(record: Record) -> str:
    rows, run = record.get("verify_tokens_local"), record["num_verify_tokens"]
    verified = "" if rows is None else f"{rows} rows could be accepted, "
    return (
        f"step {record['forward_ct']}, {record.get('mode', 'unknown mode')}: {_count(record['bs'], 'request')}, "
        f"{verified}the target ran {run}"
    )


def _budget(record: Record) -> Iterator[str]:
    plan, budget = record["plan"], record.get("budget")
    most = plan["max_budget"]
    if not plan["draft"]:
        yield "budget: none, the step ran without the draft; every request verified its anchor"
        return
    if budget is None:
        reason = next(s["reason"] for s in plan["stages"] if s["name"] == "confidence")
        yield f"budget: not planned ({reason}); every request verified all it could use"
        return
    yield f"budget: {budget} of {_count(most, 'draft')} above {_count(plan['num_floor_tokens'], 'row')} for certain"
    tier = record.get("verify_tokens_graph_key")
    if tier is None:
        yield f"tier: none, {plan['num_tokens']} rows run as they are"
    else:
        padding = tier - plan["num_tokens"]
        padded = f"{padding} of them padding" if padding else "no padding"
        yield f"tier: {tier} rows for up to {_count(plan['num_slots'], 'request')}, {padded}"
    chosen = plan.get("argmax_budget")
    if chosen is not None and chosen != budget:
        yield f"the best budget was {chosen}; {_changed_by(plan)} made it {budget}"


def _changed_by(plan: Record) -> str:
    names = [s["name"] for s in plan["stages"] if s["changed"] and s["name"] in ("gain guard", "tier fill")]
    return " and ".join(names) or "a later stage"


def _times(record: Record) -> Iterator[str]:
    plan = record["plan"]
    tau, price_ms, theta = (
        plan.get("expected_tokens"),
        record.get("predicted_step_ms"),
        record.get("predicted_theta"),
    )
    if tau is None or price_ms is None or theta is None:
        yield "nothing was priced"
    else:
        old = f", by the confidence of {record['lag_steps']} publications before" if plan["draft"] else ""
        yield f"expected: {tau:.2f} tokens (tau) in {price_ms:.2f} ms (price), {theta:.1f} tokens/s (theta){old}"
        table_ms = plan.get("table_step_ms")
        if table_ms:
            yield f"the table says {table_ms:.2f} ms, times of serving correct it by {price_ms / table_ms - 1:+.1%}"
        for name, key in (("everything verified", "full_theta"), ("no draft at all", "plain_theta")):
            if plan.get(key):
                yield f"against {name}: {plan[key]:.1f} tokens/s, the plan gains {theta / plan[key] - 1:+.1%}"
    new = record["bs"] - plan["num_fresh"]
    if price_ms is not None and new and plan["draft"]:
        yield f"{_count(new, 'request')} had no confidence that old and counted as certain"
    measured_ms = record.get("decode_ms")
    if measured_ms:
        beside = "" if price_ms is None else f", {measured_ms / price_ms - 1:+.1%} beside the price"
        yield f"measured: {measured_ms:.2f} ms{beside}"


def _stages(plan: Record) -> Iterator[str]:
    for stage in plan["stages"]:
        what = "changed the plan" if stage["changed"] else "no change" if stage["ran"] else "not asked"
        yield f"  {stage['name']:<15} {what:<17} {stage['reason']}"


def _lengths(record: Record) -> Iterator[str]:
    """The cut: the least survival that was bought, and the largest that was not."""
    reqs, plan = record["reqs"], record.get("plan")
    got = sum(r["acc_len"] for r in reqs)
    survivals = [(r, r["survival"]) for r in reqs if r.get("survival")]
    if plan is not None and survivals:
        expected = len(reqs) + sum(sum(survival[: r["verify_len"] - 1]) for r, survival in survivals)
        yield f"lengths: this step's own confidence expects {expected:.2f} tokens, {got} came"
    else:
        yield f"lengths: {got} tokens came"
    if plan is None or not survivals or not plan["draft"]:
        return
    if plan["full"]:
        yield "every draft that could be used is verified, so nothing had to be shared out"
        return
    bought = [(s[k], r["rid"], k) for r, s in survivals for k in range(r["floor"] - 1, r["verify_len"] - 1)]
    left = [(s[k], r["rid"], k) for r, s in survivals for k in range(r["verify_len"] - 1, r["cap"] - 1)]
    yield f"the budget went to the largest survivals of the batch, {_count(len(bought), 'draft')} in all"
    if bought:
        least = min(bought)
        yield f"  the last one in: {least[0]:.3f}, draft {least[2] + 1} of {least[1]}"
    if left:
        best = max(left, key=lambda entry: entry[0])
        yield f"  the first one out: {best[0]:.3f}, draft {best[2] + 1} of {best[1]}"
    if len(bought) < record.get("budget", 0):
        yield "  the rest of the budget found no draft with a chance at all"


def _request(req: Record) -> Iterator[str]:
    certain = f" ({req['floor']} for certain)" if (req.get("floor") or 0) > 1 else ""
    yield (
        f"{req['rid']}: after {_count(req['prefix_len'], 'token')}, verified {req['verify_len']} of "
        f"{_count(req['cap'], 'row')}{certain}, accepted {req['correct_drafts']} of "
        f"{_count(req['verify_len'] - 1, 'draft')}, got {_count(req['acc_len'], 'token')}{_trim(req)}"
    )
    if not req.get("draft_tokens"):
        yield "  nothing was drafted for it"
        return
    cut = req["verify_len"] - 1
    rows = [("draft", [str(token) for token in req["draft_tokens"]])]
    for name in ("confidence", "survival"):
        if req.get(name):
            rows.append((name, [f"{value:.3f}" for value in req[name]]))
    for name, cells in rows:
        shown = [f"{cell:>7}" for cell in cells]
        yield f"  {name:<10} {' '.join(shown[:cut])} |{' '.join(shown[cut:])}".rstrip()


def _trim(req: Record) -> str:
    trim = req.get("cap_trim")
    if trim is None:
        return "; all it verified was right, and nobody knows of the rest"
    return f"; {trim} more would have been right" if trim else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


if __name__ == "__main__":
    sys.exit(main())
