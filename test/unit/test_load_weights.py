"""Model folders, whole and broken: shards, prefixes, aliases, dtypes, and errors that name every tensor at once."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from flashspark.attention.registry import make_backend
from flashspark.engine.loader import load_draft, load_target, resolve_dtype
from flashspark.kernels import half_linear
from flashspark.models.config_file import ModelFormatError
from flashspark.models.dflash import DFlashDraft
from flashspark.models.dflash2 import DFlash2Draft
from paged import Pages
from tiny_models import VOCAB_SIZE, write_dflash, write_dflash2, write_model, write_target


@pytest.fixture
def folder(tmp_path):
    return write_target(tmp_path / "target", tokenizer=False)


def logits_of(model, ids):
    pages = Pages(1, len(ids))
    pool = model.make_kv_pool(pages.num_slots)
    hidden = model.forward(ids, pages.ragged([(0, 0, len(ids))]), pool, make_backend("torch_native"))
    return model.logits(hidden.final)


IDS = torch.randint(0, VOCAB_SIZE, (12,), generator=torch.Generator().manual_seed(1))


def rewrite(folder, edit, num_shards=1):
    """Applies `edit` to the tensors of `folder` and writes them back."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    edit(tensors)
    write_model(folder, json.loads((folder / "config.json").read_text()), tensors, num_shards)


def test_shards_equal_one_file(folder):
    expected = logits_of(load_target(folder), IDS)
    rewrite(folder, lambda tensors: None, num_shards=3)
    assert len(list(folder.glob("*.safetensors"))) == 3
    assert torch.equal(logits_of(load_target(folder), IDS), expected)


def test_prefix_and_head_do_not_matter(folder):
    expected = logits_of(load_target(folder), IDS)

    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    rewrite(folder, strip)
    assert torch.equal(logits_of(load_target(folder), IDS), expected)


def test_tied_target_ignores_a_head_in_the_file(tmp_path):
    folder = write_target(tmp_path / "tied", tokenizer=False, tie_word_embeddings=True)
    expected = logits_of(load_target(folder), IDS)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.randn(VOCAB_SIZE, 48)}))
    assert torch.equal(logits_of(load_target(folder), IDS), expected)


def test_progress_counts_every_tensor(folder):
    seen = []
    load_target(folder, on_progress=lambda done, total: seen.append((done, total)))
    count = len(load_file(folder / "model.safetensors"))
    assert seen == [(i + 1, count) for i in range(count)]


