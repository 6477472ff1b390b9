"""config.json of targets and drafts: what is read from where, what is refused, and in which words."""

import json
import logging

import pytest

from flashspark.models.config import DraftConfig, TargetConfig, check_draft_fits
from flashspark.models.config_file import ModelFormatError
from tiny_models import write_dflash, write_dflash2, write_dspark, write_target


def folder_with(tmp_path, **config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


TARGET = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
DRAFT = TARGET | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "num_target_layers": 9,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 4]},
}
DRAFT2 = DRAFT | {
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": DRAFT["dflash_config"]
    | {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4},
}
DSPARK = {key: value for key, value in DRAFT.items() if key != "dflash_config"} | {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "mask_token_id": 7,
    "target_layer_ids": [1, 4],
    "markov_rank": 8,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "num_anchors": 512,
}


def target(tmp_path, **config):
    return TargetConfig.load(folder_with(tmp_path, **(TARGET | config)))


def draft(tmp_path, base=DRAFT, block_size=None, sub=None, **config):
    merged = base | config
    if sub is not None:
        merged["dflash_config"] = merged["dflash_config"] | sub
    return DraftConfig.load(folder_with(tmp_path, **merged), block_size)


def test_target_defaults(tmp_path):
    config = target(tmp_path)
    assert (config.head_dim, config.tie_word_embeddings, config.attention_bias) == (16, False, False)
    assert (config.rope.theta, config.rope.rope_type, config.rms_norm_eps) == (10000.0, "default", 1e-6)
    assert target(tmp_path, head_dim=32).head_dim == 32


@pytest.mark.parametrize(
    ("config", "theta", "rope_type", "factor"),
    [
        ({"rope_theta": 5e6}, 5e6, "default", 1.0),
        ({"rope_theta": 1e6, "rope_scaling": None}, 1e6, "default", 1.0),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2}}, 1e6, "linear", 2.0),
        (
            {"rope_theta": 1, "rope_parameters": {"rope_theta": 9e5, "rope_type": "default"}},
            9e5,
            "default",
            1.0,
        ),
        (
            {
                "rope_theta": 3e5,
                "rope_scaling": {"rope_type": "linear", "factor": 2},
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
            },
            3e5,
            "yarn",
            4.0,
        ),
    ],
)
def test_nested_rope_wins_over_flat(tmp_path, config, theta, rope_type, factor):
    for rope in (target(tmp_path, **config).rope, draft(tmp_path, **config).rope):
        assert (rope.theta, rope.rope_type, rope.factor) == (theta, rope_type, factor)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, ["architectures", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": ["DFlashDraftModel"]}, ["draft", "--speculative-draft-model-path"]),
        ({"architectures": None}, ["architectures"]),
        ({"model_type": "qwen3_moe"}, ["model_type", "qwen3_moe"]),
        ({"vocab_size": None}, ["vocab_size", "missing"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "4"]),
        ({"head_dim": 15}, ["head_dim", "odd"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
        ({"layer_types": ["sliding_attention"] * 9}, ["layer_types", "sliding"]),
        ({"layer_types": ["full_attention"] * 8}, ["layer_types", "8", "9"]),
        ({"layer_types": ["linear_attention"] * 9}, ["layer_types", "linear_attention"]),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8}},
            ["rope_scaling.rope_type", "llama3", "yarn"],
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling.factor", "missing"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, ["partial_rotary_factor"]),
        ({"rope_scaling": [1]}, ["rope_scaling"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "yes"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
    ],
)
def test_target_refusals_name_file_key_and_value(tmp_path, config, words):
    with pytest.raises(ModelFormatError) as error:
        target(tmp_path, **config)
    for word in [str(tmp_path / "config.json"), *words]:
        assert word in str(error.value)


def test_folder_and_file_errors(tmp_path):
    with pytest.raises(ModelFormatError, match="no such folder"):
        TargetConfig.load(tmp_path / "nowhere")
    with pytest.raises(ModelFormatError, match=r"config\.json: missing"):
        TargetConfig.load(tmp_path)
    for text, word in [('{"a": 1', "not valid JSON"), ("[1]", "list"), ("", "not valid JSON")]:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelFormatError, match=word):
            TargetConfig.load(tmp_path)
    with pytest.raises(ModelFormatError, match="is a file"):
        TargetConfig.load(tmp_path / "config.json")


