"""DSpark: rows and what they predict, heads and loading, against the float64 recomputation of `draft_reference`."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_reference import DraftReference, MarkovReference
from flashspark.attention.registry import make_backend
from flashspark.engine.loader import load_draft, load_target
from flashspark.models.config_file import ModelFormatError
from flashspark.models.dspark import DSparkDraft
from flashspark.speculative.drafter import DFlashDrafter, make_drafter
from flashspark.speculative.dspark import DSparkDrafter
from harness import Harness, Job
from paged import Pages
from tiny_models import MASK_ID, VOCAB_SIZE, write_dflash, write_dflash2, write_dspark, write_target

BACKEND = make_backend("torch_native")
HEADS = ["none", "vanilla", "gated", "rnn"]
GAMMA = 5


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("models") / "target", tokenizer=False)


@pytest.fixture(scope="module")
def target(target_folder):
    return load_target(target_folder)


class Rows:
    """Just enough of a runner for a drafter: random contexts, and anchors by request row."""

    def __init__(self, target, draft, context_lens, anchors, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.target, self.draft, self.device = target, draft, torch.device("cpu")
        self.context_lens, self.anchors = context_lens, torch.tensor(anchors)
        self.request_rows = self
        width = len(draft.config.target_layer_ids) * target.config.hidden_size
        self.features = [torch.randn(n, width, generator=g).to(draft.dtype) for n in context_lens]
        self.pages = Pages(len(context_lens), max(context_lens) + 16, seed)
        self.pool = draft.make_kv_pool(self.pages.num_slots)
        for r, n in enumerate(context_lens):
            positions = torch.arange(n)
            draft.inject(self.features[r], positions, self.pages.slots(r, positions), self.pool)
        self.widths = []

    def embeddings(self, row, width):
        return self.target.embed(torch.tensor([int(self.anchors[row])] + [MASK_ID] * (width - 1)))

    def draft_hidden(self, rows, width):
        self.widths.append(width)
        embeddings = torch.stack([self.embeddings(row, width) for row in rows.tolist()])
        queries = self.pages.block(rows.tolist(), [self.context_lens[r] for r in rows.tolist()], width)
        return self.draft.forward_block(embeddings, queries, self.pool, BACKEND)


def propose(rows, num_reqs, greedy=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    flags = torch.full((num_reqs,), True) if greedy is True else torch.tensor(greedy)
    uniforms = None if flags.all() else torch.rand(num_reqs, GAMMA, generator=g, dtype=torch.float64)
    drafter = make_drafter(rows)
    walk, _ = drafter.walk(torch.arange(num_reqs), flags, torch.ones(num_reqs), uniforms)
    return walk, uniforms


@pytest.mark.parametrize("sample_from_anchor", [True, False])
@pytest.mark.parametrize("head", HEADS)
def test_drafts_equal_the_cache_free_recomputation(tmp_path, target_folder, target, head, sample_from_anchor):
    """Features and anchor in, tokens and q out: backbone, row mapping, lm_head and Markov walk in one chain."""
    folder = write_dspark(tmp_path / "d", target_folder, head=head, sample_from_anchor=sample_from_anchor)
    draft, reference = load_draft(folder, target), DraftReference(folder)
    rows = Rows(target, draft, [13, 1, 30], [42, 99, 200])
    greedy = [True, False, False]
    walk, uniforms = propose(rows, 3, greedy)
    num_rows = GAMMA if sample_from_anchor else GAMMA + 1
    assert rows.widths == [num_rows]
    lm_head = load_file(target_folder / "model.safetensors")["lm_head.weight"].double()
    for r in range(3):
        z = reference.block(rows.features[r], rows.embeddings(r, num_rows))[-GAMMA:]
        qs = []

        def draw(slot, corrected, r=r, qs=qs):
            corrected[MASK_ID] = -float("inf")
            qs.append(torch.softmax(corrected, 0))
            if greedy[r]:
                return int(corrected.argmax())
            return int((qs[-1].cumsum(0) <= uniforms[r, slot]).sum())

        markov = MarkovReference(head, reference.w)
        tokens, corrected = markov.walk(z @ lm_head.T, z, int(rows.anchors[r]), draw)
        assert walk.tokens[r].tolist() == tokens
        torch.testing.assert_close(walk.logits[r].double(), corrected, atol=1e-4, rtol=0)
        if not greedy[r]:
            torch.testing.assert_close(walk.probs[r].double(), torch.stack(qs), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("write", "keys", "expected"),
    [
        (write_dspark, {"sample_from_anchor": True}, [0, 1, 2, 3, 4]),
        (write_dspark, {"sample_from_anchor": False}, [1, 2, 3, 4, 5]),
        (write_dspark, {"sample_from_anchor": True, "head": "none"}, [0, 1, 2, 3, 4]),
        (write_dflash, {}, [1, 2, 3, 4, 5]),
        (write_dflash2, {}, [1, 2, 3, 4, 5]),
    ],
)
def test_which_row_gives_which_token(tmp_path, target_folder, target, write, keys, expected):
    """A draft whose row r speaks of token 100 + r: slot k must hold the row of its layout, in order."""
    draft = load_draft(write(tmp_path / "d", target_folder, **keys), target)
    rows = Rows(target, draft, [7, 9], [42, 43])
    for name in ("markov", "selector"):
        if getattr(draft, name, None) is not None:
            for _, parameter in getattr(draft, name).parameters():
                parameter.views[0].zero_()

    def coded(row_ids, width):
        hidden = torch.zeros(len(row_ids), width, target.config.hidden_size)
        hidden[..., 0] = torch.arange(width)
        return hidden

    class Coding:
        config = target.config

        def logits(self, hidden):
            return 50.0 * torch.nn.functional.one_hot(hidden[:, 0].long() + 100, VOCAB_SIZE).float()

    rows.draft_hidden, rows.target = coded, Coding()
    block = make_drafter(rows).propose(
        torch.arange(2), torch.ones(2, dtype=torch.bool), torch.ones(2), uniforms=None
    )
    assert block.tokens.tolist() == [[100 + row for row in expected]] * 2


def test_positions_of_the_rows_start_at_the_committed_length(tmp_path, target_folder, target):
    for sample_from_anchor, width in [(True, 5), (False, 6)]:
        folder = write_dspark(tmp_path / str(width), target_folder, sample_from_anchor=sample_from_anchor)
        draft = load_draft(folder, target)
        rows = Rows(target, draft, [20], [42])
        seen, original = [], draft.rotary.tables
        draft.rotary.tables = lambda positions, seen=seen, f=original: (seen.append(positions), f(positions))[
            1
        ]
        propose(rows, 1)
        assert seen[0].tolist() == [list(range(20, 20 + width))]


def test_backbone_is_dflashs(tmp_path, target_folder, target):
    """The same weights as DFlash v1 give the same hidden states; only the reading of the rows differs."""
    spark = load_draft(write_dspark(tmp_path / "s", target_folder, sample_from_anchor=False), target)
    flash = load_draft(write_dflash(tmp_path / "f", target_folder), target)
    hidden = [Rows(target, draft, [13], [42]).draft_hidden(torch.tensor([0]), 6) for draft in (spark, flash)]
    assert torch.equal(*hidden)


@pytest.mark.parametrize("head", HEADS[1:])
def test_same_hidden_states_and_different_anchors_differ(tmp_path, target_folder, target, head):
    draft = load_draft(write_dspark(tmp_path / "d", target_folder, head=head), target)
    rows = Rows(target, draft, [9], [42])
    hidden = rows.draft_hidden(torch.tensor([0]), GAMMA)
    rows.draft_hidden = lambda row_ids, width: hidden.expand(len(row_ids), -1, -1)
    rows.anchors = torch.tensor([42, 42, 77])
    logits = propose(rows, 3)[0].logits[..., MASK_ID + 1 :]
    torch.testing.assert_close(logits[0], logits[1])
    assert (logits[0, 0] - logits[2, 0]).abs().max() > 1e-2


@pytest.mark.parametrize("head", HEADS[1:])
def test_zero_markov_w2_equals_independent_rows(tmp_path, target_folder, target, head):
    folder = write_dspark(tmp_path / "d", target_folder, head=head)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["markov_head.markov_w2.weight"].zero_()
    save_file(tensors, file, metadata={"format": "pt"})
    none = write_dspark(tmp_path / "none", target_folder, head="none")
    walks = [
        propose(Rows(target, load_draft(f, target), [13, 4], [42, 9]), 2, [True, False])[0]
        for f in (folder, none)
    ]
    assert torch.equal(walks[0].tokens, walks[1].tokens)
    torch.testing.assert_close(walks[0].logits, walks[1].logits, atol=1e-6, rtol=0)


def test_greedy_batches_are_sparse_and_mixed_ones_dense(tmp_path, target_folder, target):
    draft = load_draft(write_dspark(tmp_path / "d", target_folder), target)
    drafter = make_drafter(Rows(target, draft, [13, 4], [42, 9]))
    assert isinstance(drafter, DSparkDrafter)
    every, some = torch.tensor([True, True]), torch.tensor([True, False])
    rows, temperature = torch.arange(2), torch.ones(2)
    sparse = drafter.propose(rows, every, temperature, None)
    assert sparse.candidate_ids.tolist() == sparse.tokens[..., None].tolist()
    assert sparse.candidate_probs.shape == (2, GAMMA, 1)
    dense = drafter.propose(rows, some, temperature, torch.full((2, GAMMA), 0.3, dtype=torch.float64))
    assert dense.candidate_ids is None
    assert dense.candidate_probs.shape == (2, GAMMA, VOCAB_SIZE)
    assert torch.equal(dense.tokens[0], sparse.tokens[0])


@pytest.mark.parametrize("gamma", [1, 3, 5])
@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_smaller_blocks_than_trained(tmp_path, target_folder, target, gamma, sample_from_anchor):
    folder = write_dspark(tmp_path / "d", target_folder, sample_from_anchor=sample_from_anchor)
    draft = load_draft(folder, target, block_size=gamma)
    config = draft.config
    assert (config.gamma, config.verify_width, config.trained_block_size) == (gamma, gamma + 1, 5)
    rows = Rows(target, draft, [13], [42])
    block = make_drafter(rows).propose(torch.arange(1), torch.tensor([True]), torch.ones(1), None)
    assert block.tokens.shape == (1, gamma)
    assert rows.widths == [gamma + (not sample_from_anchor)]
    with pytest.raises(ModelFormatError, match="--speculative-dspark-block-size 6"):
        load_draft(folder, target, block_size=6)


@pytest.mark.parametrize("head", HEADS)
def test_confidence_logits(tmp_path, target_folder, target, head):
    """Raw logits from the slot's hidden state and the embedding of the token before it, not of its own."""
    folder = write_dspark(tmp_path / "d", target_folder, head=head)
    draft, reference = load_draft(folder, target), DraftReference(folder)
    z = torch.randn(3, GAMMA, target.config.hidden_size, generator=torch.Generator().manual_seed(2))
    previous = torch.randint(0, VOCAB_SIZE, (3, GAMMA), generator=torch.Generator().manual_seed(3))
    got = draft.confidence_logits(z, previous)
    assert got.dtype == torch.float32
    markov = MarkovReference(head, reference.w)
    for r in range(3):
        for k in range(GAMMA):
            expected = markov.confidence(z[r, k], int(previous[r, k]))
            torch.testing.assert_close(got[r, k].double(), expected, atol=1e-5, rtol=0)
    other = draft.confidence_logits(z, previous.roll(1, 0))
    assert torch.equal(got, other) == (head == "none")