def test_all_misfits_are_named_at_once(folder):
    def damage(tensors):
        del tensors["model.layers.2.mlp.up_proj.weight"], tensors["lm_head.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(80, 48)
        tensors["model.norm.weight"] = torch.zeros(47)
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(48, 32)

    rewrite(folder, damage)
    with pytest.raises(ModelFormatError) as error:
        load_target(folder)
    message = str(error.value)
    for part in (
        str(folder),
        "missing: layers.2.mlp.up_proj.weight [80, 48], lm_head.weight [260, 48]",
        "unexpected: model.layers.7.mlp.up_proj.weight [80, 48]",
        "norm.weight is [47], expected [48]",
        "layers.0.self_attn.k_proj.weight is [48, 32], expected [32, 48]",
    ):
        assert part in message


def test_half_written_file(folder):
    file = folder / "model.safetensors"
    for keep in (0, 5, 400, file.stat().st_size - 7):
        file.write_bytes(file.read_bytes()[:keep] if keep else b"")
        with pytest.raises(ModelFormatError, match="not a complete safetensors file"):
            load_target(folder)
        write_target(folder, tokenizer=False)


def test_integer_tensors_are_refused(folder):
    rewrite(folder, lambda tensors: None)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(48, dtype=torch.int8)
    save_file(tensors, file)
    with pytest.raises(ModelFormatError, match=r"norm\.weight is torch\.int8"):
        load_target(folder)


def test_only_safetensors_are_loaded(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFormatError, match="no weights"):
        load_target(folder)
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(ModelFormatError, match=r"only safetensors.*pytorch_model\.bin.*convert"):
        load_target(folder)


def test_broken_index_and_missing_shard(folder):
    rewrite(folder, lambda tensors: None, num_shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelFormatError, match=r"model-00002-of-00002\.safetensors"):
        load_target(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ')
    with pytest.raises(ModelFormatError, match="not a valid index"):
        load_target(folder)


def test_a_tensor_under_two_names(folder):
    rewrite(folder, lambda tensors: tensors.update({"norm.weight": torch.ones(48)}))
    with pytest.raises(ModelFormatError, match=r"norm\.weight is there twice"):
        load_target(folder)


def test_dummy_weights_need_only_the_config_and_repeat(folder):
    (folder / "model.safetensors").unlink()
    first, second, other = (
        logits_of(load_target(folder, load_format="dummy", seed=seed), IDS) for seed in (3, 3, 4)
    )
    assert torch.equal(first, second)
    assert not torch.allclose(first, other)
    assert first.std() > 0.1


def test_drafts_of_both_families(folder, tmp_path):
    target = load_target(folder)
    v1 = load_draft(write_dflash(tmp_path / "v1", folder), target)
    v2 = load_draft(write_dflash2(tmp_path / "v2", folder), target, block_size=4)
    assert type(v1) is DFlashDraft
    assert isinstance(v2, DFlash2Draft)
    assert (v1.config.block_size, v2.config.block_size) == (6, 4)
    dummy = load_draft(tmp_path / "v2", target, load_format="dummy")
    assert dummy.selector.successor_codebook.std() > 0.1


def test_draft_names_of_other_tools(folder, tmp_path):
    target = load_target(folder)
    draft_folder = write_dflash2(tmp_path / "draft", folder)
    original = load_draft(draft_folder, target)

    def rename(tensors):
        tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
        tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
        for name in ("predecessor_codebook", "successor_codebook"):
            tensors[f"candidate_selector.{name}.weight"] = tensors.pop(f"candidate_selector.{name}")
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)
        tensors["model.embed_tokens.weight"] = torch.zeros(3, 3)  # a copy of the target's: not looked at
        tensors["lm_head.weight"] = torch.zeros(3, 3)
        tensors["rotary_emb.inv_freq"] = torch.zeros(4)

    rewrite(draft_folder, rename)
    renamed = load_draft(draft_folder, target)
    features, positions = torch.randn(5, 2 * 48), torch.arange(5)
    pools = [draft.make_kv_pool(8) for draft in (original, renamed)]
    for draft, pool in zip((original, renamed), pools, strict=True):
        draft.inject(features, positions, positions, pool)
    assert torch.equal(pools[0].k[1], pools[1].k[1])
    assert torch.equal(original.selector.successor_codebook, renamed.selector.successor_codebook)


def test_draft_of_another_target(folder, tmp_path):
    other = write_target(
        tmp_path / "other", tokenizer=False, hidden_size=64, num_hidden_layers=2, vocab_size=300
    )
    draft_folder = write_dflash(tmp_path / "draft", folder)
    with pytest.raises(ModelFormatError) as error:
        load_draft(draft_folder, load_target(other))
    for part in (str(draft_folder), "hidden_size 48", "vocab_size 260", "[2]"):
        assert part in str(error.value)


def test_fusion_of_another_width(folder, tmp_path):
    draft_folder = write_dflash(tmp_path / "draft", folder)
    rewrite(draft_folder, lambda tensors: tensors.update({"fc.weight": torch.zeros(48, 144)}))
    with pytest.raises(ModelFormatError, match=r"fc\.weight is \[48, 144\], expected \[48, 96\]"):
        load_draft(draft_folder, load_target(folder))


def test_own_mask_embedding_is_refused(folder, tmp_path):
    draft_folder = write_dflash(tmp_path / "draft", folder)
    (draft_folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ModelFormatError, match="mask_embedding"):
        load_draft(draft_folder, load_target(folder))


def test_dtype_names(folder):
    assert load_target(folder).dtype == torch.float32
    assert load_target(folder, "bfloat16").dtype == torch.bfloat16
    assert resolve_dtype("auto", "bfloat16", "cpu") == torch.float32
    assert resolve_dtype("auto", "bfloat16", "cuda") == torch.bfloat16
    assert resolve_dtype("auto", "float32", "cuda:1") == torch.float32
    assert resolve_dtype("half", None, "cpu") == torch.float16
    with pytest.raises(ValueError, match=r"--dtype 'int4'.*bfloat16"):
        resolve_dtype("int4", None, "cpu")


@pytest.mark.parametrize("tied", [False, True])
def test_weights_held_in_half_precision_equal_transformers_in_float32(tmp_path, tied, caplog):
    """A bfloat16 file computed in float32: on x86 its larger weights stay in half precision, and no logit shows it."""
    folder = write_target(
        tmp_path / "bf16",
        tokenizer=False,
        tie_word_embeddings=tied,
        torch_dtype="bfloat16",
        hidden_size=320,
        intermediate_size=512,
        vocab_size=1000,
        num_hidden_layers=3,
    )
    with caplog.at_level(logging.WARNING):
        ours = load_target(folder)
    assert caplog.text == ""
    if half_linear.is_available():
        assert ours.layers[0].mlp.gate_up.weight is None
    theirs = Qwen3ForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    ids = torch.randint(0, 1000, (30,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = theirs(ids.unsqueeze(0)).logits[0]
    torch.testing.assert_close(logits_of(ours, ids), expected, atol=1e-4, rtol=0)
    # The same file as float32 on disk takes the other path.
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    plain = load_target(folder)
    assert plain.layers[0].mlp.gate_up.weight is not None
    torch.testing.assert_close(logits_of(plain, ids), expected, atol=1e-4, rtol=0)
