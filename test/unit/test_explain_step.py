"""The explainer: the worked example in words, every kind of step, and where there is nothing to explain."""

from __future__ import annotations

import json

import pytest
import torch

from fake_server import FakeServer
from flashspark.benchmark import explain_step
from flashspark.kernels.allocate import allocate
from flashspark.scheduler.record_feed import FeedHeader, RecordFeed
from flashspark.scheduler.request_record import RequestRecord
from flashspark.scheduler.step_record import StepRecord
from flashspark.speculative.cost_table import PlainStepCosts
from flashspark.speculative.plan_stages import DraftFreeRule
from planning import CONFIDENCE, plan_input, planner_of
from tiny_models import write_tokenizer

DRAFTS = [[41, 42, 43], [51, 52, 53], [61, 62, 63]]


def feed_of(plan, correct=(2, 0, 1), trims=(None, 0, 0), components=("core", "reqs")) -> dict:
    """One step of the worked example, planned as `plan`; None: static."""
    lens, drafts = [4, 4, 4], plan is None or plan.draft
    if plan is not None:
        lens = plan.caps.tolist()
        if not plan.verify.full:
            floors, caps = torch.from_numpy(plan.floors), torch.from_numpy(plan.caps)
            lens = allocate(torch.from_numpy(CONFIDENCE), plan.verify.budget, floors, caps, 1e-6).tolist()
    reqs = [
        RequestRecord(
            rid=f"request-{i}",
            req_pool_index=i,
            prefix_len=10 * (i + 1),
            verify_len=lens[i],
            acc_len=correct[i] + 1,
            correct_drafts=correct[i],
            num_output_tokens=correct[i] + 1,
            cap_trim=trims[i],
            bonus_token=7,
            floor=None if plan is None else int(plan.floors[i]),
            cap=lens[i] if plan is None else int(plan.caps[i]),
            draft_tokens=DRAFTS[i] if drafts else None,
            confidence=CONFIDENCE[i].tolist() if plan is not None and drafts else None,
            survival=CONFIDENCE[i].cumprod().tolist() if plan is not None and drafts else None,
        )
        for i in range(3)
    ]
    feed = RecordFeed(FeedHeader("static" if plan is None else "compact", 3, 4, components, None))
    record = StepRecord(
        812,
        num_reqs=3,
        num_verify_tokens=sum(lens),
        num_rows_run=sum(lens),
        decode_ms=12.0,
        mode=feed.header.mode,
        plan=plan,
        reqs=reqs if feed.keeps_requests else (),
    )
    feed.add(record, 0.0, goes_on=True)
    return json.loads(feed.dump())


def told(capsys, tmp_path, value, *options: str) -> str:
    path = tmp_path / "records.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    assert explain_step.main([str(path), *options]) == 0
    return capsys.readouterr().out


WORKED = """\
step 812, compact: 3 requests, 8 rows could be accepted, the target ran 8
budget: 5 of 9 drafts above 3 rows for certain
tier: 8 rows for up to 3 requests, no padding
expected: 6.57 tokens (tau) in 11.11 ms (price), 591.3 tokens/s (theta), by the confidence of 2 publications before
the table says 11.11 ms, times of serving correct it by +0.0%
against everything verified: 471.6 tokens/s, the plan gains +25.4%
measured: 12.00 ms, +8.0% beside the price

stages of the plan:
  full blocks     not asked         no request keeps its block
  fairness floor  not asked         switched off
  pin             not asked         not pinned
  confidence      no change         lagged
  small batch     no change         several tiers
  table           no change         priced
  argmax          changed the plan  trims
  gain guard      no change         gain is large enough
  tier fill       no change         no padding
  draft-free      not asked         no price for a plain step

lengths: this step's own confidence expects 6.57 tokens, 6 came
the budget went to the largest survivals of the batch, 5 drafts in all
  the last one in: 0.450, draft 2 of request-2
  the first one out: 0.360, draft 3 of request-0
request-0: after 10 tokens, verified 3 of 4 rows, accepted 2 of 2 drafts, got 3 tokens; all it verified was right, and nobody knows of the rest
  draft           41      42 |     43
  confidence   0.900   0.800 |  0.500
  survival     0.900   0.720 |  0.360
request-1: after 20 tokens, verified 2 of 4 rows, accepted 0 of 1 draft, got 1 token
  draft           51 |     52      53
  confidence   0.600 |  0.500   0.900
  survival     0.600 |  0.300   0.270
request-2: after 30 tokens, verified 3 of 4 rows, accepted 1 of 2 drafts, got 2 tokens
  draft           61      62 |     63
  confidence   0.900   0.500 |  0.800
  survival     0.900   0.450 |  0.360
"""  # noqa: E501 - the last column of the first request