def test_remote_code_is_ignored_with_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        target(tmp_path, auto_map={"AutoModel": "evil.Model"})
        draft(tmp_path, auto_map={"AutoModel": "dflash.DFlashDraftModel"})
    assert caplog.text.count("auto_map is ignored") == 2


def test_unknown_keys_are_logged_and_known_ones_are_not(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        write_target(tmp_path / "t", tokenizer=False)
        TargetConfig.load(tmp_path / "t")
        DraftConfig.load(write_dflash(tmp_path / "d", tmp_path / "t"))
        DraftConfig.load(write_dflash2(tmp_path / "d2", tmp_path / "t"))
        DraftConfig.load(write_dspark(tmp_path / "ds", tmp_path / "t"))
        DraftConfig.load(write_dspark(tmp_path / "ds2", tmp_path / "t", nested=True))
        target(tmp_path)
        draft(tmp_path, base=DRAFT2)
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        draft(tmp_path, sub={"wobble": 3})
        target(tmp_path, frobnicate=1)
    assert "wobble" in caplog.text
    assert "frobnicate" in caplog.text


def test_draft_widths_are_three_numbers(tmp_path):
    config = draft(tmp_path)
    assert (config.family, config.block_size, config.gamma, config.verify_width) == ("dflash", 8, 7, 8)
    config = draft(tmp_path, block_size=5)
    assert (config.block_size, config.trained_block_size, config.gamma, config.verify_width) == (5, 8, 4, 5)
    assert draft(tmp_path, sub={"block_size": 4}).block_size == 4, "the nested value wins"
    for width in (1, 9, -1):
        with pytest.raises(ModelFormatError, match="trained for blocks of 8"):
            draft(tmp_path, block_size=width)
    bare = {key: value for key, value in DRAFT.items() if key != "block_size"}
    assert draft(tmp_path, base=bare).block_size == 16


def test_draft_keys_are_read_flat_and_nested(tmp_path):
    nested = draft(tmp_path, base=DRAFT2)
    flat = DRAFT2 | DRAFT2["dflash_config"]
    del flat["dflash_config"]
    assert draft(tmp_path, base=flat) == nested
    assert (nested.family, nested.selector_rank, nested.selector_top_k) == ("dflash2", 8, 4)
    assert (nested.conv_kernel_size, nested.conv_group_size) == (2, 16)
    assert draft(tmp_path, mask_token_id=9).mask_token_id == 7, "dflash_config wins over the top level"
    wins = draft(tmp_path, dspark_config={"mask_token_id": 11})
    assert wins.mask_token_id == 11, "dspark_config wins over dflash_config"


@pytest.mark.parametrize(
    ("config", "sub", "causal"),
    [
        ({}, {}, (False, False)),
        ({"is_causal": True}, {}, (True, True)),
        ({"is_causal": True}, {"causal": False}, (False, False)),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}, {}, (True, False)),
        (
            {
                "layer_types": ["sliding_attention", "sliding_attention"],
                "sliding_window": 8,
                "is_causal": False,
            },
            {},
            (False, False),
        ),
    ],
)
def test_causality_precedence(tmp_path, config, sub, causal):
    assert draft(tmp_path, sub=sub, **config).layer_causal == causal


def test_windows_belong_to_sliding_layers(tmp_path):
    kinds = ["sliding_attention", "full_attention"]
    assert draft(tmp_path, layer_types=kinds, sliding_window=8).layer_windows == (8, None)
    assert draft(tmp_path, sliding_window=8, use_sliding_window=True).layer_windows == (None, None)


@pytest.mark.parametrize(
    ("num_layers", "num_target", "expected"),
    [(1, 9, (4,)), (2, 9, (1, 6)), (5, 36, (1, 9, 17, 25, 33)), (8, 40, (1, 6, 11, 16, 22, 27, 32, 37))],
)
def test_default_target_layers(tmp_path, num_layers, num_target, expected):
    sub = {"target_layer_ids": None}
    config = draft(tmp_path, num_hidden_layers=num_layers, num_target_layers=num_target, sub=sub)
    assert config.target_layer_ids == expected