def test_confidence_head_without_the_markov_embedding(tmp_path, target_folder, target):
    folder = write_dspark(tmp_path / "d", target_folder, confidence_head_with_markov=False)
    draft = load_draft(folder, target)
    z = torch.randn(1, GAMMA, target.config.hidden_size)
    a, b = (draft.confidence_logits(z, torch.full((1, GAMMA), token)) for token in (5, 6))
    assert torch.equal(a, b)
    assert (
        load_draft(write_dspark(tmp_path / "n", target_folder, confidence=False), target).confidence is None
    )


# Loading


@pytest.mark.parametrize("head", HEADS)
def test_flat_and_nested_keys_build_the_same_draft(tmp_path, target_folder, target, head):
    keys = {"head": head, "sample_from_anchor": False, "markov_rank": 0 if head == "none" else 7}
    drafts = [
        load_draft(write_dspark(tmp_path / str(nested), target_folder, nested=nested, **keys), target)
        for nested in (False, True)
    ]
    assert drafts[0].config == drafts[1].config
    walks = [propose(Rows(target, draft, [13], [42]), 1)[0] for draft in drafts]
    assert torch.equal(walks[0].logits, walks[1].logits)


def test_frozen_copies_of_the_targets_tables_are_skipped(tmp_path, target_folder, target):
    folders = [write_dspark(tmp_path / str(c), target_folder, copies=c) for c in (False, True)]
    assert "lm_head.weight" in load_file(folders[1] / "model.safetensors")
    walks = [propose(Rows(target, load_draft(f, target), [13], [42]), 1)[0] for f in folders]
    assert torch.equal(walks[0].logits, walks[1].logits)


