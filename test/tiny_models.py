"""Random tiny models and a tokenizer as Hugging Face folders, small enough to make afresh in every test.

    target = write_target(tmp_path / "target")
    draft = write_dflash2(tmp_path / "draft", target)

Every shape is an odd one on purpose (head_dim is not hidden/heads, the draft's heads differ from the
target's), so that a mixed-up dimension fails. Weights are scaled so that logits have a spread of a few units:
the best two of a row are closer than 1e-4 about once in ten thousand rows.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

ENDOFTEXT_ID, IM_START_ID, IM_END_ID, MASK_ID = 0, 1, 2, 3
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
VOCAB_SIZE = len(SPECIALS) + 256  # token id of byte b: see `write_tokenizer`

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_target(folder: Path, *, seed: int = 0, tokenizer: bool = True, **config: Any) -> Path:
    """A random Qwen3 target; returns `folder`. `config` overrides or adds config.json keys, None removes."""
    merged = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "bos_token_id": ENDOFTEXT_ID,
        "eos_token_id": IM_END_ID,
        "pad_token_id": ENDOFTEXT_ID,
        "torch_dtype": "float32",
    } | config
    merged = {key: value for key, value in merged.items() if value is not None or key not in config}
    shapes = {"model.embed_tokens.weight": (merged["vocab_size"], merged["hidden_size"])}
    shapes |= {f"model.{name}": shape for name, shape in _layer_shapes(merged).items()}
    shapes["model.norm.weight"] = (merged["hidden_size"],)
    if not merged["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (merged["vocab_size"], merged["hidden_size"])
    write_model(folder, merged, random_tensors(shapes, seed))
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_dflash(folder: Path, target: Path, *, seed: int = 1, **config: Any) -> Path:
    """A random DFlash v1 draft that fits the target in folder `target`. `config` as in `write_target`;
    a `dflash_config` in it is merged key by key."""
    write_model(folder, *_draft(target, seed, config))
    return folder


def write_dflash2(
    folder: Path, target: Path, *, seed: int = 1, identity: bool = False, **config: Any
) -> Path:
    """A random DFlash2 draft. `identity`: convolutions and selector that change nothing, over the very
    weights `write_dflash` draws from the same seed."""
    dflash2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 12, "selector_top_k": 5}
    config = {"architectures": ["DFlash2DraftModel"]} | config
    config["dflash_config"] = dflash2 | config.get("dflash_config", {})
    config_json, tensors = _draft(target, seed, config)
    if identity:
        for name, tensor in tensors.items():
            if "_conv." in name or name.endswith("successor_codebook"):
                tensor.zero_()
            if name.endswith("base_kernel"):
                tensor[:, 0] = 1
    write_model(folder, config_json, tensors)
    return folder


def write_dspark(
    folder: Path,
    target: Path,
    *,
    head: str = "vanilla",
    sample_from_anchor: bool = True,
    confidence: bool = True,
    nested: bool = False,
    copies: bool = False,
    seed: int = 1,
    **config: Any,
) -> Path:
    """A random DSpark draft. `head` is a kind of Markov head, or "none" for rank 0; gamma is 5.

    `nested` writes the family's keys into `dspark_config` instead of the top level. `copies` adds an embedding and a
    head of the draft's own, as published files have them, of values that must never be used. The backbone has the
    weights that `write_dflash` draws from the same seed.
    """
    keys: dict[str, Any] = {
        "block_size": 5,
        "mask_token_id": MASK_ID,
        "target_layer_ids": [0, 2],
        "markov_rank": 0 if head == "none" else 12,
        "markov_head_type": "vanilla" if head == "none" else head,
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": confidence and head != "none",
        "sample_from_anchor": sample_from_anchor,
    }
    keys |= {key: config.pop(key) for key in list(config) if key in keys}
    merged, tensors = _draft(
        target, seed, {"architectures": ["Qwen3DSparkModel"], "dflash_config": keys} | config
    )
    keys = merged.pop("dflash_config")
    hidden, vocab_size = merged["hidden_size"], merged["vocab_size"]
    rank = keys.get("markov_rank", 256)
    shapes: dict[str, tuple[int, ...]] = {}
    if rank:
        shapes |= {"markov_w1.weight": (vocab_size, rank), "markov_w2.weight": (vocab_size, rank)}
        if head == "gated":
            shapes |= {"gate_proj.weight": (rank, hidden + rank), "gate_proj.bias": (rank,)}
        if head == "rnn":
            shapes |= {"joint_proj.weight": (3 * rank, 2 * rank + hidden), "joint_proj.bias": (3 * rank,)}
    shapes = {f"markov_head.{name}": shape for name, shape in shapes.items()}
    if confidence:
        size = hidden + (rank if keys.get("confidence_head_with_markov") else 0)
        shapes |= {"confidence_head.proj.weight": (1, size), "confidence_head.proj.bias": (1,)}
    if copies:
        shapes |= dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), (vocab_size, hidden))
    write_model(
        folder, merged | ({"dspark_config": keys} if nested else keys), tensors | random_tensors(shapes, seed)
    )
    return folder


def _draft(target: Path, seed: int, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of a draft's backbone, and of DFlash2's additions where the configuration has them."""
    of_target = json.loads((target / "config.json").read_text())
    sub: dict[str, Any] = {"block_size": 6, "mask_token_id": MASK_ID, "target_layer_ids": [0, 2]}
    merged = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": of_target["vocab_size"],
        "hidden_size": of_target["hidden_size"],
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_target_layers": of_target["num_hidden_layers"],
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": of_target["max_position_embeddings"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 20000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    } | config
    merged["dflash_config"] = sub | config.get("dflash_config", {})
    for level in (merged, merged["dflash_config"]):
        for key in [key for key, value in level.items() if value is None]:
            del level[key]
    sub = merged["dflash_config"]
    hidden, num_layers = merged["hidden_size"], merged["num_hidden_layers"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, len(sub["target_layer_ids"]) * hidden)}
    shapes |= _layer_shapes(merged) | {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    if "selector_rank" in sub:
        taps, groups = sub["conv_kernel_size"], hidden // sub["conv_group_size"]
        for i in range(num_layers):
            for conv in ("attention_conv", "mlp_conv"):
                shapes[f"layers.{i}.{conv}.base_kernel"] = (2, taps, hidden)
                shapes[f"layers.{i}.{conv}.kernel_projection.weight"] = (2 * taps * groups, hidden)
        rank = sub["selector_rank"]
        shapes["candidate_selector.predecessor_codebook"] = (merged["vocab_size"], rank)
        shapes["candidate_selector.successor_codebook"] = (merged["vocab_size"], rank)
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    return merged, random_tensors(shapes, seed)


def _layer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(config["num_hidden_layers"]):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.self_attn.q_proj.weight": (q_size, hidden),
            f"layers.{i}.self_attn.k_proj.weight": (kv_size, hidden),
            f"layers.{i}.self_attn.v_proj.weight": (kv_size, hidden),
            f"layers.{i}.self_attn.o_proj.weight": (hidden, q_size),
            f"layers.{i}.self_attn.q_norm.weight": (head_dim,),
            f"layers.{i}.self_attn.k_norm.weight": (head_dim,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
            f"layers.{i}.mlp.gate_proj.weight": (ffn, hidden),
            f"layers.{i}.mlp.up_proj.weight": (ffn, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, ffn),
        }
        if config.get("attention_bias"):
            sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size, "o_proj": hidden}
            shapes |= {f"layers.{i}.self_attn.{name}.bias": (size,) for name, size in sizes.items()}
    return shapes


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """One tensor per name, each from its own stream, so that adding a name leaves the others as they were."""
    tensors = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(seed * 1_000_003 + sum(map(ord, name)) * 7919 + len(name))
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1 + 0.2 * noise
        elif name.endswith("base_kernel"):
            tensors[name] = 0.3 * noise + torch.tensor([1.0, 0.3])[: shape[1]].view(1, -1, 1)
        elif name.endswith(("codebook", "markov_w1.weight")):
            tensors[name] = noise
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            tensors[name] = 0.5 * noise
        else:
            tensors[name] = noise * 1.2 / math.sqrt(shape[-1])
    return tensors


def write_model(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], num_shards: int = 1
) -> None:
    """config.json and safetensors; with `num_shards` > 1 as an indexed set of files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[
        config["torch_dtype"]
    ]
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[shard::num_shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer without merges: the specials have ids 0-3, then every byte is one token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(SPECIALS + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    generation = {"bos_token_id": ENDOFTEXT_ID, "eos_token_id": [IM_END_ID, ENDOFTEXT_ID], "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1))
    return folder