def test_output_scales(tmp_path):
    config = draft(tmp_path, sub={"output_multiplier": 0.25, "final_logit_softcapping": 20})
    assert (config.output_multiplier, config.final_logit_softcapping) == (0.25, 20.0)
    assert draft(tmp_path, sub={"final_logit_softcapping": 0}).final_logit_softcapping is None


@pytest.mark.parametrize(
    ("config", "sub", "words"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, {}, ["Qwen3ForCausalLM", "--model-path"]),
        ({"architectures": ["EagleModel"]}, {}, ["EagleModel", "DFlash2DraftModel"]),
        ({"architectures": ["Gemma4DSparkModel"]}, {}, ["Gemma4DSparkModel", "Gemma 4", "Qwen3DSparkModel"]),
        ({"architectures": ["K3DSparkModel"]}, {}, ["K3DSparkModel", "not a supported draft"]),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, {}, ["DeepseekV4ForCausalLM", "bundled"]),
        ({}, {"projector_type": "domino"}, ["projector_type", "domino"]),
        ({}, {"mask_token_id": None}, ["mask_token_id", "missing"]),
        ({}, {"mask_token_id": -1}, ["mask_token_id", "-1"]),
        ({"num_target_layers": None}, {"target_layer_ids": None}, ["target_layer_ids", "num_target_layers"]),
        (
            {"num_target_layers": 4, "num_hidden_layers": 3},
            {"target_layer_ids": None},
            ["strictly increasing"],
        ),
        ({}, {"target_layer_ids": [4, 1]}, ["target_layer_ids", "strictly increasing"]),
        ({}, {"target_layer_ids": []}, ["target_layer_ids", "empty"]),
        ({}, {"target_layer_ids": "1,4"}, ["target_layer_ids", "list"]),
        ({}, {"block_size": 1}, ["block_size", "1"]),
        ({}, {"attention_sink_bias": True}, ["attention_sink_bias"]),
        ({}, {"use_swa": True, "swa_window_size": 64}, ["use_swa"]),
        ({"use_gemma_norm": True}, {}, ["use_gemma_norm"]),
        ({"draft_vocab_size": 50}, {}, ["draft_vocab_size"]),
        ({"aux_hidden_state_layer_ids": [2, 5]}, {}, ["aux_hidden_state_layer_ids"]),
        ({"layer_types": ["sliding_attention", "full_attention"]}, {}, ["sliding_window", "missing"]),
        ({"dflash_config": [1]}, None, ["dflash_config"]),
        ({"is_causal": "no"}, {}, ["is_causal"]),
        ({}, {"output_multiplier": 0}, ["output_multiplier"]),
    ],
)
def test_draft_refusals_name_file_key_and_value(tmp_path, config, sub, words):
    with pytest.raises(ModelFormatError) as error:
        draft(tmp_path, sub=sub, **config)
    for word in [str(tmp_path / "config.json"), *words]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("sub", "words"),
    [
        ({"conv_group_size": 24}, ["conv_group_size", "24", "64"]),
        ({"selector_rank": None}, ["selector_rank", "missing"]),
        ({"conv_kernel_size": None}, ["conv_kernel_size", "missing"]),
        ({"selector_top_k": 0}, ["selector_top_k", "0"]),
    ],
)
def test_dflash2_refusals(tmp_path, sub, words):
    with pytest.raises(ModelFormatError) as error:
        draft(tmp_path, base=DRAFT2, sub=sub)
    for word in words:
        assert word in str(error.value)


