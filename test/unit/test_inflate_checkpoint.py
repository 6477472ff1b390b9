"""A widened pair computes what the shipped one does, and its checker notices one that does not."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

import check_inflated
from flashspark.attention.registry import make_backend
from flashspark.demo import DEMO_MODELS, DEMO_PROMPTS
from flashspark.engine.loader import load_draft, load_target
from flashspark.kernels.rms_norm import rms_norm
from inflate_checkpoint import inflate, with_overrides
from inflation.folders import write_folder
from inflation.geometry import (
    GEOMETRIES,
    SPARE,
    Geometry,
    Tiling,
    head_channels,
    kv_head_sources,
    places_of,
    query_head_sources,
    shown_taps,
)
from inflation.paired import Comparison, Pair, block_positions
from inflation.widening import Widener
from paged import Pages

CPU = torch.device("cpu")
VOCAB, EXTRA, HIDDEN = 4096, 260, 256
# 2 tiles and 16 spare channels, groups of 5 over 2, MLP channels and ranks copied once or twice, 2 neutral layers.
SMALLEST = Geometry(
    528, 10, 2, 1000, 9, VOCAB + EXTRA, (0, 1, 3, 4, 6, 7, 8), (1, 4, 5, 7), num_draft_layers=4, rank=192
)
SHOWN = [0, 1, 1, 2]


def make(folder, dtype: torch.dtype):
    inflate(SMALLEST, folder, dtype=dtype, num_prompts=2, max_new=4)
    return folder


@pytest.fixture(scope="module")
def exact_pair(tmp_path_factory):
    return make(tmp_path_factory.mktemp("float32"), torch.float32)


@pytest.fixture(scope="module")
def rounded_pair(tmp_path_factory):
    return make(tmp_path_factory.mktemp("bfloat16"), torch.bfloat16)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return json.loads(DEMO_PROMPTS.read_text())[3]["token_ids"][:64]


@torch.inference_mode()
def run(path, dtype, prompt, taps):
    """The model, its logits float32 [T, V] and tapped hidden states float32 [T, taps, H] along the prompt."""
    target, pages = load_target(path, dtype), Pages(1, len(prompt))
    queries = pages.ragged([(0, 0, len(prompt))])
    pool, backend = target.make_kv_pool(pages.num_slots), make_backend("torch_native")
    hidden = target.forward(torch.tensor(prompt), queries, pool, backend, taps)
    features = hidden.features.float().view(len(prompt), len(taps), -1)
    return target, target.logits(hidden.final), features


def rms(x):
    return float(x.square().mean().sqrt())


def tap_errors(taps, small_taps):
    """Relative error of each tap's tiles against the small tap that it shows."""
    for tap, small in enumerate(SHOWN):
        tiles = taps[:, tap, : 2 * HIDDEN].view(-1, 2, HIDDEN) / 2
        expected = small_taps[:, small, None].expand_as(tiles)
        yield float((tiles - expected).norm() / expected.norm())


class TestTarget:
    def test_logits_and_taps_are_the_small_ones(self, exact_pair, prompt):
        _, expected, small_taps = run(DEMO_MODELS["demo"], "float32", prompt, (1, 3, 5))
        _, logits, taps = run(exact_pair / "target", "float32", prompt, SMALLEST.target_layer_ids)
        assert rms(logits[:, :VOCAB] - expected) < 1e-4
        assert (logits[:, :VOCAB] - expected).abs().max() < 1e-3
        assert logits[:, VOCAB:].max() < -100
        assert max(tap_errors(taps, small_taps)) < 1e-5

    def test_bfloat16_is_no_worse_than_of_the_small_one(self, rounded_pair, prompt):
        _, expected, small_taps = run(DEMO_MODELS["demo"], "float32", prompt, (1, 3, 5))
        _, rounded, _ = run(DEMO_MODELS["demo"], "bfloat16", prompt, (1, 3, 5))
        _, logits, taps = run(rounded_pair / "target", "bfloat16", prompt, SMALLEST.target_layer_ids)
        assert rms(logits[:, :VOCAB] - expected) < 1.5 * rms(rounded - expected)
        assert (logits[:, :VOCAB] - expected).abs().max() < 1.5
        assert logits[:, VOCAB:].max() < -100
        assert max(tap_errors(taps, small_taps)) < 0.015

    def test_transformers_loads_it(self, exact_pair, prompt):
        _, expected, _ = run(DEMO_MODELS["demo"], "float32", prompt, (1,))
        theirs, info = Qwen3ForCausalLM.from_pretrained(
            exact_pair / "target", dtype=torch.float32, output_loading_info=True
        )
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        with torch.no_grad():
            logits = theirs.eval()(torch.tensor([prompt])).logits[0]
        assert (logits[:, :VOCAB] - expected).abs().max() < 1e-3

    def test_folder_is_complete(self, exact_pair):
        config = json.loads((exact_pair / "target" / "config.json").read_text())
        assert config["vocab_size"] == VOCAB + EXTRA and config["tie_word_embeddings"] is False
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            small = (DEMO_MODELS["demo"] / name).read_bytes()
            assert (exact_pair / "target" / name).read_bytes() == small
        assert (exact_pair / "dspark" / "sts.json").exists()
        record = json.loads((exact_pair / "inflation.json").read_text())
        assert record["geometry"]["hidden_size"] == 528 and record["models"]["target"]["bytes"] > 0

    def test_no_weights_are_shared(self, exact_pair):
        weights = load_file(exact_pair / "target" / "model-00001-of-00001.safetensors")
        up = [t[0] for name, t in weights.items() if name.endswith("up_proj.weight")]
        assert len({float(row[0]) for row in up}) == SMALLEST.num_hidden_layers
        real = weights["model.layers.3.self_attn.q_proj.weight"]
        assert (real[:, :HIDDEN] != real[:, HIDDEN : 2 * HIDDEN]).float().mean() > 0.999


