"""What the models are: targets and drafts as read from config.json, normalised, validated and refused here."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashspark.layers.rotary import RopeConfig
from flashspark.models.config_file import (
    ConfigReader,
    ModelFormatError,
    architecture,
    read_config,
    rope_config,
)

logger = logging.getLogger(__name__)

TARGET_ARCHITECTURES = ("Qwen3ForCausalLM",)
DRAFT_FAMILIES = {
    "DFlashDraftModel": "dflash",
    "MuseGlimmerAssistantModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "MiniMaxDFlash2DraftModel": "dflash2",
    "DFlash2BeamDraftModel": "dflash2",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
}
ALGORITHMS = {
    "dflash": "DFLASH",
    "dflash2": "DFLASH",
    "dspark": "DSPARK",
}  # --speculative-algorithm by family
DEFAULT_BLOCK_SIZES = {"dflash": 16, "dflash2": 16, "dspark": 7}
MARKOV_HEADS = ("vanilla", "gated", "rnn")

# Drafts of the same families in a form that is not implemented: their layers or weights differ.
_OTHER_DRAFTS = {
    "Gemma4DSparkModel": "Gemma 4 layers (four norms, scaled embeddings)",
    "LingDSparkModel": "Ling layers",
    "K3DSparkModel": "Kimi K3 layers",
    "DSparkMiniMaxDraftModel": "MiniMax layers",
    "DeepseekV4DSparkModel": "DeepSeek V4's mixture-of-experts layers",
    "DeepseekV4ForCausalLM": "DeepSeek V4's draft, bundled with its target",
}

# Keys that change nothing here: training, generation, library bookkeeping. Everything else unread is logged.
_IGNORED = (
    *("_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id", "dflash_config"),
    *("dspark_config", "dtype", "eos_token_id", "initializer_range", "max_window_layers", "model_type"),
    *("num_anchors", "num_target_layers", "pad_token_id", "tie_word_embeddings", "torch_dtype"),
    *("transformers_version", "use_cache", "vocab_size", "pretraining_tp", "rope_theta", "rope_scaling"),
    *("sliding_window", "use_sliding_window"),
)


@dataclass(frozen=True)
class TargetConfig:
    """A dense Qwen3 target. `head_dim` is its own number, not hidden / heads."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    torch_dtype: str | None
    rope: RopeConfig

    @classmethod
    def load(cls, folder: Path, overrides: Mapping[str, Any] | None = None) -> TargetConfig:
        """Reads `folder`/config.json, keys of `overrides` replaced.

        ModelFormatError where it is broken or asks for what is not implemented.
        """
        path, values = read_config(folder)
        values |= overrides or {}
        name = architecture(path, values)
        if name in DRAFT_FAMILIES:
            raise ModelFormatError(
                f"{path}: architectures: {name} is a draft model; give it to --speculative-draft-model-path "
                "and its target to --model-path"
            )
        if name not in TARGET_ARCHITECTURES:
            supported = ", ".join(TARGET_ARCHITECTURES)
            raise ModelFormatError(f"{path}: architectures: {name} is not supported; supported: {supported}")
        _warn_remote_code(path, values)
        reader = ConfigReader(path, values)
        if reader.get("model_type", "qwen3") != "qwen3":
            raise reader.error("model_type", f"{values['model_type']!r} is not supported; qwen3 is")
        num_layers = reader.integer("num_hidden_layers")
        sliding = [kind for kind in _layer_types(reader, num_layers) if kind != "full_attention"]
        if sliding or reader.boolean("use_sliding_window", False):
            key = "layer_types" if sliding else "use_sliding_window"
            raise reader.error(key, "sliding attention is not supported in targets, only full_attention")
        config = cls(
            architecture=name,
            num_hidden_layers=num_layers,
            vocab_size=reader.integer("vocab_size"),
            tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
            torch_dtype=reader.get("dtype", reader.get("torch_dtype")),
            **_backbone(reader),
        )
        _log_unknown(reader)
        return config


