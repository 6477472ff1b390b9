"""What a speculating engine emits at temperature > 0 follows the target's exact distribution: chi-square."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import chisquare
from transformers import Qwen3ForCausalLM

import flashspark.speculative.accept as accept_stage
from flashspark.ipc import GrammarSpec
from flashspark.kernels.accept import accept_sampled
from flashspark.scheduler.grammar import GrammarQueue
from flashspark.speculative.grammar import GrammarState, Look
from harness import Harness, Job
from tiny_models import write_dflash, write_dflash2, write_target

VOCAB, MASK = 7, 6
PROMPT = [3, 1, 4, 1, 5]
NUM_DRAWS = 20_000
LENGTH = 3  # tokens drawn per request: the block is wider, so accepts, residuals and cutoffs all occur

SETTINGS = {
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 1.6},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 1.2, "top_p": 0.7},
    "min_p": {"temperature": 1.3, "min_p": 0.2},
    "penalties": {
        "temperature": 1.0,
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.5,
    },
    "bias": {"temperature": 1.0, "logit_bias": {2: 1.5, 5: -2.0}},
    "all": {
        "temperature": 1.1,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.05,
        "presence_penalty": 0.8,
        "logit_bias": {1: 0.5},
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    config = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    target = write_target(root / "target", seed=5, num_hidden_layers=2, **config)
    flatten_head(target / "model.safetensors")
    dflash = {"mask_token_id": MASK, "block_size": 4, "target_layer_ids": [0, 1]}
    dflash2 = dflash | {"selector_top_k": 3}
    return {
        "target": target,
        "dflash": write_dflash(root / "dflash", target, num_hidden_layers=1, dflash_config=dflash),
        "dflash2": write_dflash2(root / "dflash2", target, num_hidden_layers=1, dflash_config=dflash2),
    }


def flatten_head(file) -> None:
    """Makes the distributions flat enough that every output of a few tokens is seen."""
    tensors = load_file(file)
    tensors["lm_head.weight"] *= 0.3
    save_file(tensors, file, metadata={"format": "pt"})


def step_distribution(
    logits: np.ndarray, output: list[int], s: dict, allowed: Callable | None = None
) -> np.ndarray:
    """The distribution of the next token in float64, from the definitions; `allowed` tells which may follow an
    output."""
    logits = logits.astype(np.float64).copy()
    for token in range(VOCAB):
        if token in output or token in PROMPT:
            factor = s.get("repetition_penalty", 1.0)
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(output):
        logits[token] -= s.get("frequency_penalty", 0.0) * output.count(token) + s.get(
            "presence_penalty", 0.0
        )
    for token, bias in s.get("logit_bias", {}).items():
        logits[token] += bias
    if allowed is not None:
        logits[[token for token in range(VOCAB) if token not in allowed(output)]] = -np.inf
    probs = np.exp((logits - logits.max()) / s["temperature"])
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")[: s.get("top_k", VOCAB)]
    kept = probs[order] / probs[order].sum()
    if s.get("top_p", 1.0) < 1.0:
        size = int(np.searchsorted(kept.cumsum(), s["top_p"])) + 1
        order, kept = order[:size], kept[:size] / kept[:size].sum()
    strong = kept >= s.get("min_p", 0.0) * kept[0]
    result = np.zeros(VOCAB)
    result[order[strong]] = kept[strong] / kept[strong].sum()
    return result


@pytest.fixture(scope="module")
def exact(folders):
    """Probability of every LENGTH-token output under a setting, from transformers' logits."""
    model = Qwen3ForCausalLM.from_pretrained(folders["target"], dtype=torch.float32).eval()
    prefixes = [list(p) for k in range(LENGTH) for p in itertools.product(range(VOCAB), repeat=k)]
    with torch.no_grad():
        logits = {tuple(p): model(torch.tensor([PROMPT + p])).logits[0, -1].numpy() for p in prefixes}

    def table(setting: dict, allowed: Callable | None = None) -> np.ndarray:
        steps = {p: step_distribution(logits[p], list(p), setting, allowed) for p in logits}
        outputs = itertools.product(range(VOCAB), repeat=LENGTH)
        return np.array([np.prod([steps[o[:k]][o[k]] for k in range(LENGTH)]) for o in outputs])

    return table


def draw(
    folders, draft: str | None, setting: dict, num_draws: int = NUM_DRAWS, prepare: Callable | None = None
) -> np.ndarray:
    """Counts of every output over `num_draws` requests, of a harness that `prepare` may change."""
    harness = Harness(
        folders["target"],
        folders[draft] if draft else None,
        max_running_requests=500,
        max_total_tokens=500 * 16,
        context_length=32,
    )
    if prepare is not None:
        prepare(harness)
    jobs = [Job(PROMPT, LENGTH, sampling={"ignore_eos": True} | setting) for _ in range(num_draws)]
    outputs = np.array([result.tokens for result in harness.run(jobs)])
    assert outputs.shape == (num_draws, LENGTH)
    if draft == "dflash2":
        assert harness.scheduler.totals["verify_steps"] < num_draws * LENGTH  # some drafts were accepted
    codes = (outputs * VOCAB ** np.arange(LENGTH - 1, -1, -1)).sum(1)
    return np.bincount(codes, minlength=VOCAB**LENGTH)


