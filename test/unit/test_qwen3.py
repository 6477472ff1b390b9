"""Our Qwen3 against transformers: whole, in chunks, step by step, mixed batches; and the captured features."""

import pytest
import torch
from transformers import Qwen3ForCausalLM

from flashspark.attention.registry import make_backend
from flashspark.engine.loader import load_target
from paged import Pages
from tiny_models import VOCAB_SIZE, write_target

CONFIGS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "one kv head, group of 4": {"num_key_value_heads": 1},
    "no grouping": {"num_key_value_heads": 4},
    "group of 3": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "head_dim is hidden / heads": {"head_dim": 12},
    "biases": {"attention_bias": True},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "yarn rope": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        "max_position_embeddings": 128,
    },
    "yarn rope with all options": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16,
            "beta_slow": 2,
            "mscale": 0.7,
            "mscale_all_dim": 0.4,
            "truncate": False,
        },
        "rope_theta": None,
        "max_position_embeddings": 512,
    },
    "nested theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, "rope_theta": None},
}


@pytest.fixture(params=list(CONFIGS))
def pair(request, tmp_path):
    folder = write_target(tmp_path / "target", tokenizer=False, **CONFIGS[request.param])
    theirs = Qwen3ForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return load_target(folder), theirs


def reference(theirs, ids):
    with torch.no_grad():
        return theirs(ids.unsqueeze(0), output_hidden_states=True)


def run(model, pool, pages, spans, ids_of, capture=(), padding=0):
    """Logits and features of `spans`, with the ids of request r in `ids_of[r]`."""
    ids = torch.cat([ids_of[r][start : start + count] for r, start, count in spans])
    ids = torch.cat((ids, torch.zeros(padding, dtype=torch.int64)))
    hidden = model.forward(ids, pages.ragged(spans, padding), pool, make_backend("torch_native"), capture)
    return model.logits(hidden.final), hidden.features


@pytest.mark.parametrize("chunk", [50, 7, 1])
def test_equals_transformers_in_chunks_of_any_size(pair, chunk):
    ours, theirs = pair
    ids = torch.randint(0, VOCAB_SIZE, (50,), generator=torch.Generator().manual_seed(chunk))
    expected = reference(theirs, ids).logits[0]
    pages = Pages(1, 64)
    pool = ours.make_kv_pool(pages.num_slots)
    spans = [(0, start, min(chunk, 50 - start)) for start in range(0, 50, chunk)]
    got = torch.cat([run(ours, pool, pages, [span], {0: ids})[0] for span in spans])
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_prefill_then_steps_through_contiguous_pages(pair):
    ours, theirs = pair
    ids = torch.randint(0, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(3))
    expected = reference(theirs, ids).logits[0]
    pages = Pages(1, 40, seed=None)
    pool = ours.make_kv_pool(pages.num_slots)
    spans = [(0, 0, 24), *((0, n, 1) for n in range(24, 32)), (0, 32, 8)]
    got = torch.cat([run(ours, pool, pages, [span], {0: ids})[0] for span in spans])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_mixed_batch_equals_each_request_alone(pair):
    ours, theirs = pair
    generator = torch.Generator().manual_seed(4)
    ids = {r: torch.randint(0, VOCAB_SIZE, (30,), generator=generator) for r in range(3)}
    pages = Pages(3, 30)
    pool = ours.make_kv_pool(pages.num_slots)
    run(ours, pool, pages, [(0, 0, 20), (1, 0, 11)], ids)
    # A verify window, a single row, a first chunk, then two rows of padding.
    spans = [(0, 20, 6), (1, 11, 1), (2, 0, 9)]
    got, _ = run(ours, pool, pages, spans, ids, padding=2)
    assert got.isfinite().all()
    row = 0
    for r, start, count in spans:
        expected = reference(theirs, ids[r]).logits[0, start : start + count]
        torch.testing.assert_close(got[row : row + count], expected, atol=1e-4, rtol=0)
        row += count


