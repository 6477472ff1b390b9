"""Shapes and schedules of the pair; `smoke()` shrinks them so that every stage runs on a CPU in minutes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from . import tokens


@dataclass(frozen=True)
class TargetShape:
    """A Qwen3 decoder with tied embeddings."""

    vocab_size: int = tokens.VOCAB_SIZE
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 7
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 128
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = tokens.MODEL_MAX_LENGTH

    def hf_config(self) -> dict[str, Any]:
        """config.json of the target."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": tokens.END_OF_TEXT,
            "eos_token_id": [tokens.IM_END, tokens.END_OF_TEXT],
            "pad_token_id": tokens.END_OF_TEXT,
            "torch_dtype": "bfloat16",
        }


@dataclass(frozen=True)
class BackboneShape:
    """What both kinds of draft share; `block_size` rows are run per block, the anchor and masks."""

    target: TargetShape = field(default_factory=TargetShape)
    target_layer_ids: tuple[int, ...] = (1, 3, 5)
    num_hidden_layers: int = 3
    intermediate_size: int = 768
    block_size: int = 8
    mask_token_id: int = tokens.MASK

    def backbone_config(self, architecture: str) -> dict[str, Any]:
        """The keys of config.json that do not depend on the draft's heads."""
        target = self.target
        return {
            "architectures": [architecture],
            "model_type": "qwen3",
            "vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": target.num_attention_heads,
            "num_key_value_heads": target.num_key_value_heads,
            "head_dim": target.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": target.rms_norm_eps,
            "rope_theta": target.rope_theta,
            "max_position_embeddings": target.max_position_embeddings,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "use_sliding_window": False,
            "num_target_layers": target.num_hidden_layers,
            "is_causal": False,
        }


@dataclass(frozen=True)
class DraftShape(BackboneShape):
    """A DFlash2 draft, row 0 of whose block drafts nothing; without convolution and selector a DFlash v1 draft."""

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 128
    selector_top_k: int = 16

    def hf_config(self) -> dict[str, Any]:
        """config.json of the draft."""
        special = {
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "conv_kernel_size": self.conv_kernel_size,
            "conv_group_size": self.conv_group_size,
            "selector_rank": self.selector_rank,
            "selector_top_k": self.selector_top_k,
            "output_multiplier": 1.0,
        }
        return {**self.backbone_config("DFlash2DraftModel"), "dflash_config": special}


@dataclass(frozen=True)
class DSparkShape(BackboneShape):
    """A DSpark draft: every row of the block drafts, row 0 (the anchor's) the token behind the anchor."""

    num_hidden_layers: int = 2
    block_size: int = 7
    markov_rank: int = 128

    def hf_config(self) -> dict[str, Any]:
        """config.json of the draft, in DeepSpec's flat layout."""
        return {
            **self.backbone_config("Qwen3DSparkModel"),
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "sample_from_anchor": True,
            "markov_rank": self.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }


@dataclass(frozen=True)
class TargetRecipe:
    """How the target is trained."""

    batch_size: int = 64
    sequence_length: int = 1024
    chat_share: float = 0.10
    document_start_share: float = 0.30
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    weight_decay: float = 0.02
    warmup: float = 0.01
    final_lr: float = 0.02


@dataclass(frozen=True)
class GenerationRecipe:
    """How the target writes the text that the draft learns from."""

    batch_size: int = 4096
    total_length: int = 512
    prompt_lengths: tuple[int, ...] = (32, 96, 192)
    temperature_shares: tuple[tuple[float, float], ...] = ((0.0, 0.36), (1.0, 0.36), (0.7, 0.28))
    chat_share: float = 0.25
    reserved_share: float = 0.45
    docstring_end_share: float = 0.4
    document_start_share: float = 0.3
    keep_looping: float = 0.1


@dataclass(frozen=True)
class DraftRecipe:
    """How the DFlash2 draft is trained."""

    batch_size: int = 64
    num_anchors: int = 64
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    weight_decay: float = 0.02
    warmup: float = 0.02
    final_lr: float = 0.02
    decay: float = 3.0
    unary_ce: float = 1.0
    unary_tv: float = 0.5
    selector_ce: float = 1.0
    selector_tv: float = 1.0


@dataclass(frozen=True)
class DSparkRecipe:
    """How the DSpark draft is trained."""

    batch_size: int = 64
    num_anchors: int = 64
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    weight_decay: float = 0.02
    warmup: float = 0.02
    final_lr: float = 0.02
    decay: float = 4.0
    ce: float = 0.3
    tv: float = 1.8
    confidence: float = 1.0


@dataclass(frozen=True)
class Settings:
    """Everything a run depends on, apart from its time budget."""

    target: TargetShape = field(default_factory=TargetShape)
    draft: DraftShape = field(default_factory=DraftShape)
    dspark: DSparkShape = field(default_factory=DSparkShape)
    target_recipe: TargetRecipe = field(default_factory=TargetRecipe)
    generation: GenerationRecipe = field(default_factory=GenerationRecipe)
    draft_recipe: DraftRecipe = field(default_factory=DraftRecipe)
    dspark_recipe: DSparkRecipe = field(default_factory=DSparkRecipe)
    compile: bool = True
    seed: int = 0


def smoke() -> Settings:
    """Same code paths, tiny shapes."""
    target = TargetShape(
        hidden_size=64, intermediate_size=128, num_hidden_layers=5, num_attention_heads=2, head_dim=32
    )
    target = replace(target, num_key_value_heads=1)
    draft = DraftShape(
        target, (1, 2, 3), num_hidden_layers=2, intermediate_size=128, selector_rank=16, selector_top_k=8
    )
    return Settings(
        target=target,
        draft=draft,
        dspark=DSparkShape(target, draft.target_layer_ids, intermediate_size=128, markov_rank=16),
        target_recipe=TargetRecipe(batch_size=8, sequence_length=128),
        generation=GenerationRecipe(batch_size=32, total_length=96, prompt_lengths=(16, 32)),
        draft_recipe=DraftRecipe(batch_size=8, num_anchors=8),
        dspark_recipe=DSparkRecipe(batch_size=8, num_anchors=8),
        compile=False,
    )