def pvalue(counts: np.ndarray, probs: np.ndarray) -> float:
    """Chi-square with rare cells (under 5 expected) put together."""
    expected = probs * counts.sum()
    assert counts[probs == 0].sum() == 0, "an output of probability zero was emitted"
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    if wanted[-1] < 5:  # the put-together cell joins its neighbour
        observed[-2] += observed[-1]
        wanted[-2] += wanted[-1]
        observed, wanted = observed[:-1], wanted[:-1]
    return chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue


FAST = ("plain", "penalties")


@pytest.mark.parametrize(
    "setting", [s if s in FAST else pytest.param(s, marks=pytest.mark.full) for s in SETTINGS]
)
def test_dflash2_output_is_the_targets(folders, exact, setting):
    assert pvalue(draw(folders, "dflash2", SETTINGS[setting]), exact(SETTINGS[setting])) > 1e-4


@pytest.mark.full
@pytest.mark.parametrize("setting", ["plain", "all"])
@pytest.mark.parametrize("draft", [None, "dflash"])
def test_other_drafts_and_none(folders, exact, draft, setting):
    assert pvalue(draw(folders, draft, SETTINGS[setting]), exact(SETTINGS[setting])) > 1e-4


@pytest.mark.full
def test_negative_control_without_the_residual(folders, exact, monkeypatch):
    """Drawing from p after a rejection, instead of from max(p - q, 0), must be noticed."""

    def biased(probs, block_rows, drafts, ids, q, lens, *uniforms):
        count, _, _ = accept_sampled(probs, block_rows, drafts, ids, q, lens, *uniforms)
        _, token, _ = accept_sampled(probs, block_rows, drafts, ids, q, count + 1, *uniforms)
        return count, token, count

    monkeypatch.setattr(accept_stage, "accept_sampled", biased)
    assert pvalue(draw(folders, "dflash2", SETTINGS["plain"]), exact(SETTINGS["plain"])) < 1e-6


def test_negative_control_with_penalties_per_step(folders, exact, monkeypatch):
    """Penalties that do not see the drafted prefix must be noticed."""
    from flashspark.speculative.sampling import SamplingRows

    honest = SamplingRows.adjust

    def stale(self, rows, logits, drafts, context_lens):
        unseen = torch.full_like(drafts, MASK)  # counts the mask instead of the drafts
        return honest(self, rows, logits, unseen, context_lens)

    setting = SETTINGS["penalties"]
    monkeypatch.setattr(SamplingRows, "adjust", stale)
    assert pvalue(draw(folders, "dflash2", setting), exact(setting)) < 1e-6


# Under a grammar


def may_follow(output: list[int]) -> set[int]:
    """A grammar in which what may come depends on what came last."""
    last = output[-1] if output else 0
    return {token for token in range(VOCAB) if (token + last) % 3 != 0 and token != MASK}


class LastToken:
    """A matcher of `may_follow`."""

    def __init__(self) -> None:
        self.output: list[int] = []

    def look(self) -> Look:
        mask = torch.tensor([sum(1 << token for token in may_follow(self.output))], dtype=torch.int32)
        return Look(mask, is_completed=False)

    def advance(self, tokens: Sequence[int]) -> list[Look]:
        looks = []
        for token in tokens:
            if looks and token not in may_follow(self.output):
                break
            self.output.append(token)
            looks.append(self.look())
        return looks

    def rollback(self, num_tokens: int) -> None:
        del self.output[-num_tokens:]


def constrain(harness: Harness) -> None:
    harness.scheduler._grammars = GrammarQueue(lambda spec: LastToken, VOCAB)


GRAMMAR = {"grammar": GrammarSpec("ebnf", "", "ebnf")}


@pytest.mark.parametrize(
    ("setting", "num_draws"),
    [("all", 5000), *(pytest.param(s, NUM_DRAWS, marks=pytest.mark.full) for s in SETTINGS)],
)
def test_output_under_a_grammar_is_the_masked_targets(folders, exact, setting, num_draws):
    counts = draw(folders, "dflash2", SETTINGS[setting] | GRAMMAR, num_draws, constrain)
    assert pvalue(counts, exact(SETTINGS[setting], may_follow)) > 1e-4


def test_negative_control_with_a_grammar_per_step(folders, monkeypatch):
    """Masks that do not see the drafted prefix let through what may not follow it, and the engine says so."""
    honest = GrammarState.walk
    monkeypatch.setattr(
        GrammarState, "walk", lambda self, drafts: honest(self, [])[:1] * len(honest(self, drafts))
    )
    harness = Harness(folders["target"], folders["dflash2"], context_length=32)
    constrain(harness)
    results = harness.run([Job(PROMPT, 20, sampling=SETTINGS["hot"] | GRAMMAR) for _ in range(40)])
    aborted = [result for result in results if result.finish.type == "abort"]
    assert aborted
    assert all("does not match the grammar" in result.finish.message for result in aborted)