def test_the_worked_example(capsys, tmp_path):
    feed = feed_of(planner_of().plan(plan_input(CONFIDENCE)))
    assert told(capsys, tmp_path, feed) == WORKED
    # Whatever the records come in.
    assert (
        told(capsys, tmp_path, {"internal_states": [{}, {"dspark_info_record": feed}]}, "--rank", "1")
        == WORKED
    )
    assert told(capsys, tmp_path, feed["records"]) == WORKED
    assert told(capsys, tmp_path, feed["records"][0]) == WORKED
    lines = "\n".join(
        json.dumps(record | {"forward_ct": n}) for n in (811, 812) for record in feed["records"]
    )
    assert told(capsys, tmp_path, lines) == WORKED
    assert told(capsys, tmp_path, lines, "--forward-ct", "811") == WORKED.replace("812", "811")
    assert told(capsys, tmp_path, lines, "--last", "2") == WORKED.replace("812", "811") + "\n" + WORKED


def test_what_cap_accept_knows(capsys, tmp_path):
    feed = feed_of(planner_of().plan(plan_input(CONFIDENCE)), trims=(1, 0, 0))
    assert "got 3 tokens; 1 more would have been right" in told(capsys, tmp_path, feed)


def test_a_stage_after_the_argmax(capsys, tmp_path):
    text = told(capsys, tmp_path, feed_of(planner_of(min_gain=0.5).plan(plan_input(CONFIDENCE))))
    assert "budget: 9 of 9 drafts above 3 rows for certain" in text
    assert "the best budget was 5; gain guard made it 9" in text
    assert "every draft that could be used is verified, so nothing had to be shared out" in text


def test_a_step_before_there_is_confidence(capsys, tmp_path):
    text = told(capsys, tmp_path, feed_of(planner_of().plan(plan_input(CONFIDENCE, relayed=False))))
    assert "budget: not planned (no confidence old enough); every request verified all it could use" in text
    assert "nothing was priced" in text


def test_a_new_request_and_one_that_keeps_its_block(capsys, tmp_path):
    text = told(
        capsys, tmp_path, feed_of(planner_of().plan(plan_input(CONFIDENCE, stale=[1], keeps_block=[0])))
    )
    assert "1 request had no confidence that old and counted as certain" in text
    assert "request-0: after 10 tokens, verified 4 of 4 rows (4 for certain), " in text


def test_a_step_without_a_draft(capsys, tmp_path):
    costs = PlainStepCosts((1, 3), (1e-3, 3e-3))
    planner = planner_of(plain_costs=costs, draft_free=DraftFreeRule(patience=1))
    text = told(
        capsys, tmp_path, feed_of(planner.plan(plan_input(CONFIDENCE)), correct=(0, 0, 0), trims=(0, 0, 0))
    )
    assert "budget: none, the step ran without the draft; every request verified its anchor" in text
    assert "expected: 3.00 tokens (tau) in 3.00 ms (price), 1000.0 tokens/s (theta)\n" in text
    assert text.count("  nothing was drafted for it") == 3


def test_static_and_core_alone(capsys, tmp_path):
    text = told(capsys, tmp_path, feed_of(None))
    assert "static: every block is verified in full, nothing is planned" in text
    assert "lengths: 6 tokens came" in text
    text = told(capsys, tmp_path, feed_of(planner_of().plan(plan_input(CONFIDENCE)), components=("core",)))
    assert text.endswith(
        "nothing is recorded of its requests: start the server with SGLANG_DSPARK_DEBUG_DUMP=reqs\n"
    )


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        ("nonsense", [], "neither JSON nor one JSON object per line"),
        ('{"internal_states": [{}]}', [], "start the server with SGLANG_DSPARK_DEBUG_DUMP=reqs"),
        ('{"internal_states": [{}]}', ["--rank", "1"], "--rank 1: there are 1 ranks"),
        ('{"records": []}', [], "no decode step has been recorded yet"),
        ("[1]", [], "expected objects with forward_ct"),
        ('[{"forward_ct": 4}]', ["--forward-ct", "5"], "no such decode step among 4 to 4"),
        ('[{"forward_ct": 4}]', ["--last", "0"], "--last 0: must be at least 1"),
        ('[{"forward_ct": 4}]', [], "no step records of a server"),
        ('{"internal_states": null}', [], "no step records of a server"),
        (
            '[{"forward_ct": 1, "bs": 1, "num_verify_tokens": 8, "plan": {}}]',
            [],
            "no step records of a server",
        ),
        pytest.param("[" * 100_000, [], "no step records of a server", id="deep"),
    ],
)
def test_nothing_to_explain(capsys, tmp_path, text, options, reason):
    path = tmp_path / "records.json"
    path.write_text(text)
    assert explain_step.main([str(path), *options]) == 1
    assert reason in capsys.readouterr().err


def test_no_such_file_and_nobody_there(capsys, tmp_path):
    assert explain_step.main([str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err
    assert explain_step.main(["--base-url", "http://127.0.0.1:9"]) == 1
    assert "is the server up" in capsys.readouterr().err


def test_a_server_without_records(capsys, tmp_path):
    with FakeServer(write_tokenizer(tmp_path / "model")) as server:
        assert explain_step.main(["--base-url", server.url]) == 1
    assert "SGLANG_DSPARK_DEBUG_DUMP=reqs" in capsys.readouterr().err
