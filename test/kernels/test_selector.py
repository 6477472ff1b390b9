"""Candidates and the selector's walk, against a walk that scores one slot at a time in float64."""

import pytest
import torch

from flashspark.kernels.selector import (
    pair_scores,
    selector_walk,
    selector_walk_with_feature,
    top_candidates,
)

V, RANK = 40, 6


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def problem(num_reqs, num_slots, k, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(V, generator=g)[:k] for _ in range(num_reqs * num_slots)])
    return {
        "scores": torch.randn(num_reqs, num_slots, k, generator=g).sort(-1, descending=True).values * scale,
        "ids": ids.view(num_reqs, num_slots, k),
        "anchors": torch.randint(0, V, (num_reqs,), generator=g),
        "projected": torch.randn(num_reqs, num_slots, RANK, generator=g),
        "predecessor_codebook": torch.randn(V, RANK, generator=g),
        "successor_codebook": torch.randn(V, RANK, generator=g),
    }


def lazy_walk(p, temperature, greedy, uniforms):
    """Section by section of the definition: one request, one slot, one candidate at a time."""
    num_reqs, num_slots, k = p["ids"].shape
    tokens, q = torch.zeros(num_reqs, num_slots, dtype=torch.int64), torch.zeros(num_reqs, num_slots, k)
    for r in range(num_reqs):
        previous = p["anchors"][r].item()
        for slot in range(num_slots):
            scores = torch.zeros(k, dtype=torch.float64)
            for b in range(k):
                pair = sum(
                    p["predecessor_codebook"][previous, j].double()
                    * p["projected"][r, slot, j].double()
                    * p["successor_codebook"][p["ids"][r, slot, b], j].double()
                    for j in range(RANK)
                )
                scores[b] = p["scores"][r, slot, b].double() + pair
            if greedy[r]:
                choice = int(scores.argmax())
                q[r, slot, choice] = 1
            else:
                probs = torch.softmax(scores / max(temperature[r].item(), 1e-5), 0)
                choice = min(int((probs.cumsum(0) <= uniforms[r, slot].double()).sum()), k - 1)
                q[r, slot] = probs.float()
            previous = p["ids"][r, slot, choice].item()
            tokens[r, slot] = previous
    return tokens, q


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("num_reqs", "num_slots", "k"), [(1, 7, 16), (5, 4, 3), (3, 1, 5), (2, 6, 1)])
def test_walk_equals_the_walk_of_one_step_at_a_time(num_reqs, num_slots, k, dtype):
    for seed in range(5):
        p = problem(num_reqs, num_slots, k, seed)
        generator = torch.Generator().manual_seed(seed)
        uniforms = torch.rand(num_reqs, num_slots, generator=generator, dtype=dtype)
        temperature = torch.rand(num_reqs, generator=generator) * 2 + 0.1
        greedy = torch.arange(num_reqs) % 2 == seed % 2
        tokens, q = selector_walk(**p, temperature=temperature, greedy=greedy, uniforms=uniforms)
        expected_tokens, expected_q = lazy_walk(p, temperature, greedy, uniforms)
        assert torch.equal(tokens, expected_tokens)
        assert q.dtype == torch.float32
        torch.testing.assert_close(q, expected_q, atol=1e-5, rtol=0)


def test_all_greedy_needs_no_noise():
    p = problem(3, 5, 4)
    greedy = torch.ones(3, dtype=torch.bool)
    nan = torch.full((3, 5), float("nan"))
    tokens, q = selector_walk(**p, temperature=nan[:, 0], greedy=greedy, uniforms=nan, any_sampled=False)
    expected_tokens, expected_q = lazy_walk(p, torch.ones(3), greedy, torch.zeros(3, 5))
    assert torch.equal(tokens, expected_tokens)
    assert torch.equal(q, expected_q)


def test_predecessor_is_the_realised_token_not_the_best_candidate():
    """Codebooks under which the second candidate is chosen at slot 1, and slot 2 answers to that one."""
    ids = torch.tensor([[[10, 11], [20, 21]]])
    predecessor, successor = torch.zeros(V, 2), torch.zeros(V, 2)
    predecessor[5, 0], successor[11, 0] = 1, 9.0  # after the anchor 5, token 11 gains 9
    predecessor[11, 1], successor[21, 1] = 1, 9.0  # after 11, token 21 gains 9; after 10 it does not
    tokens, q = selector_walk(
        torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]),
        ids,
        torch.tensor([5]),
        torch.ones(1, 2, 2),
        predecessor,
        successor,
        torch.ones(1),
        torch.tensor([True]),
        torch.zeros(1, 2),
    )
    assert tokens.tolist() == [[11, 21]]
    assert q.tolist() == [[[0, 1], [0, 1]]]


def test_first_slot_answers_to_the_anchor():
    p = problem(2, 3, 4, scale=0.1)
    p |= {name: p[name][:1].expand(2, -1, -1).contiguous() for name in ("scores", "ids", "projected")}
    pairs = pair_scores(
        p["scores"],
        p["ids"],
        torch.tensor([1, 2]),
        p["projected"],
        p["predecessor_codebook"],
        p["successor_codebook"],
    )
    assert not torch.allclose(pairs[0, 0], pairs[1, 0])
    torch.testing.assert_close(pairs[0, 1:], pairs[1, 1:])


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-5, 1e-3])
def test_tiny_temperatures_stay_finite_and_reach_greedy(temperature):
    p = problem(1, 5, 6, scale=100.0)
    sampled = selector_walk(
        **p, temperature=torch.tensor([temperature]), greedy=torch.tensor([False]), uniforms=torch.rand(1, 5)
    )
    greedy = lazy_walk(p, torch.ones(1), torch.tensor([True]), torch.zeros(1, 5))
    assert sampled[1].isfinite().all()
    assert torch.equal(sampled[0], greedy[0])