@dataclass(frozen=True)
class DraftConfig:
    """A draft after normalisation. Three numbers are easily mixed up and stay apart:

    `draft_rows` B, the rows one draft forward runs (anchor and B - 1 masks); `gamma`, the tokens it proposes,
    which come from the last `gamma` rows; `verify_width` W = gamma + 1, the rows the target then verifies.

    `block_size` is what the family's files call so: B of DFlash, whose row 0 predicts nothing; gamma of DSpark,
    whose row 0 predicts the token after the anchor, or (not `sample_from_anchor`) is one row more and nothing.
    """

    architecture: str
    family: str  # dflash, dflash2, dspark
    vocab_size: int | None
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    attention_bias: bool
    rope: RopeConfig
    block_size: int
    trained_block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    layer_causal: tuple[bool, ...]
    layer_windows: tuple[int | None, ...]
    attention_value_scale: float
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    sample_from_anchor: bool = False
    markov_rank: int = 0  # 0: no Markov head
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False

    @property
    def algorithm(self) -> str:
        """The --speculative-algorithm that runs this family."""
        return ALGORITHMS[self.family]

    @property
    def gamma(self) -> int:
        return self.block_size if self.family == "dspark" else self.block_size - 1

    @property
    def draft_rows(self) -> int:
        return self.gamma if self.sample_from_anchor else self.gamma + 1

    @property
    def verify_width(self) -> int:
        return self.gamma + 1

    @classmethod
    def load(cls, folder: Path, block_size: int | None = None) -> DraftConfig:
        """Reads `folder`/config.json; `block_size` overrides the trained one (counted as there) and may not
        exceed it."""
        path, values = read_config(folder)
        name = architecture(path, values)
        family = DRAFT_FAMILIES.get(name)
        if family is None:
            hint = "it is a target: --model-path takes it; " if name in TARGET_ARCHITECTURES else ""
            if name in _OTHER_DRAFTS:
                hint = f"it has {_OTHER_DRAFTS[name]}; "
            supported = ", ".join(sorted(DRAFT_FAMILIES))
            raise ModelFormatError(
                f"{path}: architectures: {name} is not a supported draft; {hint}supported: {supported}"
            )
        reader = _merged(path, values)
        if reader.get("projector_type") in ("dspark", "domino"):
            family = str(reader.get("projector_type"))
        if family not in ALGORITHMS:
            raise ModelFormatError(
                f"{path}: projector_type: a {family} draft ({name}) is not supported; "
                "use a DFlash, DFlash2 or DSpark draft"
            )
        _warn_remote_code(path, values)
        config = _read_draft(cls, reader, name, family)
        return config if block_size is None else config.with_block_size(block_size, path)

    def with_block_size(self, block_size: int, path: Path | None = None) -> DraftConfig:
        """The same draft run in smaller blocks, `block_size` counted as in the family's files."""
        smallest = 1 if self.family == "dspark" else 2
        if not smallest <= block_size <= self.trained_block_size:
            flag = f"--speculative-num-draft-tokens {block_size}"
            if self.family == "dspark":
                rows = f"--speculative-num-draft-tokens {block_size + 1}"
                flag = f"--speculative-dspark-block-size {block_size} ({rows})"
            raise ModelFormatError(
                f"{flag}: this draft{f' ({path})' if path else ''} was trained "
                f"for blocks of {self.trained_block_size}; choose {smallest} to {self.trained_block_size}"
            )
        return replace(self, block_size=block_size)


def check_draft_fits(draft: DraftConfig, target: TargetConfig) -> None:
    """ModelFormatError listing every way in which the draft cannot belong to the target."""
    problems = []
    if draft.hidden_size != target.hidden_size:
        problems.append(f"hidden_size {draft.hidden_size}, the target's is {target.hidden_size}")
    if draft.vocab_size is not None and draft.vocab_size != target.vocab_size:
        problems.append(f"vocab_size {draft.vocab_size}, the target's is {target.vocab_size}")
    if draft.mask_token_id >= target.vocab_size:
        problems.append(
            f"mask_token_id {draft.mask_token_id} is outside of the target's vocabulary of {target.vocab_size}"
        )
    outside = [layer for layer in draft.target_layer_ids if not 0 <= layer < target.num_hidden_layers]
    if outside:
        problems.append(
            f"target_layer_ids {outside} are not layers of the target, which has {target.num_hidden_layers}"
        )
    if draft.selector_top_k > target.vocab_size:
        problems.append(
            f"selector_top_k {draft.selector_top_k} exceeds the vocabulary of {target.vocab_size}"
        )
    if problems:
        raise ModelFormatError(f"the draft does not fit the target: {'; '.join(problems)}")


