"""The draft through pools against the float64 recomputation of `draft_reference`, and the known pitfalls."""

import json

import pytest
import torch

from draft_reference import DraftReference
from flashspark.attention.registry import make_backend
from flashspark.engine.loader import load_draft, load_target
from flashspark.kernels.rope import rope
from paged import Pages
from tiny_models import MASK_ID, VOCAB_SIZE, write_dflash, write_dflash2, write_target

BACKEND = make_backend("torch_native")
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
VARIANTS = {
    "plain": {},
    "causal": {"is_causal": True},
    "sliding, causal where it slides": SLIDING,
    "sliding, bidirectional": SLIDING | {"is_causal": False},
    "biases": {"attention_bias": True},
    "scales": {"dflash_config": {"attention_value_scale": 0.6, "input_embedding_scale": 1.7}},
    "one layer": {"num_hidden_layers": 1},
    "three features": {"dflash_config": {"target_layer_ids": [0, 1, 3]}},
}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("models") / "target", tokenizer=False)


@pytest.fixture(scope="module")
def target(target_folder):
    return load_target(target_folder)


@pytest.fixture(params=["dflash", "dflash2"])
def make(request, tmp_path, target_folder, target):
    """Writes a draft of either family: `(the loaded draft, its reference)`."""
    write = {"dflash": write_dflash, "dflash2": write_dflash2}[request.param]

    def build(block_size=None, **config):
        folder = write(tmp_path / "draft", target_folder, **config)
        build.folder = folder
        return load_draft(folder, target, block_size=block_size), DraftReference(folder)

    return build


class Requests:
    """Committed contexts of random features in a shared pool, and the blocks drafted after them."""

    def __init__(self, target, draft, context_lens, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.target, self.draft, self.context_lens = target, draft, context_lens
        m = len(draft.config.target_layer_ids)
        width = m * target.config.hidden_size
        self.features = [torch.randn(n, width, generator=generator) for n in context_lens]
        self.anchors = torch.randint(4, VOCAB_SIZE, (len(context_lens),), generator=generator)
        self.pages = Pages(len(context_lens), max(context_lens) + 16, seed)
        self.pool = draft.make_kv_pool(self.pages.num_slots)

    def inject(self, request, start=0, end=None, features=None):
        end = self.context_lens[request] if end is None else end
        positions = torch.arange(start, end)
        features = self.features[request][start:end] if features is None else features
        self.draft.inject(features, positions, self.pages.slots(request, positions), self.pool)

    def embeddings(self, width, mask_id=MASK_ID):
        ids = torch.full((len(self.anchors), width), mask_id)
        ids[:, 0] = self.anchors
        return self.target.embed(ids)

    def block(self, requests=None, width=None, embeddings=None):
        width = self.draft.config.block_size if width is None else width
        requests = list(range(len(self.context_lens))) if requests is None else requests
        embeddings = self.embeddings(width)[requests] if embeddings is None else embeddings
        queries = self.pages.block(requests, [self.context_lens[r] for r in requests], width)
        return self.draft.forward_block(embeddings, queries, self.pool, BACKEND)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_equals_the_cache_free_recomputation(make, target, variant):
    draft, reference = make(**VARIANTS[variant])
    requests = Requests(target, draft, [13, 1, 30])
    for r in range(3):
        requests.inject(r)
    got = requests.block()
    embeddings = requests.embeddings(draft.config.block_size)
    for r in range(3):
        expected = reference.block(requests.features[r], embeddings[r])
        torch.testing.assert_close(got[r].double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, 30])
