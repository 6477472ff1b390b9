"""What DSPARK emits at temperature > 0 follows the target's exact distribution: chi-square, as of the other drafts."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file

import flashspark.speculative.dspark as dspark_stage
from flashspark.speculative.adaptive import VerifyMode
from tiny_models import write_dspark, write_target
from unit.test_exact_adaptive import Trimming
from unit.test_exact_sampling import MASK, SETTINGS, VOCAB, draw, exact, flatten_head, pvalue

__all__ = ["exact"]  # a fixture, over this file's `folders`

HEADS = ("none", "vanilla", "gated", "rnn")
DRAFTS = [f"{head}-{rows}" for head in HEADS for rows in ("all-rows", "without-anchor")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    config = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    target = write_target(root / "target", seed=5, num_hidden_layers=2, **config)
    flatten_head(target / "model.safetensors")
    written = {"target": target}
    for name in DRAFTS:
        head, _, rows = name.partition("-")
        keys = {"mask_token_id": MASK, "block_size": 3, "target_layer_ids": [0, 1], "num_hidden_layers": 1}
        folder = root / name
        written[name] = write_dspark(
            folder, target, head=head, sample_from_anchor=rows == "all-rows", seed=3, **keys
        )
        if head != "none":  # the flat base logits would leave the correction alone
            tensors = load_file(folder / "model.safetensors")
            tensors["markov_head.markov_w2.weight"] *= 0.5
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return written


FAST = [("vanilla-all-rows", "plain"), ("rnn-without-anchor", "top_k"), ("gated-all-rows", "penalties")]
FEWER_DRAWS = 8_000


@pytest.mark.parametrize(("draft", "setting"), FAST)
def test_output_is_the_targets(folders, exact, draft, setting):
    assert pvalue(draw(folders, draft, SETTINGS[setting], FEWER_DRAWS), exact(SETTINGS[setting])) > 1e-4


@pytest.mark.full
@pytest.mark.parametrize(
    ("draft", "setting"),
    [(draft, "all") for draft in DRAFTS] + [("rnn-all-rows", name) for name in SETTINGS if name != "all"],
)
def test_output_is_the_targets_at_length(folders, exact, draft, setting):
    assert pvalue(draw(folders, draft, SETTINGS[setting]), exact(SETTINGS[setting])) > 1e-4


@pytest.mark.parametrize(
    "lie",
    [
        "base logits",
        pytest.param("argmax", marks=pytest.mark.full),
        pytest.param("temperature", marks=pytest.mark.full),
    ],
)
def test_negative_control_with_a_q_nobody_drew_from(folders, exact, monkeypatch, lie):
    """q without the correction, q at another temperature, or a softmax beside an argmax must be noticed.

    (A point mass on a drawn token would not be a lie: given the draw it is what was proposed. It accepts less.)
    """
    honest = dspark_stage.markov_walk

    def walk(logits, anchors, markov, projected, temperature, greedy, uniforms, forbidden_ids):
        base = logits.clone()
        arguments = (anchors, markov, projected, temperature, greedy, uniforms, forbidden_ids)
        result = honest(logits, *arguments)
        if lie == "base logits":
            base[..., MASK] = -float("inf")
            return result._replace(probs=base.softmax(-1))
        if lie == "temperature":
            return result._replace(probs=(result.logits / 3).softmax(-1))
        return honest(
            base, anchors, markov, projected, temperature, ~greedy, uniforms, forbidden_ids
        )._replace(probs=result.probs)

    monkeypatch.setattr(dspark_stage, "markov_walk", walk)
    counts = draw(folders, "vanilla-all-rows", SETTINGS["plain"], FEWER_DRAWS)
    assert pvalue(counts, exact(SETTINGS["plain"])) < 1e-6


@pytest.mark.parametrize(
    ("draft", "mode", "pin"),
    [
        ("vanilla-all-rows", VerifyMode.COMPACT, None),
        pytest.param("rnn-without-anchor", VerifyMode.CAP_ACCEPT, None, marks=pytest.mark.full),
        pytest.param("gated-all-rows", VerifyMode.COMPACT, 0.3, marks=pytest.mark.full),
    ],
)
def test_trimmed_output_is_the_targets(folders, exact, draft, mode, pin):
    trimming = Trimming(mode, pin)
    counts = draw(folders, draft, SETTINGS["plain"], FEWER_DRAWS, prepare=trimming)
    assert trimming.share() >= 0.2
    assert pvalue(counts, exact(SETTINGS["plain"])) > 1e-4
