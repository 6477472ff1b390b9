"""DFlash, DFlash2 and DSpark once more, in float64 from the tensors of the file: no caches, no pages, no fusion.

One request at a time: the features of the whole committed context in, the block's hidden states out.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


class DraftReference:
    def __init__(self, folder: Path) -> None:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.config = config | config.get("dflash_config", {}) | config.get("dspark_config", {})
        self.w = {name: t.double() for name, t in load_file(folder / "model.safetensors").items()}

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * weight

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        """`x` [n, heads, D], feature j paired with feature j + D / 2."""
        half = x.shape[-1] // 2
        out = torch.empty_like(x)
        for j in range(half):
            angle = positions.double() * self.config["rope_theta"] ** (-2 * j / x.shape[-1])
            cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
            out[..., j] = x[..., j] * cos - x[..., j + half] * sin
            out[..., j + half] = x[..., j + half] * cos + x[..., j] * sin
        return out

    def heads(self, x: Tensor, layer: int, name: str) -> Tensor:
        y = x @ self.w[f"layers.{layer}.self_attn.{name}_proj.weight"].T
        bias = self.w.get(f"layers.{layer}.self_attn.{name}_proj.bias")
        return (y if bias is None else y + bias).view(len(x), -1, self.config["head_dim"])

    def keys_values(self, x: Tensor, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        k = self.norm(self.heads(x, layer, "k"), self.w[f"layers.{layer}.self_attn.k_norm.weight"])
        v = self.heads(x, layer, "v") * self.config.get("attention_value_scale", 1.0)
        return self.rope(k, positions), v

    def context(self, features: Tensor) -> Tensor:
        return self.norm(features.double() @ self.w["fc.weight"].T, self.w["hidden_norm.weight"])

    def attention(self, x: Tensor, context: Tensor, layer: int) -> Tensor:
        n, width, head_dim = len(context), len(x), self.config["head_dim"]
        before, inside = torch.arange(n), torch.arange(n, n + width)
        k_ctx, v_ctx = self.keys_values(context, layer, before)
        k_blk, v_blk = self.keys_values(x, layer, inside)
        keys, values = torch.cat((k_ctx, k_blk)), torch.cat((v_ctx, v_blk))
        q = self.norm(self.heads(x, layer, "q"), self.w[f"layers.{layer}.self_attn.q_norm.weight"])
        q = self.rope(q, inside)
        kinds = self.config.get("layer_types") or ["full_attention"] * self.config["num_hidden_layers"]
        sliding = kinds[layer] == "sliding_attention"
        causal = self.config.get("causal", self.config.get("is_causal", sliding))
        group = q.shape[1] // keys.shape[1]
        out = torch.zeros_like(q)
        for row in range(width):
            visible = [
                key
                for key in range(n + width)
                if (not causal or key <= n + row)
                and (not sliding or n + row - key < self.config["sliding_window"])
            ]
            for head in range(q.shape[1]):
                k, v = keys[visible, head // group], values[visible, head // group]
                out[row, head] = torch.softmax(k @ q[row, head] / math.sqrt(head_dim), 0) @ v
        y = out.view(width, -1) @ self.w[f"layers.{layer}.self_attn.o_proj.weight"].T
        bias = self.w.get(f"layers.{layer}.self_attn.o_proj.bias")
        return y if bias is None else y + bias

    def mlp(self, x: Tensor, layer: int) -> Tensor:
        gate, up, down = (self.w[f"layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        a = x @ gate.T
        return (a / (1 + torch.exp(-a)) * (x @ up.T)) @ down.T

    def convolve(self, y: Tensor, x: Tensor, name: str, side: int) -> Tensor:
        """The convolution `name` of `y`, with the coefficients that the sublayer's input `x` asks for."""
        base = self.w[f"{name}.base_kernel"]
        taps, group = self.config["conv_kernel_size"], self.config["conv_group_size"]
        delta = (x @ self.w[f"{name}.kernel_projection.weight"].T).view(len(x), 2, taps, -1)
        out = torch.zeros_like(y)
        for t in range(len(y)):
            for tap in range(min(taps, t + 1)):
                coefficient = base[side, tap] + delta[t, side, tap].repeat_interleave(group)
                out[t] += coefficient * y[t - tap]
        return out

    def sublayer(self, h: Tensor, layer: int, kind: str, run: Any) -> Tensor:
        norm = {"attention": "input_layernorm", "mlp": "post_attention_layernorm"}[kind]
        x = self.norm(h, self.w[f"layers.{layer}.{norm}.weight"])
        name = f"layers.{layer}.{kind}_conv"
        if f"{name}.base_kernel" not in self.w:
            return h + run(x)
        return h + self.convolve(run(self.convolve(x, x, name, 0)), x, name, 1)

    def block(self, features: Tensor, embeddings: Tensor) -> Tensor:
        """`features` [n, m * H] of the committed tokens, `embeddings` [B, H] -> z [B, H] float64."""
        context = self.context(features)
        h = embeddings.double() * self.config.get("input_embedding_scale", 1.0)
        for layer in range(self.config["num_hidden_layers"]):
            h = self.sublayer(h, layer, "attention", lambda x, i=layer: self.attention(x, context, i))
            h = self.sublayer(h, layer, "mlp", lambda x, i=layer: self.mlp(x, i))
        return self.norm(h, self.w["norm.weight"])


class MarkovReference:
    """DSpark's heads, one slot of one request at a time: `w` as `markov_head.*` and `confidence_head.*` of a file."""

    def __init__(self, kind: str, w: dict[str, Tensor]) -> None:
        self.kind, self.w = kind, {name: t.double() for name, t in w.items()}
        self.state: Tensor | None = None

    def correction(self, previous: int, z: Tensor) -> Tensor:
        """What the token `previous` adds to the logits of the slot with hidden state `z` [H]: [V]."""
        w = {name.removeprefix("markov_head."): t for name, t in self.w.items()}
        e = w["markov_w1.weight"][previous]
        if self.kind == "gated":
            gate = w["gate_proj.weight"] @ torch.cat((z.double(), e)) + w["gate_proj.bias"]
            e = e / (1 + torch.exp(-gate))
        if self.kind == "rnn":
            state = torch.zeros_like(e) if self.state is None else self.state
            joint = w["joint_proj.weight"] @ torch.cat((state, e, z.double())) + w["joint_proj.bias"]
            forget, candidate, output = joint.view(3, -1)
            keep = 1 / (1 + torch.exp(-forget))
            self.state = keep * state + (1 - keep) * torch.tanh(candidate)
            e = torch.tanh(output)
        return w["markov_w2.weight"] @ e

    def walk(self, base: Tensor, z: Tensor, anchor: int, draw: Any) -> tuple[list[int], Tensor]:
        """One block: base logits [g, V] and z [g, H]; `draw(slot, corrected)` says which token is taken."""
        self.state, previous, tokens, rows = None, anchor, [], []
        for slot in range(len(base)):
            corrected = base[slot].double()
            if self.kind != "none":
                corrected = corrected + self.correction(previous, z[slot])
            previous = draw(slot, corrected)
            tokens.append(previous)
            rows.append(corrected)
        return tokens, torch.stack(rows)

    def confidence(self, z: Tensor, previous: int) -> Tensor:
        """Raw confidence of a slot, a scalar."""
        features, weight = z.double(), self.w["confidence_head.proj.weight"][0]
        if len(weight) > len(features):
            features = torch.cat((features, self.w["markov_head.markov_w1.weight"][previous]))
        return weight @ features + self.w["confidence_head.proj.bias"][0]