def _backbone(reader: ConfigReader) -> dict[str, Any]:
    """The keys that targets and drafts share."""
    if reader.get("quantization_config"):
        raise reader.error(
            "quantization_config", "quantised weights are not supported; use the unquantised model"
        )
    if reader.get("hidden_act", "silu") != "silu":
        raise reader.error("hidden_act", f"{reader.get('hidden_act')!r} is not supported; silu is")
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    kv_heads = reader.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise reader.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    head_dim = reader.integer("head_dim", hidden // heads)
    if head_dim % 2:
        raise reader.error("head_dim", f"{head_dim} is odd; rope turns features in pairs")
    max_positions = reader.integer("max_position_embeddings")
    return {
        "hidden_size": hidden,
        "intermediate_size": reader.integer("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": reader.number("rms_norm_eps", 1e-6),
        "max_position_embeddings": max_positions,
        "attention_bias": reader.boolean("attention_bias", False),
        "rope": rope_config(reader, max_positions),
    }


def _merged(path: Path, values: dict[str, Any]) -> ConfigReader:
    """Top level, then `dflash_config`, then `dspark_config`, later ones win."""
    merged = dict(values)
    for key in ("dflash_config", "dspark_config"):
        nested = values.get(key) or {}
        if not isinstance(nested, dict):
            raise ModelFormatError(f"{path}: {key}: {nested!r} is not an object")
        merged.update({name: value for name, value in nested.items() if value is not None})
    return ConfigReader(path, merged)


def _read_draft(cls: type[DraftConfig], reader: ConfigReader, name: str, family: str) -> DraftConfig:
    _refuse_unsupported(reader)
    num_layers = reader.integer("num_hidden_layers")
    smallest = 1 if family == "dspark" else 2
    block_size = reader.integer("block_size", DEFAULT_BLOCK_SIZES[family], minimum=smallest)
    mask_token_id = reader.integer("mask_token_id", minimum=0)
    causal, windows = _visibility(reader, num_layers)
    softcap = reader.number("final_logit_softcapping", 0.0, positive=False)
    config = cls(
        architecture=name,
        family=family,
        vocab_size=reader.integer("vocab_size") if reader.get("vocab_size") is not None else None,
        num_hidden_layers=num_layers,
        block_size=block_size,
        trained_block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=_target_layer_ids(reader, num_layers, derive=family != "dspark"),
        layer_causal=causal,
        layer_windows=windows,
        attention_value_scale=reader.number("attention_value_scale", 1.0),
        input_embedding_scale=reader.number("input_embedding_scale", 1.0),
        output_multiplier=reader.number("output_multiplier", 1.0),
        final_logit_softcapping=softcap if softcap > 0 else None,
        **_backbone(reader),
        **(_dflash2(reader) if family == "dflash2" else {}),
        **(_dspark(reader) if family == "dspark" else {}),
    )
    _log_unknown(reader)
    return config


def _dflash2(reader: ConfigReader) -> dict[str, Any]:
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    sizes = {name: reader.integer(name) for name in names}
    if reader.integer("hidden_size") % sizes["conv_group_size"]:
        problem = f"{sizes['conv_group_size']} does not divide hidden_size {reader.get('hidden_size')}"
        raise reader.error("conv_group_size", problem)
    return sizes


def _dspark(reader: ConfigReader) -> dict[str, Any]:
    """Row layout and heads. A rank of 0 is a draft without a Markov head in the same row layout."""
    rank = reader.integer("markov_rank", 256, minimum=0)
    kind = reader.get("markov_head_type", "vanilla")
    if kind not in MARKOV_HEADS:
        raise reader.error("markov_head_type", f"{kind!r} is not supported; {', '.join(MARKOV_HEADS)} are")
    enabled = reader.boolean("enable_confidence_head", False)
    with_markov = reader.boolean("confidence_head_with_markov", enabled and rank > 0)
    if enabled and with_markov and rank == 0:
        raise reader.error("confidence_head_with_markov", "true needs a Markov head, and markov_rank is 0")
    return {
        "sample_from_anchor": reader.boolean("sample_from_anchor", True),
        "markov_rank": rank,
        "markov_head_type": kind,
        "enable_confidence_head": enabled,
        "confidence_head_with_markov": enabled and with_markov,
    }


def _refuse_unsupported(reader: ConfigReader) -> None:
    """Keys that would change the result and are not implemented, unless they hold their neutral value."""
    for key in ("attention_sink_bias", "use_gemma_norm", "use_swa"):
        if reader.get(key, False):
            raise reader.error(key, f"{reader.get(key)!r} is not supported in drafts")
    for key in ("draft_vocab_size", "transformer_layer_config", "aux_hidden_state_layer_ids"):
        if reader.get(key) is not None:
            raise reader.error(key, f"{reader.get(key)!r} is not supported in drafts")
    reader.known.add("swa_window_size")  # means nothing without use_swa


def _target_layer_ids(reader: ConfigReader, num_layers: int, derive: bool) -> tuple[int, ...]:
    """The ids, or (`derive`) the default of older files: evenly from layer 1 to the third last."""
    ids = reader.integers("target_layer_ids")
    num_target = reader.get("num_target_layers")
    if ids is None and not derive:
        raise reader.error("target_layer_ids", "missing; expected a list of layers of the target")
    if ids is None:
        if num_target is None:
            raise reader.error("target_layer_ids", "missing, and no num_target_layers to derive them from")
        num_target = reader.integer("num_target_layers")
        if num_layers == 1:
            ids = (num_target // 2,)
        else:
            ids = tuple(round(1 + i * (num_target - 4) / (num_layers - 1)) for i in range(num_layers))
    if not ids:
        raise reader.error("target_layer_ids", "is empty; name at least one layer of the target")
    if any(b <= a for a, b in itertools.pairwise(ids)):
        raise reader.error("target_layer_ids", f"{list(ids)} is not strictly increasing; write it explicitly")
    return ids


def _layer_types(reader: ConfigReader, num_layers: int) -> tuple[str, ...]:
    types = reader.strings("layer_types") or ("full_attention",) * num_layers
    if len(types) != num_layers:
        raise reader.error("layer_types", f"has {len(types)} entries for {num_layers} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise reader.error(
                "layer_types", f"{kind!r} is not supported, only full_attention (drafts: sliding too)"
            )
    return types


def _visibility(reader: ConfigReader, num_layers: int) -> tuple[tuple[bool, ...], tuple[int | None, ...]]:
    """Causality and window of each layer.

    Causality: `dflash_config.causal`, else `is_causal`, else causal for sliding layers only.
    """
    types = _layer_types(reader, num_layers)
    sliding = [kind == "sliding_attention" for kind in types]
    window = reader.integer("sliding_window") if any(sliding) else None
    reader.known |= {"sliding_window", "use_sliding_window"}  # `layer_types` decides
    explicit = None
    for key in ("causal", "is_causal"):
        if explicit is None and reader.get(key) is not None:
            explicit = reader.boolean(key, False)
    causal = tuple(is_sliding if explicit is None else explicit for is_sliding in sliding)
    return causal, tuple(window if is_sliding else None for is_sliding in sliding)


def _warn_remote_code(path: Path, values: dict[str, Any]) -> None:
    if values.get("auto_map"):
        logger.warning("%s: auto_map is ignored; code from model folders is never executed", path)


def _log_unknown(reader: ConfigReader) -> None:
    unknown = reader.unknown(_IGNORED)
    if unknown:
        logger.warning("%s: unknown keys, ignored: %s", reader.path, ", ".join(unknown))