@torch.inference_mode()
def drafted(target_folder, draft_folder, prompt):
    """z [1, width, H], its logits, and the draft, after one block behind the prompt's last token."""
    target = load_target(target_folder, "float32")
    pair = Pair(target, draft_folder, 1, len(prompt))
    pair.start([prompt])
    rows = pair.worker.runner.request_rows
    rows.set_context(0, len(prompt) - 1, prompt[-1])
    draft = load_draft(draft_folder, target)
    z = pair.worker.runner.draft_hidden(torch.tensor([0]), draft.config.draft_rows)
    return draft, z, target.logits(z)


class TestDrafts:
    @pytest.mark.parametrize("kind", ["dflash2", "dspark"])
    def test_block_logits_are_the_small_ones(self, exact_pair, prompt, kind):
        _, _, expected = drafted(DEMO_MODELS["demo"], DEMO_MODELS[f"demo-{kind}"], prompt)
        _, _, logits = drafted(exact_pair / "target", exact_pair / kind, prompt)
        assert (logits[..., :VOCAB] - expected).abs().max() < 1e-3
        assert logits[..., VOCAB:].max() < -100

    def test_selector_scores_are_the_small_ones(self, exact_pair, prompt):
        scores = []
        for target, folder in (
            (DEMO_MODELS["demo"], DEMO_MODELS["demo-dflash2"]),
            (exact_pair / "target", exact_pair / "dflash2"),
        ):
            draft, z, _ = drafted(target, folder, prompt)
            selector = draft.selector
            left = selector.predecessor_codebook[prompt[:9], None] * selector.project(z[0])
            scores.append(left @ selector.successor_codebook[:VOCAB].t())
        assert scores[1].shape == scores[0].shape and scores[0].abs().max() > 1
        assert (scores[1] - scores[0]).abs().max() < 1e-3

    def test_markov_corrections_and_confidence_are_the_small_ones(self, exact_pair, prompt):
        corrections, confidence = [], []
        for target, folder in (
            (DEMO_MODELS["demo"], DEMO_MODELS["demo-dspark"]),
            (exact_pair / "target", exact_pair / "dspark"),
        ):
            draft, z, _ = drafted(target, folder, prompt)
            weights = draft.markov.weights
            corrections.append(weights.embedding[prompt] @ weights.output[:, :VOCAB])
            confidence.append(draft.confidence_logits(z, torch.tensor([prompt[: z.shape[1]]])))
        assert corrections[0].abs().max() > 1
        assert (corrections[1] - corrections[0]).abs().max() < 1e-3
        assert (confidence[1] - confidence[0]).abs().max() < 1e-4


