"""The benchmarks' prompt sets: what is frozen, and how candidates are cut and chosen."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmark"), str(ROOT / "scripts")]

import prompt_files  # noqa: E402

from demo_pair import corpus, prompt_sets  # noqa: E402
from demo_pair.prompt_sets import Measured  # noqa: E402
from flashspark.demo import DEMO_MODELS  # noqa: E402

FILES = {name: ROOT / "benchmark" / "prompts" / f"{name.lower()}.json" for name in ("W1", "W2")}


@pytest.mark.parametrize("name", FILES)
def test_a_frozen_set_is_what_its_header_says(name):
    content = prompt_files.read_set(name)
    texts = [prompt["text"] for prompt in content["prompts"]]
    assert len(set(texts)) == len(texts) == content["num_prompts"] == 512
    ids = prompt_files.token_ids(name)
    sizes = [len(prompt) for prompt in ids]
    assert sum(sizes) == content["num_tokens"]
    assert len(set(map(tuple, ids))) == 512
    # What a prompt and a run's output take fits into the pair's context of 1,024 tokens.
    assert min(sizes) >= prompt_sets.MIN_PROMPT and max(sizes) <= max(prompt_sets.PROMPT_LIMITS) + 1
    packages = {prompt["source"].partition("/")[0] for prompt in content["prompts"]}
    assert set(content["licences"]) == packages
    assert content["licences"] == {name: prompt_sets.licences()[name] for name in packages}


@pytest.mark.parametrize("name", FILES)
def test_frozen_prompts_are_from_files_that_were_held_out(name):
    """Which split a file is in is a function of its name, so this needs no corpus."""
    for prompt in prompt_files.read_set(name)["prompts"]:
        source = prompt["source"].rpartition(":")[0]
        package, _, path = source.partition("/")
        assert corpus.Document(package, path, "").split == corpus.HELD_OUT
        if name == "W2":
            assert prompt_sets.half_of(source) == "measured"


def test_w2_is_accepted_as_published_runs_are():
    content = prompt_files.read_set("W2")
    assert 3.8 <= content["acceptance_length"] <= 4.1
    assert content["choosing_split"]["acceptance_length"] <= prompt_sets.W2_ACCEPTANCE
    assert sum(path.stat().st_size for path in FILES.values()) < 600_000


def test_a_changed_file_is_noticed(tmp_path, monkeypatch):
    content = json.loads(FILES["W1"].read_text())
    content["prompts"][3]["text"] += " "
    folder = tmp_path / "benchmark" / "prompts"
    folder.mkdir(parents=True)
    (folder / "w1.json").write_text(json.dumps(content))
    monkeypatch.setattr(prompt_files, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="prompts of W1 are not those"):
        prompt_files.token_ids("W1")
    with pytest.raises(ValueError, match="no prompt set W3"):
        prompt_files.token_ids("W3")


def function(name: str, about: str) -> str:
    return (
        f'def {name}(argument):\n    """{about} that is long enough to count."""\n    return argument\n\n\n'
    )


def name_in(split: str, half: str | None = None) -> str:
    """The name of a file that the hash puts into `split` and, if held out, into `half`."""
    names = (f"module_{i}.py" for i in range(100_000))
    return next(
        name
        for name in names
        if corpus.Document("package", name, "").split == split
        and (half is None or prompt_sets.half_of(f"package/{name}") == half)
    )


def test_candidates_are_held_out_and_not_known_from_training(tmp_path):
    known, new = function("known", "What training has seen"), function("unseen", "Something else, quite new,")
    documents = [
        corpus.Document("package", name_in(corpus.TRAIN), known),
        corpus.Document("package", name_in(corpus.HELD_OUT, "choosing"), new),
        corpus.Document("package", name_in(corpus.HELD_OUT, "measured"), known),
    ]
    lines = [json.dumps(asdict(document)) for document in documents]
    (tmp_path / "docs.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "tokenizer.json").write_text((DEMO_MODELS["demo"] / "tokenizer.json").read_text())
    (candidate,) = prompt_sets.cut_candidates(tmp_path)
    assert candidate["split"] == "choosing"
    assert candidate["source"] == f"package/{documents[1].path}:2"
    assert candidate["text"] == "".join(new.splitlines(keepends=True)[:2])  # up to the docstring's end
    assert prompt_sets.cut_candidates(tmp_path) == [candidate]


def test_repeated_share():
    once = list(range(20))
    assert prompt_sets.repeated_share(once) == 0
    assert prompt_sets.repeated_share([*once, *once]) == 0.5
    assert prompt_sets.repeated_share([*once, *once[:7]]) == 0  # shorter than a run
    assert prompt_sets.repeated_share([]) == 0


@given(st.lists(st.integers(0, 2), max_size=60))
def test_repeated_share_is_that_of_the_definition(ids):
    n = prompt_sets.NGRAM
    runs = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    again = [i for i, run in enumerate(runs) if run in runs[:i]]
    repeated = {place for i in again for place in range(i, i + n)}
    assert prompt_sets.repeated_share(ids) == pytest.approx(len(repeated) / max(1, len(ids)))


def a_text(number: int, split: str, per_step: int, again: int) -> Measured:
    """128 tokens, `per_step` in each verify step, the last `again` of them a repetition of the first ones."""
    total = prompt_sets.OUTPUT_TOKENS
    ids = [1000 * number + i for i in range(total - again)]
    ids += ids[:again]
    steps = [ids[i : i + per_step] for i in range(0, total, per_step)]
    source = f"arrow/{number}:1"
    return Measured({"source": source, "split": split, "text": f"{number}", "token_ids": [number]}, steps)


def test_w2_is_bounded_by_the_other_splits_acceptance():
    """Texts that repeat more are accepted faster. Of the choosing split, those with up to a quarter give 4 tokens a
    step, all of them more than 4.1."""
    choosing = [a_text(i, "choosing", 4, 32) for i in range(10)]
    choosing += [a_text(i, "choosing", 8, 64) for i in range(10, 20)]
    few = [a_text(i, "measured", 2, 16) for i in range(20, 540)]
    many = [a_text(i, "measured", 4, 48) for i in range(540, 1100)]
    looping = [Measured(one.candidate, [[7] * 128]) for one in few[:3]]
    measured = [*choosing, *looping, *few[3:], *many]
    w1, w2 = prompt_sets.choose(measured, {"arrow": "Apache-2.0"})
    assert w2["choosing_split"] == {
        "num_prompts": 10,
        "acceptance_length": 4.0,
        "max_repeated_share": pytest.approx(0.49),
    }
    sources = {prompt["source"] for prompt in w2["prompts"]}
    assert len(sources) == 512
    assert sources <= {one.candidate["source"] for one in [*few[3:], *many]}
    assert Counter(len(prompt_set["prompts"]) for prompt_set in (w1, w2)) == {512: 2}
    assert not {one.candidate["source"] for one in looping} & {prompt["source"] for prompt in w1["prompts"]}
    assert w2["sha256"] == prompt_files.digest([prompt["text"] for prompt in w2["prompts"]])
    assert prompt_sets.choose(measured[::-1], {"arrow": "Apache-2.0"}) == [w1, w2]
    with pytest.raises(ValueError, match="of 512 prompts: raise NUM_CANDIDATES"):
        prompt_sets.choose(measured[:400], {"arrow": "Apache-2.0"})


def test_acceptance_is_tokens_per_step_of_the_beginning():
    texts = [Measured({}, [[1, 2, 3], [4], [5, 6]]), Measured({}, [[1]] * 6)]
    assert prompt_sets.acceptance(texts) == pytest.approx(12 / 9)
    assert prompt_sets.acceptance(texts, 4) == pytest.approx((4 + 4) / (2 + 4))
    assert prompt_sets.acceptance([]) == 0


def test_a_set_is_saved_one_prompt_a_line(tmp_path):
    prompt_set = {"name": "W9", "prompts": [{"source": "a", "text": "x\n"}, {"source": "b", "text": "y"}]}
    prompt_sets.save(tmp_path / "w9.json", prompt_set)
    text = (tmp_path / "w9.json").read_text()
    assert json.loads(text) == prompt_set
    assert text.count("\n") == 6
