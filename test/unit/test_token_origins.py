"""How each token came about: by hand, against a record of every step, and on its way through /generate."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_server import FakeServer
from flashspark.api.token_trail import TokenTrail
from flashspark.ipc import RequestOutput
from flashspark.scheduler.token_origins import TokenOrigins
from flashspark.speculative.adaptive import VerifyMode
from flashspark.text import TextTokenizer
from harness import Harness, Job
from tiny_models import write_tokenizer
from unit.test_api_native import DRAFT, frames, generate
from unit.test_lossless_adaptive import (  # noqa: F401 - fixtures
    WIDTH,
    drafts,
    folders,
    grid,
    one_to_32,
    plain,
)
from unit.test_request_records import by_request, steps_of

GAMMA = WIDTH - 1


def test_by_hand():
    origins = TokenOrigins()
    origins.add_step(num_tokens=3, num_kept=3, verify_len=3, num_drafted=6)  # trims positions 2 to 5
    assert origins.take() == ["draft", "draft", "bonus"]
    origins.add_step(num_tokens=2, num_kept=2, verify_len=7, num_drafted=6)  # 3 again, 4 was wrong
    assert origins.take() == ["redraft", "bonus"]
    origins.add_step(num_tokens=3, num_kept=3, verify_len=7, num_drafted=6)  # 5 again, 6 was never trimmed
    origins.add_step(num_tokens=1, num_kept=1, verify_len=1, num_drafted=0)  # without the draft
    assert origins.take() == ["redraft", "draft", "bonus", "target"]
    origins.add_step(num_tokens=4, num_kept=2, verify_len=5, num_drafted=6)  # ends inside its drafts
    assert origins.take() == ["draft", "draft"]
    assert origins.take() == []


def replay(steps: list[tuple[int, int, int, int]]) -> list[str]:
    """The definition, position by position: what every step so far did at it."""
    origins, start = [], 0
    trimmed_by: list[range] = []
    for num_tokens, num_kept, verify_len, num_drafted in steps:
        for i in range(num_kept):
            was_trimmed = any(start + i in positions for positions in trimmed_by)
            is_draft = num_drafted > 0 and i < num_tokens - 1
            origins.append(("redraft" if was_trimmed else "draft") if is_draft else "bonus")
            if num_drafted == 0:
                origins[-1] = "target"
        trimmed_by.append(range(start + verify_len - 1, start + num_drafted))
        start += num_tokens
    return origins


@st.composite
def step(draw: st.DrawFn) -> tuple[int, int, int, int]:
    num_drafted = draw(st.sampled_from([0, 3, 7, 7]))
    verify_len = draw(st.integers(1, num_drafted + 1))
    num_tokens = draw(st.integers(1, verify_len))
    return num_tokens, num_tokens, verify_len, num_drafted


@given(st.lists(step(), max_size=30), st.integers(0, 3))
def test_any_steps(steps, num_cut):
    if steps:
        num_tokens, num_kept, verify_len, num_drafted = steps[-1]
        steps[-1] = num_tokens, max(1, num_kept - num_cut), verify_len, num_drafted
    origins, got = TokenOrigins(), []
    for values in steps:
        origins.add_step(*values)
        got += origins.take()
        assert len(origins._trimmed) <= 7
    assert got == replay(steps)


@pytest.mark.parametrize("mode", list(VerifyMode), ids=lambda mode: mode.value)
def test_origins_add_up_to_the_statistics(folders, drafts, mode):  # noqa: F811
    """With retractions, aborts, a request that is not drafted for and one that ends inside a block."""
    harness = Harness(folders["target"], drafts["dspark"], max_total_tokens=640)
    if mode is not VerifyMode.STATIC:
        harness.make_adaptive(mode, None, grid(48), min_gain=0.0, draft_free=None).planner.pin(0.4)
    harness.scheduler.keep_records(("core", "reqs"))
    jobs = one_to_32()
    for job in jobs:
        job.token_origin = True
    stop = harness.run([jobs[0]])[0].tokens[17]
    jobs[3].speculation = "off"
    jobs[0].sampling = {"stop_token_ids": [stop]}
    harness.scheduler.set_internal_state({"dspark_clear_info_records": True})
    results = harness.run([*jobs, Job(jobs[0].prompt, 8)])
    assert harness.scheduler.residency.num_retractions > 0
    assert results[-1].origins == []  # it did not ask
    records = by_request(steps_of(harness))
    seen: Counter[str] = Counter()
    for i, result in enumerate(results[:-1]):
        count = Counter(result.origins)
        seen += count
        assert len(result.origins) == len(result.tokens)
        assert count["draft"] + count["redraft"] == result.stats.num_accepted
        following = count["bonus"] + count["target"]
        stopped = result.finish.type == "stop"
        assert following in ({len(result.steps), len(result.steps) - 1} if stopped else {len(result.steps)})
        assert result.origins == replay(
            [
                (r["acc_len"], r["num_output_tokens"], r["verify_len"], GAMMA if r.get("draft_tokens") else 0)
                for r in records.get(f"job{i}", [])
            ]
        )
    assert results[0].finish.type == "stop"
    assert set(results[3].origins) == {"target"}
    assert min(seen["draft"], seen["bonus"], seen["target"]) > 20
    assert (seen["redraft"] > 20) == (mode is not VerifyMode.STATIC)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("model"))


def test_text_ends_follow_the_text(folder):
    """Token by token the text is the decoding of as many ids; half a character belongs to the token that ends it."""
    tokenizer = TextTokenizer.load(folder)
    ids = tokenizer.encode("wörd → 🙂 end")
    trail = TokenTrail(tokenizer.detokenizer(True))
    for cut in (ids[:3], ids[3:5], ids[5:]):
        trail.add(RequestOutput("r", cut, token_origins=["draft"] * len(cut)))
    ends = trail.fields(incremental=False)["token_text_ends"]
    text = tokenizer.decode(ids, False)
    assert len(ends) == len(ids) > len(text)
    assert ends[-1] == len(text)
    for i, end in enumerate(ends):
        assert tokenizer.decode(ids[: i + 1], False).rstrip("\ufffd") == text[:end]


def test_generate_tells_origins_where_it_is_asked_to(folder):
    sampling = {"max_new_tokens": 10, "ignore_eos": True}
    with FakeServer(folder, *DRAFT) as server:
        assert "token_origins" not in generate(server, sampling, text="abcd").json()["meta_info"]
        body = generate(server, sampling, text="abcd", return_token_origin=True).json()
        expected = [*["draft"] * 3, "bonus"] * 2 + ["draft", "bonus"]
        assert body["meta_info"]["token_origins"] == expected
        assert body["meta_info"]["token_text_ends"] == list(range(1, 11))
        assert len(body["text"]) == 10
        streamed = frames(generate(server, sampling, text="abcd", return_token_origin=True, stream=True))
        for body in streamed:
            meta, num_tokens = body["meta_info"], len(body["output_ids"])
            assert meta["token_origins"] == expected[:num_tokens]
            assert meta["token_text_ends"] == list(range(1, num_tokens + 1))
        off = {"speculation": {"mode": "off"}, "return_token_origin": True}
        meta = generate(server, sampling, text="abcd", **off).json()["meta_info"]
        assert meta["token_origins"] == ["target"] * 10
    with FakeServer(folder, *DRAFT, "--incremental-streaming-output") as server:
        streamed = frames(generate(server, sampling, text="abcd", return_token_origin=True, stream=True))
        metas = [body["meta_info"] for body in streamed]
        assert [len(meta["token_origins"]) for meta in metas] == [
            len(body["output_ids"]) for body in streamed
        ]
        assert [origin for meta in metas for origin in meta["token_origins"]] == expected
        assert [end for meta in metas for end in meta["token_text_ends"]] == list(range(1, 11))