def test_captured_features_are_the_residual_stream_after_each_layer(pair):
    ours, theirs = pair
    raw_last = []
    theirs.model.layers[3].register_forward_hook(lambda _m, _i, out: raw_last.append(out))
    ids = torch.randint(0, VOCAB_SIZE, (17,), generator=torch.Generator().manual_seed(5))
    states = reference(theirs, ids).hidden_states
    last = raw_last[0][0] if isinstance(raw_last[0], tuple) else raw_last[0]
    pages = Pages(1, 17)
    for layers in [(0, 2), (1,), (0, 1, 2, 3), (3,)]:
        pool = ours.make_kv_pool(pages.num_slots)
        _, features = run(ours, pool, pages, [(0, 0, 17)], {0: ids}, layers)
        # For the last layer hidden_states holds the normed value, the draft wants the one before.
        expected = [last.view(17, -1) if layer == 3 else states[layer + 1][0] for layer in layers]
        torch.testing.assert_close(features, torch.cat(expected, -1), atol=1e-4, rtol=0)
    assert run(ours, ours.make_kv_pool(pages.num_slots), pages, [(0, 0, 17)], {0: ids})[1] is None


@pytest.mark.parametrize("layers", [(), (0, 2), (1, 3)])
def test_filling_leaves_what_a_forward_leaves(pair, layers):
    """The same K/V, features and, for the token after, logits; bit for bit, since the products are the same."""
    ours, _ = pair
    ids = torch.randint(0, VOCAB_SIZE, (21,), generator=torch.Generator().manual_seed(6))
    pages = Pages(1, 21)
    filled, forwarded = (ours.make_kv_pool(pages.num_slots) for _ in range(2))
    for start, count in ((0, 13), (13, 7)):
        queries = pages.ragged([(0, start, count)])
        features = ours.fill(
            ids[start : start + count], queries, filled, make_backend("torch_native"), layers
        )
        _, expected = run(ours, forwarded, pages, [(0, start, count)], {0: ids}, layers)
        assert (features is None) == (expected is None) == (not layers)
        if features is not None:
            assert torch.equal(features, expected)
    for a, b in zip(filled.k + filled.v, forwarded.k + forwarded.v, strict=True):
        assert torch.equal(a, b)
    logits = [run(ours, pool, pages, [(0, 20, 1)], {0: ids})[0] for pool in (filled, forwarded)]
    assert torch.equal(*logits)


def test_padding_rows_write_only_to_the_scratch_page(pair):
    ours, _ = pair
    pages = Pages(2, 20)
    ids = {r: torch.randint(0, VOCAB_SIZE, (20,), generator=torch.Generator().manual_seed(r)) for r in (0, 1)}
    pools = [ours.make_kv_pool(pages.num_slots) for _ in range(2)]
    for pool, padding in zip(pools, (0, 5), strict=True):
        run(ours, pool, pages, [(0, 0, 12), (1, 0, 9)], ids, padding=padding)
    for a, b in zip(pools[0].k + pools[0].v, pools[1].k + pools[1].v, strict=True):
        torch.testing.assert_close(a[pages.page_size :], b[pages.page_size :], atol=1e-5, rtol=0)
        assert b[: pages.page_size].abs().sum() > 0


def test_tied_head_and_embedding_are_one_table(tmp_path):
    tied = load_target(write_target(tmp_path / "tied", tokenizer=False, tie_word_embeddings=True))
    assert tied.tables.head is not None
    assert torch.equal(tied.tables.head.t(), tied.tables.table)
    untied = load_target(write_target(tmp_path / "untied", tokenizer=False))
    assert not torch.equal(untied.tables.head.t(), untied.tables.table)


def test_large_tied_table_is_not_copied(tmp_path, monkeypatch):
    folder = write_target(tmp_path / "tied", tokenizer=False, tie_word_embeddings=True)
    hidden = torch.randn(3, 48)
    expected = load_target(folder).logits(hidden)
    monkeypatch.setattr("flashspark.layers.embedding.TRANSPOSED_COPY_BYTES", 0)
    model = load_target(folder)
    assert model.tables.head is None
    torch.testing.assert_close(model.logits(hidden), expected, atol=1e-5, rtol=0)


def test_bfloat16_stays_close_to_float32(tmp_path):
    folder = write_target(tmp_path / "target", tokenizer=False)
    ids = {0: torch.randint(0, VOCAB_SIZE, (20,), generator=torch.Generator().manual_seed(6))}
    pages = Pages(1, 20)
    logits = []
    for dtype in ("float32", "bfloat16"):
        model = load_target(folder, dtype)
        logits.append(run(model, model.make_kv_pool(pages.num_slots), pages, [(0, 0, 20)], ids)[0])
    assert logits[1].dtype == torch.float32
    assert (logits[0] - logits[1]).abs().mean() < 0.05 * logits[0].std()