class TestCheck:
    def test_accepts_the_same_blocks_in_float32(self, exact_pair):
        records = check_inflated.check(exact_pair, dtype="float32", num_blocks=12, num_prompts=3)
        assert [(r["draft"], r["temperature"]) for r in records] == [
            (kind, temperature) for kind in ("dflash2", "dspark") for temperature in (0.0, 1.0)
        ]
        for record in records:
            assert record["blocks"] == 12 and record["differing"] == 0 and record["ratio"] == 1.0
            assert record["small"] > 1
            assert -2000 < record["largest_extra_logit"]["target"] < -100
            assert not record["problems"]

    def test_notices_a_head_that_lets_extra_tokens_in(self, exact_pair, tmp_path):
        """The target's norm no longer passes the constant channel on, so the extra rows are noise about 0."""
        broken = tmp_path / "target"
        shutil.copytree(exact_pair / "target", broken)
        shutil.copytree(exact_pair / "dspark", tmp_path / "dspark")
        file = broken / "model-00001-of-00001.safetensors"
        weights = load_file(file)
        assert weights["model.norm.weight"][512] == 256
        weights["model.norm.weight"][512] = 0
        save_file(weights, file)
        records = check_inflated.check(
            tmp_path, dtype="float32", num_blocks=2, num_prompts=2, drafts=("dspark",)
        )
        for record in records:
            assert len(record["problems"]) == 1 and "in the target" in record["problems"][0]
        assert "in the target" in check_inflated.table(records)

    def test_what_is_a_problem(self):
        fine = {"target": -150.0, "draft": -100.5}
        good, bad = Comparison(512, 2.0, 2.099, 9, 0.01), Comparison(512, 2.0, 1.89, 9, 0.01)
        assert check_inflated.problems(good, fine) == []
        assert len(check_inflated.problems(bad, fine)) == 1
        assert len(check_inflated.problems(good, {"target": -100.0, "draft": -math.inf})) == 2
        assert len(check_inflated.problems(Comparison(1, 2.0, math.nan, 0, 0.0), fine)) == 1

    def test_comparison(self):
        compared = Comparison.of(torch.tensor([[2, 4], [1, 1]]), torch.tensor([[2, 3], [1, 2]]))
        assert (compared.blocks, compared.small, compared.wide, compared.differing) == (4, 2.0, 2.0, 2)
        assert compared.ratio == 1.0 and compared.standard_error == pytest.approx(math.sqrt(2) / 8)

    def test_positions_descend_and_differ(self):
        texts = [[0] * 40, [0] * 25]
        positions = block_positions(texts, [20, 24], 8)
        assert positions[:, 0].tolist() == [39, 36, 33, 30, 28, 25, 22, 19]
        assert positions[:, 1].tolist() == list(range(24, 16, -1))
        with pytest.raises(ValueError, match="too short"):
            block_positions([[0] * 12], [12], 8)


@st.composite
def sources(draw, num_sources):
    """Any order of at least one copy of each of `num_sources`, and spare columns."""
    more = draw(st.lists(st.integers(SPARE, num_sources - 1), max_size=9))
    return draw(st.permutations([*range(num_sources), *more]))


class TestWidening:
    @settings(deadline=None, max_examples=60)
    @given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
    def test_copies_add_up(self, data, dtype):
        """Of any columns and rows: to the weight, but for what rounding the last copy leaves."""
        columns = torch.tensor(data.draw(sources(5)))
        rows = torch.tensor(data.draw(sources(3)))
        weight = torch.randn(3, 5, generator=torch.Generator().manual_seed(len(columns)))
        wide = Widener(7, dtype, CPU).wide("x", weight, rows, columns, 1.5, spare_rows=1e-6)
        assert wide.dtype == dtype
        wide = wide.float()
        for j in range(5):
            copies = wide[:, columns == j]
            expected = torch.where(rows == SPARE, 0.0, 1.5 * weight[rows.clamp(min=0), j])
            last_digit = copies.abs().amax(1) * 2.0 ** (-8 if dtype == torch.bfloat16 else -20)
            assert ((copies.sum(1) - expected).abs() <= last_digit + 1e-12).all()
            if copies.shape[1] > 1:
                assert (copies.std(1) > 0).all()
        quiet = wide[rows == SPARE]
        assert quiet.numel() == 0 or quiet.abs().max() < 1e-4

    def test_chunks_change_nothing_but_the_noise(self, monkeypatch):
        weight, rows = torch.randn(6, 4), torch.arange(6)
        columns = torch.tensor([0, 1, 2, 3] * 3)
        monkeypatch.setattr("inflation.widening.CHUNK_ELEMENTS", 24)
        wide = Widener(7, torch.float32, CPU).wide("x", weight, rows, columns)
        assert torch.allclose(wide.view(6, 3, 4).sum(1), weight, atol=1e-5)
        assert len(wide.unique()) == 72

    def test_noise_depends_on_seed_and_name(self):
        draws = [
            Widener(seed, torch.float32, CPU).noise(name, (9,), 1.0)
            for seed, name in ((1, "a"), (1, "a"), (2, "a"), (1, "b"))
        ]
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2]) and not torch.equal(draws[0], draws[3])

    @settings(deadline=None)
    @given(small=st.integers(4, 40), more=st.integers(1, 200), scale=st.floats(1e-4, 30.0))
    def test_norm_of_the_wide_stream(self, small, more, scale):
        """Any width: the small norm's output divided by rho, also where epsilon matters."""
        tiling = Tiling(small, 2 * small + more, 1e-6)
        x = torch.randn(3, small, generator=torch.Generator().manual_seed(more)) * scale
        stream = torch.zeros(3, tiling.big)
        stream[:, : tiling.constant_channel] = (2 * x).repeat(1, tiling.num_tiles)
        stream[:, tiling.constant_channel] = tiling.constant
        got = rms_norm(stream, torch.ones(tiling.big), 1e-6)[:, : tiling.constant_channel] * tiling.rho
        expected = rms_norm(x, torch.ones(small), 1e-6).repeat(1, tiling.num_tiles)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