def test_draws_follow_q():
    """Frequencies of the first slot over 20,000 uniforms on a grid, which inverse CDF reproduces to 1 / 20,000."""
    p = problem(1, 1, 5)
    n = 20_000
    many = {name: t.expand(n, *t.shape[1:]) if t.shape[0] == 1 else t for name, t in p.items()}
    uniforms = ((torch.arange(n) + 0.5) / n).view(n, 1)
    tokens, q = selector_walk(
        **many, temperature=torch.full((n,), 0.7), greedy=torch.zeros(n, dtype=torch.bool), uniforms=uniforms
    )
    counts = torch.tensor([(tokens == token).sum() for token in p["ids"][0, 0]])
    torch.testing.assert_close(counts / n, q[0, 0], atol=2e-4, rtol=0)


def test_uniforms_at_the_ends_choose_candidates_with_mass():
    p = problem(1, 1, 4)
    p["scores"] = torch.tensor([[[0.0, -300.0, 0.0, -300.0]]])
    p["projected"] = torch.zeros(1, 1, RANK)
    for u in (0.0, 1.0 - 2**-24):
        tokens, q = selector_walk(
            **p, temperature=torch.ones(1), greedy=torch.tensor([False]), uniforms=torch.tensor([[u]])
        )
        chosen = (p["ids"][0, 0] == tokens[0, 0]).nonzero().item()
        assert q[0, 0, chosen] > 0.4


def test_top_candidates_are_sorted_and_never_forbidden():
    logits = torch.randn(6, V)
    logits[:, 3], logits[:, 38:] = 50.0, 60.0  # mask token and vocabulary padding would win
    allowed = logits.clone()
    allowed[:, [3, 38, 39]] = float("-inf")
    for forbidden in ((3, 38, 39), torch.tensor([3, 38, 39])):
        for k in (1, 5):
            ids, scores = top_candidates(logits.clone(), k, forbidden)
            order = allowed.argsort(-1, descending=True)[:, :k]
            assert torch.equal(ids, order)
            assert torch.equal(scores, allowed.gather(1, order))


def test_top_candidates_without_anything_forbidden():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    ids, scores = top_candidates(logits, 2)
    assert ids.tolist() == [[1, 2]]
    assert scores.tolist() == [[3.0, 2.0]]


def test_scores_keep_float32_beside_codebooks_of_half_precision():
    p = problem(2, 3, 4)
    p["scores"] = 100 + p["scores"] / 100  # differences that bfloat16 does not have
    halves = {n: p[n].bfloat16() for n in ("projected", "predecessor_codebook", "successor_codebook")}
    halves["projected"] = torch.zeros_like(halves["projected"])
    pairs = pair_scores(p["scores"], p["ids"], p["anchors"], *halves.values())
    assert torch.equal(pairs, p["scores"].unsqueeze(2).expand(2, 3, 4, 4))


@pytest.mark.parametrize("any_sampled", [True, False])
def test_feature_is_the_logit_of_the_largest_probability_of_the_row_drawn_from(any_sampled):
    """Against the slow walk at temperature 1 for greedy rows, before their point mass, and in float64."""
    for seed in range(5):
        p = problem(4, 6, 5, seed)
        generator = torch.Generator().manual_seed(seed)
        uniforms = torch.rand(4, 6, generator=generator, dtype=torch.float64)
        temperature = torch.rand(4, generator=generator) * 2 + 0.1
        greedy = torch.arange(4) % 2 == 0 if any_sampled else torch.ones(4, dtype=torch.bool)
        settings = {"temperature": temperature, "greedy": greedy, "uniforms": uniforms}
        plain = selector_walk(**p, **settings, any_sampled=any_sampled)
        tokens, q, feature = selector_walk_with_feature(**p, **settings, any_sampled=any_sampled)
        assert torch.equal(tokens, plain[0])
        assert torch.equal(q, plain[1])
        expected = torch.zeros(4, 6, dtype=torch.float64)
        for r in range(4):
            before = p["anchors"][r]
            for slot in range(6):
                scores = p["scores"][r, slot].double() + p["successor_codebook"][
                    p["ids"][r, slot]
                ].double() @ (p["predecessor_codebook"][before].double() * p["projected"][r, slot].double())
                probs = torch.softmax(scores / (1.0 if greedy[r] else temperature[r].double()), 0)
                expected[r, slot] = torch.logit(probs.max())
                before = tokens[r, slot]
        torch.testing.assert_close(feature.double(), expected, atol=1e-4, rtol=1e-5)


def test_feature_does_not_depend_on_the_slot_s_own_draw():
    p = problem(1, 4, 6)
    settings = {"temperature": torch.ones(1), "greedy": torch.tensor([False])}
    uniforms = torch.tensor([[0.4, 0.01, 0.5, 0.5]])
    tokens, _, feature = selector_walk_with_feature(**p, **settings, uniforms=uniforms)
    uniforms[0, 1] = 0.99
    others, _, changed = selector_walk_with_feature(**p, **settings, uniforms=uniforms)
    assert tokens[0, 1] != others[0, 1]
    assert torch.equal(feature[0, :2], changed[0, :2])
    assert feature[0, 2] != changed[0, 2]


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-3])
def test_feature_of_tiny_temperatures_is_clamped(temperature):
    p = problem(1, 5, 6, scale=100.0)
    for greedy in (True, False):
        feature = selector_walk_with_feature(
            **p,
            temperature=torch.tensor([temperature]),
            greedy=torch.tensor([greedy]),
            uniforms=torch.rand(1, 5),
        )[2]
        assert feature.isfinite().all()
        assert feature.abs().max() <= 40