def test_files_without_or_with_too_many_tensors_are_refused(tmp_path, target_folder, target):
    folder = write_dspark(tmp_path / "d", target_folder, head="gated")
    config = json.loads((folder / "config.json").read_text())
    for change, name in [
        ({"markov_head_type": "rnn"}, "markov_head.joint_proj.weight"),
        ({"markov_head_type": "vanilla"}, "unexpected: markov_head.gate_proj.bias"),
        ({"enable_confidence_head": False}, "unexpected: confidence_head.proj.bias"),
        ({"markov_rank": 9}, "markov_head.markov_w1.weight is"),
    ]:
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelFormatError, match=name):
            load_draft(folder, target)


def test_dummy_weights_and_bfloat16(tmp_path, target_folder, target):
    folder = write_dspark(tmp_path / "d", target_folder, head="rnn")
    dummy = load_draft(folder, target, load_format="dummy")
    assert isinstance(dummy, DSparkDraft)
    half_target = load_target(target_folder, "bfloat16")
    half = load_draft(folder, half_target)
    rows = Rows(target, load_draft(folder, target), [13], [42])
    half_rows = Rows(half_target, half, [13], [42])
    exact, rounded = (propose(r, 1)[0].logits[0, 0, MASK_ID + 1 :] for r in (rows, half_rows))
    assert rounded.dtype == torch.float32
    assert (exact - rounded).abs().mean() < 0.05 * exact.std()