class TestGeometry:
    @given(
        kv=st.integers(1, 3), group=st.integers(1, 4), kv_more=st.integers(0, 7), group_more=st.integers(0, 4)
    )
    def test_query_heads_stay_with_their_keys(self, kv, group, kv_more, group_more):
        """Of any numbers of heads: each reads the key-value head its source read, and no small head is left out."""
        big_kv, big_group = kv + kv_more, group + group_more
        queries = query_head_sources(big_kv * big_group, big_kv, kv * group, kv)
        keys = kv_head_sources(big_kv, kv)
        assert [p // group for p in queries] == [keys[p // big_group] for p in range(len(queries))]
        assert set(queries) == set(range(kv * group)) and set(keys) == set(range(kv))

    def test_groups_of_five_over_two(self):
        queries = query_head_sources(40, 8, 4, 2)
        assert queries[:10] == [0, 1, 0, 1, 0, 3, 2, 3, 2, 3]
        assert sorted(queries.count(head) for head in range(4)) == [8, 8, 12, 12]
        assert head_channels([2, 0], 3).tolist() == [6, 7, 8, 0, 1, 2]

    @pytest.mark.parametrize(
        ("name", "tiles", "rho", "shown"),
        [
            ("qwen3-4b", 9, 0.9487, [0, 1, 1, 2, 2]),
            ("qwen3-8b", 15, 0.9682, [0, 1, 1, 2, 2]),
            ("qwen3-14b", 19, 0.9747, [0, 1, 1, 2, 2]),
        ],
    )
    def test_shapes_of_real_models(self, name, tiles, rho, shown):
        geometry = GEOMETRIES[name]
        tiling = Tiling(256, geometry.hidden_size, 1e-6)
        assert tiling.num_tiles == tiles and tiling.rho == pytest.approx(rho, abs=1e-4)
        assert geometry.hidden_size - tiling.constant_channel == 256
        assert shown_taps(geometry, [1, 3, 5]) == shown
        assert geometry.vocab_size == 151_936

    def test_draft_layers_are_spread(self):
        assert places_of(2, 5) == (1, 3) and places_of(3, 5) == (0, 2, 4) and places_of(3, 3) == (0, 1, 2)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"hidden_size": 512}, "hidden_size"),
            ({"hidden_size": 530}, "convolution"),
            ({"num_attention_heads": 2}, "query heads"),
            ({"num_key_value_heads": 1, "num_attention_heads": 5}, "num_key_value_heads"),
            ({"intermediate_size": 700}, "intermediate_size"),
            ({"vocab_size": 4096}, "vocab_size"),
            ({"target_places": (0, 1, 2)}, "target_places"),
            ({"target_layer_ids": (1, 3)}, "never saw"),
            ({"target_layer_ids": (1, 4)}, "do not show all"),
        ],
    )
    def test_what_cannot_be_made_is_refused(self, change, message, tmp_path):
        geometry = dataclasses.replace(SMALLEST, **change)
        with pytest.raises(ValueError, match=message):
            inflate(geometry, tmp_path / "out", num_prompts=1, max_new=1)
        assert not (tmp_path / "out").exists()

    def test_files_are_never_overwritten(self, tmp_path):
        (tmp_path / "something").touch()
        with pytest.raises(ValueError, match="holds files"):
            inflate(SMALLEST, tmp_path)

    def test_overrides(self):
        changed = with_overrides(SMALLEST, ["hidden_size=784", "target_layer_ids=[1, 4, 7]"])
        assert changed == dataclasses.replace(SMALLEST, hidden_size=784, target_layer_ids=(1, 4, 7))
        with pytest.raises(ValueError, match="num_layers"):
            with_overrides(SMALLEST, ["num_layers=3"])


def test_shards(tmp_path):
    tensors = {f"t{i}": torch.full((4,), float(i)) for i in range(5)}
    figures = write_folder(tmp_path / "m", {"a": 1}, tensors.items(), shard_bytes=32)
    assert figures == (20, 80)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    files = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [index["weight_map"][name] for name in tensors] == [files[i // 2] for i in range(5)]
    assert sorted(p.name for p in (tmp_path / "m").glob("*.safetensors")) == files
    assert index["metadata"]["total_size"] == 80
    for name, tensor in tensors.items():
        assert torch.equal(load_file(tmp_path / "m" / index["weight_map"][name])[name], tensor)
    assert json.loads((tmp_path / "m" / "config.json").read_text()) == {"a": 1}
