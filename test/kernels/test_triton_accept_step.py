"""Accept and commit of a greedy step in one launch: equal to its reference, and to what the rules say."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashspark.kernels.accept_step import accept_step
from parity import DEVICE, NEEDS_TRITON, integers

pytestmark = NEEDS_TRITON
POISON = -(10**9)


def make_case(num_reqs, width, num_absent, seed, simulates=False):
    """The arguments of `accept_step`, in their order, on the CPU.

    Slots of nobody are anywhere among the others. Rows past a cutoff have an id, a logit and a draft of no meaning,
    or, as behind a verify length, none of their own. Every fourth request or so has NaN or an infinity somewhere.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(high, *shape, low=0):
        return torch.randint(low, high, shape, generator=generator)

    cutoff = draw(width + 1, num_reqs, low=1)
    run = torch.maximum(cutoff, draw(width + 1, num_reqs, low=1))  # rows in the pack; some past the cutoff
    starts = run.cumsum(0) - run
    lane = torch.arange(width)
    block_rows = starts[:, None] + torch.minimum(lane, run[:, None] - 1)
    drafts, targets = draw(2, num_reqs, width - 1), draw(2, num_reqs, width)
    targets[draw(2, num_reqs) == 0] = 1  # or long prefixes would be rare
    drafts[draw(2, num_reqs) == 0] = 1
    logits = torch.randn(num_reqs, width, generator=generator)
    broken = torch.tensor([float("nan"), float("inf"), -float("inf")])[draw(3, num_reqs, width)]
    logits = torch.where(draw(4 * width, num_reqs, width) == 0, broken, logits)
    is_cut = lane >= cutoff[:, None]
    is_poisoned = is_cut & (draw(2, num_reqs, 1) == 0)
    targets[is_poisoned], drafts[is_poisoned[:, 1:]] = POISON, POISON - 1
    logits[is_cut] = float("nan")

    best_ids, best_logits = (
        torch.full((int(run.sum()) + 3,), POISON),
        torch.full((int(run.sum()) + 3,), torch.nan),
    )
    is_there = lane < run[:, None]
    best_ids[block_rows[is_there]], best_logits[block_rows[is_there]] = targets[is_there], logits[is_there]
    scratch_row = num_reqs + 5
    rows = torch.randperm(scratch_row, generator=generator)[:num_reqs]
    rows[torch.randperm(num_reqs, generator=generator)[:num_absent]] = scratch_row
    cutoff[rows == scratch_row] = 1
    state = [draw(10**6, scratch_row + 1) for _ in range(3)]
    simulated = draw(width + 2, num_reqs) if simulates else None
    return best_ids, best_logits, block_rows, drafts, cutoff, rows, *state, scratch_row, simulated


def run_case(case, implementation, device):
    """Results, and the states of all rows that somebody may own, on the CPU."""
    args = [x.clone().to(device) if torch.is_tensor(x) else x for x in case]
    results = accept_step(*args, implementation)
    scratch_row = case[9]
    assert args[6][scratch_row] == 0
    return [x.cpu() for x in results], [x[:scratch_row].cpu() for x in args[6:9]]


@settings(deadline=None, max_examples=40)
@given(
    st.one_of(st.integers(1, 20), st.sampled_from([31, 32, 33, 300])),
    st.sampled_from([1, 2, 3, 5, 8]),
    st.floats(0, 1),
    st.booleans(),
    st.integers(0, 2**30),
)
def test_accept_step(num_reqs, width, share_absent, simulates, seed):
    case = make_case(num_reqs, width, int(share_absent * num_reqs), seed, simulates)
    results, states = run_case(case, "triton", DEVICE)
    expected_results, expected_states = run_case(case, "torch", "cpu")
    for got, expected in zip(results + states, expected_results + expected_states, strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("simulates", [False, True])
def test_what_a_step_commits(implementation, simulates):
    """Request by request, as the rules have it."""
    case = make_case(60, 5, 7, 0, simulates)
    ids, logits, block_rows, drafts, cutoff, rows, lens, anchors, steps, scratch_row, simulated = case
    device = DEVICE if implementation == "triton" else "cpu"
    (tokens, num_tokens, is_finite, num_matched), states = run_case(case, implementation, device)
    new_lens, new_anchors, new_steps = states
    for r, row in enumerate(rows.tolist()):
        if row == scratch_row:
            continue
        target, limit = ids[block_rows[r]].tolist(), int(cutoff[r])
        matched = next((i for i in range(4) if target[i] != drafts[r, i]), 4)
        assert num_matched[r] == matched
        accepted = min(matched if simulated is None else int(simulated[r]), limit - 1)
        assert num_tokens[r] == accepted + 1
        assert tokens[r, : accepted + 1].tolist() == [*drafts[r, :accepted].tolist(), target[accepted]]
        assert bool(is_finite[r]) == bool(logits[block_rows[r, :limit]].isfinite().all())
        assert new_lens[row] == lens[row] + accepted + 1
        assert new_anchors[row] == target[accepted]
        assert new_steps[row] == steps[row] + 1
    others = sorted(set(range(scratch_row)) - set(rows.tolist()))
    assert len(others) >= 5
    for old, new in zip((lens, anchors, steps), states, strict=True):
        assert torch.equal(new[others], old[others])
    assert len(set(num_tokens.tolist())) == 5 and 0 < is_finite.sum() < 60


def test_slots_of_nobody_race_for_nothing():
    """Many programs, all of nobody: nothing changes but the scratch row's length, which is 0."""
    case = make_case(300, 8, 300, 1)
    args = [x.clone().to(DEVICE) if torch.is_tensor(x) else x for x in case]
    accept_step(*args, "triton")
    lens, anchors, steps = (x.cpu() for x in args[6:9])
    assert torch.equal(lens[:-1], case[6][:-1]) and lens[-1] == 0
    assert torch.equal(anchors, case[7]) and torch.equal(steps, case[8])


def test_drafts_may_be_columns_of_a_wider_tensor():
    case = list(make_case(4, 3, 1, 2))
    expected, _ = run_case(case, "torch", "cpu")
    wide = torch.full((4, 6), POISON)
    wide[:, :2] = case[3]
    args = [x.clone().to(DEVICE) if torch.is_tensor(x) else x for x in case]
    args[3] = wide.to(DEVICE)[:, :2]
    for got, wanted in zip(accept_step(*args, "triton"), expected, strict=True):
        assert torch.equal(got.cpu(), wanted)


def test_absent_slots_return_one_token():
    """Their cutoff is 1."""
    case = make_case(5, 4, 5, 3)
    results, _ = run_case(case, "triton", DEVICE)
    assert torch.equal(results[1].to(DEVICE), integers([1] * 5))