def test_half_precision_file_under_float32(tmp_path, target_folder, target):
    """Weights held in half precision give what the same values give in float32."""
    kept = write_dspark(tmp_path / "half", target_folder, head="gated", torch_dtype="bfloat16")
    widened = write_dspark(tmp_path / "full", target_folder, head="gated")
    tensors = {name: t.float() for name, t in load_file(kept / "model.safetensors").items()}
    save_file(tensors, widened / "model.safetensors", metadata={"format": "pt"})
    walks = [propose(Rows(target, load_draft(f, target), [13], [42]), 1)[0] for f in (kept, widened)]
    torch.testing.assert_close(walks[0].logits, walks[1].logits, atol=0.05, rtol=0)


def test_algorithm_and_draft_must_agree(tmp_path, target_folder):
    drafts = {"DSPARK": write_dspark(tmp_path / "s", target_folder)}
    drafts["DFLASH"] = write_dflash(tmp_path / "f", target_folder)
    write_target(target_folder)  # with a tokenizer
    for algorithm, other in [("DSPARK", "DFLASH"), ("DFLASH", "DSPARK")]:
        with pytest.raises(ModelFormatError) as error:
            Harness(target_folder, drafts[other], speculative_algorithm=algorithm)
        message = str(error.value)
        for word in (
            f"--speculative-algorithm {algorithm}",
            "--speculative-draft-model-path",
            str(drafts[other]),
            f"use --speculative-algorithm {other}",
        ):
            assert word in message
        assert Harness(target_folder, drafts[algorithm], speculative_algorithm=algorithm).ready


def test_widths_reach_the_server_info(tmp_path, target_folder):
    write_target(target_folder)
    draft = write_dspark(tmp_path / "s", target_folder)
    for flags, gamma in [
        ({}, 5),
        ({"speculative_dspark_block_size": 3}, 3),
        ({"speculative_num_draft_tokens": 3}, 2),
    ]:
        harness = Harness(target_folder, draft, **flags)
        assert harness.ready.info["speculative_dspark_block_size"] == gamma
        assert harness.ready.info["speculative_num_draft_tokens"] == gamma + 1
        result = harness.run([Job([5, 6, 7], 12)])[0]
        assert result.stats.num_drafted % gamma == 0
    dflash = Harness(target_folder, write_dflash(tmp_path / "f", target_folder))
    assert dflash.ready.info["speculative_dspark_block_size"] is None
    assert isinstance(dflash._worker.drafter, DFlashDrafter)