def test_dspark_widths_and_rows(tmp_path):
    """gamma is what the file calls the block; where the anchor's row predicts nothing there is one row more."""
    config = draft(tmp_path, base=DSPARK)
    assert (config.family, config.algorithm) == ("dspark", "DSPARK")
    assert (config.block_size, config.draft_rows, config.gamma, config.verify_width) == (7, 7, 7, 8)
    config = draft(tmp_path, base=DSPARK, sample_from_anchor=False)
    assert (config.block_size, config.draft_rows, config.gamma, config.verify_width) == (7, 8, 7, 8)
    config = draft(tmp_path, base=DSPARK, block_size=1)
    assert (config.trained_block_size, config.draft_rows, config.gamma, config.verify_width) == (7, 1, 1, 2)
    for gamma in (0, 8):
        with pytest.raises(ModelFormatError, match=f"--speculative-dspark-block-size {gamma}.*blocks of 7"):
            draft(tmp_path, base=DSPARK, block_size=gamma)
    bare = {key: value for key, value in DSPARK.items() if key != "block_size"}
    assert draft(tmp_path, base=bare | {"num_target_layers": 9}).gamma == 7


def test_dspark_keys_are_read_flat_and_nested(tmp_path):
    flat = draft(tmp_path, base=DSPARK, markov_head_type="gated", markov_rank=4)
    assert (flat.markov_head_type, flat.markov_rank, flat.sample_from_anchor) == ("gated", 4, True)
    assert (flat.enable_confidence_head, flat.confidence_head_with_markov) == (True, True)
    names = ("block_size", "mask_token_id", "target_layer_ids", "enable_confidence_head")
    of_top = {key: value for key, value in DSPARK.items() if key not in names}
    nested = {name: DSPARK[name] for name in names} | {"markov_head_type": "gated", "markov_rank": 4}
    for place in ("dspark_config", "dflash_config"):
        drop = {"markov_rank": None, "confidence_head_with_markov": None}
        assert draft(tmp_path, base=of_top | drop, **{place: nested}) == flat
    dflash = nested | {"projector_type": "dspark"}
    renamed = draft(
        tmp_path, base=of_top, architectures=["DFlashDraftModel"], dflash_config=dflash, markov_rank=None
    )
    assert (renamed.family, renamed.gamma, renamed.draft_rows) == ("dspark", 7, 7)


def test_baseline_without_a_markov_head_has_dspark_rows(tmp_path):
    config = draft(tmp_path, base=DSPARK, markov_rank=0, enable_confidence_head=False)
    assert (config.markov_rank, config.draft_rows, config.gamma, config.verify_width) == (0, 7, 7, 8)
    assert not config.confidence_head_with_markov


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"markov_head_type": "lstm"}, ["markov_head_type", "lstm", "vanilla, gated, rnn"]),
        ({"markov_rank": -1}, ["markov_rank", "-1"]),
        ({"markov_rank": 0}, ["confidence_head_with_markov", "markov_rank is 0"]),
        ({"sample_from_anchor": "yes"}, ["sample_from_anchor"]),
        ({"target_layer_ids": None}, ["target_layer_ids", "missing"]),
        ({"mask_token_id": None}, ["mask_token_id", "missing"]),
        ({"block_size": 0}, ["block_size", "0"]),
        ({"draft_vocab_size": 50}, ["draft_vocab_size"]),
    ],
)
def test_dspark_refusals(tmp_path, config, words):
    given = dict(DSPARK)
    given.update(config)
    with pytest.raises(ModelFormatError) as error:
        draft(tmp_path, base=given)
    for word in [str(tmp_path / "config.json"), *words]:
        assert word in str(error.value)


def test_draft_that_fits_and_all_misfits_at_once(tmp_path):
    good = target(tmp_path)
    check_draft_fits(draft(tmp_path), good)
    check_draft_fits(draft(tmp_path, num_attention_heads=8, num_key_value_heads=1, vocab_size=None), good)
    other = draft(
        tmp_path,
        base=DRAFT2,
        hidden_size=128,
        vocab_size=200,
        sub={"mask_token_id": 150, "target_layer_ids": [1, 9, 30], "selector_top_k": 101},
    )
    with pytest.raises(ModelFormatError) as error:
        check_draft_fits(other, good)
    for word in ("hidden_size 128", "64", "vocab_size 200", "mask_token_id 150", "[9, 30]", "has 9", "101"):
        assert word in str(error.value)
