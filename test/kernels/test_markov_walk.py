"""The walk along a block against one that scores a token of a request at a time in float64."""

import pytest
import torch

from draft_reference import MarkovReference
from flashspark.kernels.markov_walk import MarkovWeights, markov_walk

V, RANK, HIDDEN, MASK = 40, 6, 10, 3
KINDS = ["none", "vanilla", "gated", "rnn"]


class Problem:
    """Logits, hidden states and a head with the tensors of a checkpoint, and their form for the walk."""

    def __init__(self, kind, num_reqs, num_slots, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.kind, self.num_reqs, self.num_slots = kind, num_reqs, num_slots
        self.logits = 2 * torch.randn(num_reqs, num_slots, V, generator=g)
        self.z = torch.randn(num_reqs, num_slots, HIDDEN, generator=g)
        self.anchors = torch.randint(0, V, (num_reqs,), generator=g)
        self.uniforms = torch.rand(num_reqs, num_slots, generator=g, dtype=torch.float64)
        self.temperature = torch.rand(num_reqs, generator=g) * 2 + 0.1
        shapes = {"markov_w1.weight": (V, RANK), "markov_w2.weight": (V, RANK)}
        if kind == "gated":
            shapes |= {"gate_proj.weight": (RANK, HIDDEN + RANK), "gate_proj.bias": (RANK,)}
        if kind == "rnn":
            shapes |= {"joint_proj.weight": (3 * RANK, 2 * RANK + HIDDEN), "joint_proj.bias": (3 * RANK,)}
        self.w = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}

    def head(self, dtype=torch.float32):
        """`(markov, projected)` as `markov_walk` takes them."""
        w = {name: t.to(dtype) for name, t in self.w.items()}
        z, inner, projected = self.z.to(dtype), None, None
        if self.kind == "none":
            return None, None
        if self.kind == "gated":
            inner = w["gate_proj.weight"].t()[HIDDEN:]
            projected = z @ w["gate_proj.weight"].t()[:HIDDEN] + w["gate_proj.bias"]
        if self.kind == "rnn":
            inner = w["joint_proj.weight"].t()[: 2 * RANK]
            projected = z @ w["joint_proj.weight"].t()[2 * RANK :] + w["joint_proj.bias"]
        output = w["markov_w2.weight"].t().contiguous()
        return MarkovWeights(self.kind, w["markov_w1.weight"], output, inner), projected

    def run(self, greedy, sampled=True, dtype=torch.float32, **changed):
        arguments = {"anchors": self.anchors, "temperature": self.temperature} | changed
        markov, projected = self.head(dtype)
        return markov_walk(
            self.logits.clone(),
            arguments["anchors"],
            markov,
            projected,
            arguments["temperature"],
            greedy,
            self.uniforms if sampled else None,
            torch.tensor([MASK]),
        )

    def expected(self, greedy):
        """The same, from the definitions: tokens, q and corrected logits."""
        tokens, q, rows = [], torch.zeros(self.num_reqs, self.num_slots, V, dtype=torch.float64), []
        reference = MarkovReference(self.kind, self.w)
        for r in range(self.num_reqs):

            def draw(slot, corrected, r=r):
                corrected[MASK] = -float("inf")
                if greedy[r]:
                    choice = int(corrected.argmax())
                    q[r, slot, choice] = 1
                else:
                    q[r, slot] = torch.softmax(corrected / self.temperature[r].double(), 0)
                    choice = int((q[r, slot].cumsum(0) <= self.uniforms[r, slot]).sum())
                return choice

            block, corrected = reference.walk(self.logits[r], self.z[r], int(self.anchors[r]), draw)
            tokens.append(block)
            rows.append(corrected)
        return torch.tensor(tokens), q, torch.stack(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_reqs", "num_slots"), [(1, 7), (5, 4), (3, 1)])
def test_walk_equals_the_definitions(kind, num_reqs, num_slots):
    for seed in range(5):
        p = Problem(kind, num_reqs, num_slots, seed)
        greedy = torch.arange(num_reqs) % 2 == seed % 2
        tokens, probs, logits = p.run(greedy)
        expected_tokens, expected_probs, expected_logits = p.expected(greedy)
        assert torch.equal(tokens, expected_tokens)
        assert probs.dtype == logits.dtype == torch.float32
        torch.testing.assert_close(probs.double(), expected_probs, atol=1e-5, rtol=0)
        torch.testing.assert_close(logits.double(), expected_logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_batch_makes_nothing_dense(kind):
    p = Problem(kind, 4, 5)
    greedy = torch.ones(4, dtype=torch.bool)
    alone = p.run(greedy, sampled=False, temperature=torch.full((4,), float("nan")))
    assert alone.probs is None
    assert torch.equal(alone.tokens, p.expected(greedy)[0])
    mixed = p.run(torch.tensor([True, False, True, True]))
    assert torch.equal(mixed.tokens[[0, 2, 3]], alone.tokens[[0, 2, 3]])
    point = torch.nn.functional.one_hot(alone.tokens, V).float()
    assert torch.equal(mixed.probs[[0, 2, 3]], point[[0, 2, 3]])


def test_layout_of_the_logits_does_not_matter():
    p = Problem("rnn", 3, 4)
    greedy = torch.tensor([True, False, False])
    expected = p.run(greedy)
    p.logits = p.logits.transpose(0, 1).contiguous().transpose(0, 1)
    got = p.run(greedy)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_slot_0_answers_to_the_anchor_and_no_state_outlives_the_block(kind):
    """Two blocks with identical hidden states and different anchors differ; equal ones never do."""
    p = Problem(kind, 2, 5)
    for tensor in (p.logits, p.z, p.uniforms):
        tensor[1] = tensor[0]
    p.w["markov_w2.weight"] *= 3
    greedy = torch.ones(2, dtype=torch.bool)
    same = p.run(greedy, anchors=torch.tensor([5, 5]))
    torch.testing.assert_close(same.logits[0], same.logits[1])
    other = p.run(greedy, anchors=torch.tensor([5, 6]))
    assert (other.logits[0, 0] - other.logits[1, 0]).abs()[torch.arange(V) != MASK].max() > 0.1
    assert torch.equal(other.logits[0], same.logits[0])


def test_previous_token_is_the_realised_one():
    """A draw away from the argmax changes what follows."""
    p = Problem("vanilla", 1, 2)
    p.w["markov_w2.weight"] *= 3
    blocks = set()
    for u in torch.linspace(0.01, 0.99, 40):
        p.uniforms[:] = u
        walk = p.run(torch.zeros(1, dtype=torch.bool), temperature=torch.tensor([3.0]))
        first = walk.tokens[0, 0]
        correction = p.w["markov_w2.weight"] @ p.w["markov_w1.weight"][first]
        expected = p.logits[0, 1] + correction
        expected[MASK] = -float("inf")
        torch.testing.assert_close(walk.logits[0, 1], expected, atol=1e-4, rtol=0)
        blocks.add(int(first))
    assert len(blocks) > 5


@pytest.mark.parametrize("kind", KINDS)
def test_mask_is_never_drawn(kind):
    p = Problem(kind, 64, 3)
    p.logits[..., MASK] = 1e4
    for greedy in (True, False):
        walk = p.run(torch.full((64,), greedy))
        assert not (walk.tokens == MASK).any()
        assert not walk.probs[..., MASK].any()
        torch.testing.assert_close(walk.probs.sum(-1), torch.ones(64, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_draws_follow_q(kind):
    """Frequencies of the first two tokens over many uniforms are the product of the reported rows."""
    num = 20_000
    p = Problem(kind, 1, 2, seed=3)
    one = p.run(torch.zeros(1, dtype=torch.bool), temperature=torch.tensor([0.7]))
    for name in ("logits", "z", "anchors"):
        setattr(p, name, getattr(p, name).repeat_interleave(num, 0))
    p.uniforms = torch.rand(num, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    walk = p.run(torch.zeros(num, dtype=torch.bool), temperature=torch.full((num,), 0.7))
    first = torch.bincount(walk.tokens[:, 0], minlength=V) / num
    torch.testing.assert_close(first, one.probs[0, 0], atol=0.015, rtol=0)
    likeliest = int(first.argmax())
    after = walk.tokens[walk.tokens[:, 0] == likeliest]
    second = torch.bincount(after[:, 1], minlength=V) / len(after)
    row = walk.probs[walk.tokens[:, 0] == likeliest][0, 1]
    torch.testing.assert_close(second, row, atol=0.03, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_temperatures_stay_finite(kind):
    p = Problem(kind, 2, 4)
    p.logits *= 50
    walk = p.run(torch.zeros(2, dtype=torch.bool), temperature=torch.tensor([1e-6, 2e-5]))
    assert torch.isfinite(walk.probs).all()
    assert torch.equal(walk.tokens, p.run(torch.ones(2, dtype=torch.bool)).tokens)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_half_precision_weights_keep_float32_logits(kind):
    p = Problem(kind, 3, 4)
    p.w = {name: 0.3 * t for name, t in p.w.items()}
    greedy = torch.ones(3, dtype=torch.bool)
    half, full = p.run(greedy, dtype=torch.bfloat16), p.run(greedy)
    assert half.logits.dtype == torch.float32
    allowed = torch.arange(V) != MASK
    torch.testing.assert_close(half.logits[:, 0, allowed], full.logits[:, 0, allowed], atol=0.05, rtol=0)