def test_context_is_the_same_for_every_chunk_size(make, target, chunk):
    draft, _ = make()
    whole, parts = (Requests(target, draft, [30]) for _ in range(2))
    whole.inject(0)
    for start in range(0, 30, chunk):
        parts.inject(0, start, min(start + chunk, 30))
    for a, b in zip(whole.pool.k + whole.pool.v, parts.pool.k + parts.pool.v, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_context_keys_see_neither_input_norm_nor_convolution(make, target):
    draft, reference = make()
    requests = Requests(target, draft, [11])
    requests.inject(0)
    context = reference.context(requests.features[0])
    slots = requests.pages.slots(0, torch.arange(11))
    for layer in range(2):
        keys, values = reference.keys_values(context, layer, torch.arange(11))
        torch.testing.assert_close(requests.pool.k[layer][slots].double(), keys, atol=1e-5, rtol=0)
        torch.testing.assert_close(requests.pool.v[layer][slots].double(), values, atol=1e-5, rtol=0)


def test_drafting_writes_nothing_and_junk_beyond_the_context_is_invisible(make, target):
    draft, _ = make()
    requests = Requests(target, draft, [13, 8])
    requests.inject(0)
    requests.inject(1)
    before = [cache.clone() for cache in requests.pool.k + requests.pool.v]
    expected = requests.block()
    for a, b in zip(before, requests.pool.k + requests.pool.v, strict=True):
        assert torch.equal(a, b)
    # What a verify leaves for its rejected rows: features at positions from the committed length on.
    junk = 1e4 * torch.randn(6, requests.features[0].shape[1])
    requests.inject(0, 13, 19, junk)
    assert torch.equal(requests.block(), expected)


def test_several_steps_with_rejections_equal_a_fresh_context(make, target):
    draft, _ = make()
    requests = Requests(target, draft, [24])
    fresh = Requests(target, draft, [24])
    width = draft.config.block_size
    position = 5
    requests.inject(0, 0, position)
    for accepted in [0, 3, 5, 1, 0, 4]:  # 5 + 19 tokens: the length of the features
        requests.context_lens[0] = position
        requests.block()
        # All verified rows are injected; those after the accepted ones carry features of rejected tokens.
        verified = requests.features[0][position : position + width].clone()
        verified[accepted + 1 :] = torch.randn_like(verified[accepted + 1 :])
        requests.inject(0, position, position + len(verified), verified)
        position += accepted + 1
    requests.context_lens[0] = fresh.context_lens[0] = position
    fresh.inject(0, 0, position)
    torch.testing.assert_close(requests.block(), fresh.block(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("width", [2, 5, 6])
def test_batch_equals_single_requests_at_any_width(make, target, width):
    draft, reference = make(block_size=width)
    assert draft.config.block_size == width
    requests = Requests(target, draft, [13, 1, 30])
    for r in range(3):
        requests.inject(r)
    together = requests.block()
    assert together.shape == (3, width, target.config.hidden_size)
    for r in range(3):
        torch.testing.assert_close(requests.block([r])[0], together[r], atol=1e-5, rtol=0)
        expected = reference.block(requests.features[r], requests.embeddings(width)[r])
        torch.testing.assert_close(together[r].double(), expected, atol=2e-5, rtol=0)


def test_anchor_row_sits_at_the_committed_length(make, target):
    """The block moves with the context: the same features one position further on give another answer."""
    draft, reference = make()
    requests = Requests(target, draft, [20])
    requests.inject(0)
    seen = []
    original = draft.rotary.tables
    draft.rotary.tables = lambda positions: (seen.append(positions), original(positions))[1]
    got = requests.block()
    assert seen[0].tolist() == [[20, 21, 22, 23, 24, 25]]
    shifted = reference.block(requests.features[0][:-1], requests.embeddings(6)[0])
    assert (got[0].double() - shifted).abs().max() > 1e-3


@pytest.mark.parametrize(("causal", "sliding"), [(None, True), (False, True), (True, False), (None, False)])
def test_earlier_rows_see_later_ones_only_without_causality(make, target, causal, sliding):
    config = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64} if sliding else {}
    draft, _ = make(**config, is_causal=causal)
    requests = Requests(target, draft, [13])
    requests.inject(0)
    before = requests.block()
    embeddings = requests.embeddings(6)
    embeddings[:, -1] += 1
    changed = (requests.block(embeddings=embeddings) - before).abs().amax(-1)[0] > 1e-6
    is_causal = sliding if causal is None else causal
    assert changed.tolist() == [not is_causal] * 5 + [True]


def test_each_layer_has_its_own_window(tmp_path, target_folder, target):
    def last_visible(kinds):
        """How far back, from the anchor row, a context token changes the anchor row: one layer at a time."""
        folder = write_dflash(
            tmp_path / "-".join(kinds), target_folder, layer_types=kinds, sliding_window=6, is_causal=True
        )
        draft = load_draft(folder, target)
        requests = Requests(target, draft, [20])
        requests.inject(0)
        before = requests.block()[0, 0]
        changed = []
        for distance in range(1, 21):
            slot = requests.pages.slots(0, torch.tensor([20 - distance]))
            saved = [cache[slot].clone() for cache in requests.pool.v]
            for cache in requests.pool.v:
                cache[slot] += 1
            changed.append(bool((requests.block()[0, 0] - before).abs().max() > 1e-6))
            for cache, value in zip(requests.pool.v, saved, strict=True):
                cache[slot] = value
        return sum(changed)

    assert last_visible(["sliding_attention", "sliding_attention"]) == 5  # the query itself is the sixth
    assert last_visible(["sliding_attention", "full_attention"]) == 20
    assert last_visible(["full_attention", "sliding_attention"]) == 20


def test_mask_id_of_the_config_decides_the_masked_rows(tmp_path, target_folder, target):
    outputs = []
    for mask_id in (MASK_ID, 77):
        folder = write_dflash(
            tmp_path / str(mask_id), target_folder, dflash_config={"mask_token_id": mask_id}
        )
        draft = load_draft(folder, target)
        assert draft.config.mask_token_id == mask_id
        requests = Requests(target, draft, [9])
        requests.inject(0)
        outputs.append(requests.block(embeddings=requests.embeddings(6, draft.config.mask_token_id)))
    assert (outputs[0] - outputs[1]).abs().amax(-1).min() > 1e-4


def test_identity_dflash2_is_dflash(tmp_path, target_folder, target):
    v1 = load_draft(write_dflash(tmp_path / "v1", target_folder), target)
    v2 = load_draft(write_dflash2(tmp_path / "v2", target_folder, identity=True), target)
    outputs = []
    for draft in (v1, v2):
        requests = Requests(target, draft, [13, 5])
        requests.inject(0)
        requests.inject(1)
        outputs.append(requests.block())
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-6, rtol=0)
    assert not v2.selector.successor_codebook.any()


@pytest.mark.parametrize("position", [0, 1, 5000])
def test_rope_of_the_draft_uses_its_own_base_and_half_split_pairs(make, position):
    draft, reference = make()
    x = torch.randn(1, 3, 8)
    tables = draft.rotary.tables(torch.tensor([position]))
    expected = reference.rope(x.double(), torch.tensor([position]))
    torch.testing.assert_close(rope(x, *tables).double(), expected, atol=1e-3, rtol=0)
    if position == 1:  # feature 0 with feature 4, by the whole angle of 1
        cos, sin = torch.tensor(1.0).cos(), torch.tensor(1.0).sin()
        torch.testing.assert_close(tables.turn(x)[0, 0, 0], x[0, 0, 0] * cos - x[0, 0, 4] * sin)


def test_output_multiplier_and_softcap(tmp_path, target_folder, target):
    config = {"output_multiplier": 0.5, "final_logit_softcapping": 3.0}
    draft = load_draft(write_dflash2(tmp_path / "d", target_folder, dflash_config=config), target)
    logits = torch.tensor([[-40.0, 0.0, 2.0, 40.0]])
    torch.testing.assert_close(draft.scale_logits(logits), 3 * torch.tanh(0.5 * logits / 3))
    assert draft.scale_logits(logits).argsort().tolist() == logits.argsort().tolist()
    plain = load_draft(write_dflash(tmp_path / "p", target_folder), target)
    assert plain.scale_logits(logits) is logits


def test_three_widths_are_three_numbers(make, target):
    draft, _ = make(block_size=4)
    config = draft.config
    assert (config.trained_block_size, config.block_size, config.gamma, config.verify_width) == (6, 4, 3, 4)


def test_features_of_the_target_feed_the_draft(make, target, target_folder):
    """End of the chain: ids through the target, its captured features into the draft, against the reference."""
    draft, reference = make()
    ids = torch.randint(4, VOCAB_SIZE, (15,), generator=torch.Generator().manual_seed(8))
    pages = Pages(1, 32)
    pool, context = target.make_kv_pool(pages.num_slots), draft.make_kv_pool(pages.num_slots)
    features = []
    for start, count in [(0, 8), (8, 7)]:
        queries = pages.ragged([(0, start, count)])
        layers = draft.config.target_layer_ids
        hidden = target.forward(ids[start : start + count], queries, pool, BACKEND, layers)
        draft.inject(hidden.features, queries.positions, queries.slots, context)
        features.append(hidden.features)
    block_ids = torch.tensor([[42] + [MASK_ID] * 5])
    z = draft.forward_block(target.embed(block_ids), pages.block([0], [15], 6), context, BACKEND)
    expected = reference.block(torch.cat(features), target.embed(block_ids)[0])
    torch.testing.assert_close(z[0].double(), expected, atol=2e-5, rtol=0)
    assert target.logits(z).shape == (
        1,
        6,
        json.loads((target_folder / "config.json").read_text())["vocab_size"],
    )


def test_bfloat16_stays_close_to_float32(make, target, target_folder):
    _, reference = make()
    half_target = load_target(target_folder, "bfloat16")
    half = load_draft(make.folder, half_target)
    assert half.dtype == torch.bfloat16
    requests = Requests(half_target, half, [13])
    requests.features = [features.bfloat16() for features in requests.features]
    requests.inject(0)
    got = requests.block()
    assert got.dtype == torch.bfloat16
    expected = reference.block(requests.features[0], requests.embeddings(6)[0])
    assert (got[0].double() - expected).abs().mean() < 0.05 * expected.std()
