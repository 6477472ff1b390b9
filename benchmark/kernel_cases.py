"""What `kernels.py` times: each kernel at the shapes of one decode step, with the bytes and FLOPs it cannot do without.

Bytes count every input that has to be read and every output that has to be written once; where a kernel reads only a
part (the row of p that a request's draw comes from), that part.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashspark.attention.interface import AttentionBackend, RaggedQueries
from flashspark.attention.registry import make_backend
from flashspark.kernels import estimator
from flashspark.kernels.accept import accept_greedy, accept_sampled
from flashspark.kernels.accept_step import accept_step
from flashspark.kernels.allocate import allocate
from flashspark.kernels.block_conv import dynamic_block_conv
from flashspark.kernels.markov_walk import MarkovWeights, markov_walk
from flashspark.kernels.pack_rows import pack_rows
from flashspark.kernels.qk_norm_rope import HeadTurn, qk_norm_rope_write
from flashspark.kernels.rms_norm import add_rms_norm
from flashspark.kernels.selector import (
    selector_walk_with_confidence,
    selector_walk_with_feature,
    top_candidates,
)
from flashspark.kernels.silu_mul import silu_mul
from flashspark.kernels.target_probs import target_probs
from flashspark.kernels.top_tokens import best_tokens
from flashspark.kernels.triton.paged_attention import block_attention, ragged_attention

BYTES_PER_S, FLOPS_PER_S = 4.26e12, 790e12  # of an H200: a large copy, a large bf16 product of random numbers
Call = Callable[..., Any]  # takes `implementation` where there is a torch body


@dataclass(frozen=True)
class Geometry:
    """Sizes of target, draft and step."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    num_layers: int
    num_draft_layers: int
    width: int
    page_size: int
    kv_len: int
    max_kv_len: int  # the page table's
    rank: int  # of selector and Markov head
    num_candidates: int
    conv_group: int

    @property
    def gamma(self) -> int:
        """Drafts of a block."""
        return self.width - 1


QWEN3_8B = Geometry(4096, 32, 8, 128, 12288, 151936, 36, 5, 8, 16, 512, 1024, 256, 16, 16)
SMOKE = Geometry(64, 4, 2, 16, 96, 500, 2, 1, 4, 4, 20, 32, 8, 4, 16)


def floor_us(num_bytes: float, flops: float) -> float:
    """What it cannot be faster than."""
    return 1e6 * max(num_bytes / BYTES_PER_S, flops / FLOPS_PER_S)


def gemm_shapes(g: Geometry, num_layers: int, with_head: bool) -> list[tuple[int, int]]:
    """(inner, outer) sizes of the products of a model's layers, and of its head."""
    attention = g.num_heads * g.head_dim
    qkv = attention + 2 * g.num_kv_heads * g.head_dim
    layer = [(g.hidden, qkv), (attention, g.hidden), (g.hidden, 2 * g.ffn), (g.ffn, g.hidden)]
    return layer * num_layers + [(g.hidden, g.vocab_size)] * with_head


@dataclass(frozen=True)
class Case:
    """One kernel at one number of requests."""

    name: str
    num_reqs: int
    make: Callable[[int], Call]  # inputs of a seed -> a call over them
    num_bytes: float
    flops: float = 0.0
    has_torch: bool = True


class Inputs:
    """Random tensors of one seed on one device."""

    def __init__(self, seed: int, device: str) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self.device = device

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=self._generator, device=self.device, dtype=dtype)

    def rand(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.rand(*shape, generator=self._generator, device=self.device, dtype=dtype)

    def ids(self, size: int, *shape: int) -> Tensor:
        return torch.randint(size, shape, generator=self._generator, device=self.device)

    def softmax(self, *shape: int) -> Tensor:
        return torch.softmax(3 * self.randn(*shape, dtype=torch.float32), -1)

    def pages(self, g: Geometry, num_reqs: int) -> tuple[Tensor, int]:
        """A page table [R, max_kv_len / page_size] in random order, and the number of slots."""
        per_req = g.max_kv_len // g.page_size
        order = torch.randperm(num_reqs * per_req, generator=self._generator, device=self.device)
        return order.view(num_reqs, per_req) + 1, (num_reqs * per_req + 1) * g.page_size


class Cases:
    """All cases of a geometry; `dtype` is the activations'."""

    def __init__(self, geometry: Geometry, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.g, self.device, self.dtype = geometry, device, dtype
        # A wrapper holds one plan: each set of inputs has a backend of its own.
        self.flashinfer: Callable[[], AttentionBackend] | None = None
        if device == "cuda" and importlib.util.find_spec("flashinfer") is not None:
            self.flashinfer = partial(make_backend, "flashinfer", device)

    def all(self, num_reqs: int) -> Iterator[Case]:
        """In the order of a decode step."""
        full = [self.g.width] * num_reqs
        # As after a budget of half of the drafts: from a block cut to its anchor to a full one.
        trimmed = [1 + (3 * r + r // self.g.width) % self.g.width for r in range(num_reqs)]
        yield self.draft_attention(num_reqs)
        yield self.convolution(num_reqs)
        yield self.largest_logits(num_reqs, self.g.num_candidates, num_reqs * self.g.gamma)
        yield self.selector(num_reqs)
        yield self.selector(num_reqs, predicts=True)
        yield self.markov(num_reqs, sampled=False)
        yield self.markov(num_reqs, sampled=True)
        yield self.predict(num_reqs)
        yield self.allocate(num_reqs)
        yield self.pack(num_reqs, trimmed)
        yield self.norm(num_reqs)
        yield self.heads(num_reqs)
        yield self.attention(num_reqs, "verify attention, full", full)
        yield self.attention(num_reqs, "verify attention, trimmed", trimmed)
        yield self.attention(num_reqs, "verify attention, projected", full, projected=True)
        if self.flashinfer is not None:
            yield self.attention(num_reqs, "verify, full, flashinfer", full, self.flashinfer)
            chunks = [self.g.kv_len] * num_reqs
            yield self.attention(num_reqs, "prefill attention", chunks)
            yield self.attention(num_reqs, "prefill, flashinfer", chunks, self.flashinfer)
        yield self.gate(num_reqs)
        yield self.largest_logits(num_reqs, 1, num_reqs * self.g.width)
        yield self.accept_greedy(num_reqs)
        yield self.accept_step(num_reqs)
        yield self.target_probs(num_reqs, "neutral", 0, 1.0)
        yield self.target_probs(num_reqs, "top-p", 0, 0.9)
        yield self.target_probs(num_reqs, "top-k", 50, 1.0)
        yield self.target_probs(num_reqs, "flat", 0, 0.9)
        yield self.accept_sampled(num_reqs)
        yield self.observe(num_reqs)

    def _inputs(self, seed: int) -> Inputs:
        return Inputs(seed, self.device)

    def _lens(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self.device)

    def _caches(self, inputs: Inputs, num_slots: int) -> tuple[Tensor, Tensor]:
        shape = num_slots, self.g.num_kv_heads, self.g.head_dim
        return inputs.randn(*shape, dtype=self.dtype), inputs.randn(*shape, dtype=self.dtype)

    @property
    def _size(self) -> int:
        return self.dtype.itemsize

    def attention(
        self,
        num_reqs: int,
        name: str,
        lens: list[int],
        flashinfer: Callable[[], AttentionBackend] | None = None,
        projected: bool = False,
    ) -> Case:
        """Verify rows of uneven blocks over `kv_len` keys each, or whole prompts; through `flashinfer`, planned
        before the timing. `projected`: rows as they come out of the projection, whose norms, rope and write of keys
        and values are part of it."""
        g, num_rows = self.g, sum(lens)
        num_heads = g.num_heads + 2 * g.num_kv_heads * projected

        def make(seed: int) -> Call:
            x = self._inputs(seed)
            table, num_slots = x.pages(g, num_reqs)
            q = x.randn(num_rows, num_heads, g.head_dim, dtype=self.dtype)
            turn = self._turn(x, num_rows) if projected else None
            indptr = torch.tensor([0, *lens], device=self.device).cumsum(0)
            kv_lens = self._lens([g.kv_len] * num_reqs)
            caches = self._caches(x, num_slots)
            if flashinfer is not None:
                # Positions and slots are nothing to attention.
                queries = RaggedQueries(kv_lens, kv_lens, indptr, kv_lens, table, g.page_size)
                call = partial(flashinfer().ragged, q, *caches, queries, g.head_dim**-0.5)
                call()
                return call
            args = indptr, kv_lens, None, table, g.page_size, g.head_dim**-0.5, max(*lens, g.width)
            return partial(ragged_attention, q, *caches, *args, is_prefill=max(lens) > g.width, turn=turn)

        keys = num_reqs * g.kv_len * g.num_kv_heads * g.head_dim * 2 * self._size
        rows = num_rows * 2 * num_heads * g.head_dim * self._size
        visible = g.kv_len / 2 if lens[0] == g.kv_len else g.kv_len
        flops = 4.0 * num_rows * g.num_heads * g.head_dim * visible
        return Case(name, num_reqs, make, keys + rows, flops, has_torch=False)

    def _turn(self, inputs: Inputs, num_rows: int) -> HeadTurn:
        shapes = (self.g.num_heads + self.g.num_kv_heads,), (num_rows, 1), (num_rows, 1)
        weight, cos, sin = (inputs.randn(*shape, self.g.head_dim, dtype=self.dtype) for shape in shapes)
        return HeadTurn(weight, 1e-6, cos, sin)

    def draft_attention(self, num_reqs: int) -> Case:
        """Draft blocks over their context and themselves."""
        g = self.g

        def make(seed: int) -> Call:
            x = self._inputs(seed)
            table, num_slots = x.pages(g, num_reqs)
            heads = (g.num_heads, g.num_kv_heads, g.num_kv_heads)
            q, k, v = (x.randn(num_reqs, g.width, n, g.head_dim, dtype=self.dtype) for n in heads)
            lens = self._lens([g.kv_len] * num_reqs)
            args = lens, None, table, g.page_size, g.head_dim**-0.5, False, None
            return partial(block_attention, q, k, v, *self._caches(x, num_slots), *args)

        keys = num_reqs * (g.kv_len + g.width) * g.num_kv_heads * g.head_dim * 2 * self._size
        rows = num_reqs * g.width * g.num_heads * g.head_dim
        flops = 4.0 * rows * (g.kv_len + g.width)
        return Case("draft attention", num_reqs, make, keys + rows * 2 * self._size, flops, has_torch=False)

    def norm(self, num_reqs: int) -> Case:
        """Two inputs, two outputs."""
        g, num_rows = self.g, num_reqs * self.g.width

        def make(seed: int) -> Call:
            x = self._inputs(seed)
            rows = [x.randn(num_rows, g.hidden, dtype=self.dtype) for _ in range(2)]
            return partial(add_rms_norm, *rows, x.randn(g.hidden, dtype=self.dtype), 1e-6)

        return Case("add_rms_norm", num_reqs, make, (4 * num_rows + 1) * g.hidden * self._size)

    def heads(self, num_reqs: int) -> Case:
        """Head norms, rotary positions, keys and values to their slots."""
        g, num_rows = self.g, num_reqs * self.g.width
        num_turned = g.num_heads + g.num_kv_heads
        num_all = num_turned + g.num_kv_heads

        def make(seed: int) -> Call:
            x = self._inputs(seed)
            _, num_slots = x.pages(g, num_reqs)
            qkv = x.randn(num_rows, num_all, g.head_dim, dtype=self.dtype)
            tables = [x.randn(num_rows, 1, g.head_dim, dtype=self.dtype) for _ in range(2)]
            weight = x.randn(num_turned, g.head_dim, dtype=self.dtype)
            slots = torch.randperm(num_slots, device=self.device)[:num_rows]
            return partial(qk_norm_rope_write, qkv, weight, 1e-6, *tables, slots, *self._caches(x, num_slots))

        num_values = num_rows * (2 * num_all + 2) * g.head_dim
        return Case("qk_norm_rope_write", num_reqs, make, num_values * self._size + num_rows * 8)

    def gate(self, num_reqs: int) -> Case:
        """silu(gate) * up."""
        g, num_rows = self.g, num_reqs * self.g.width

        def make(seed: int) -> Call:
            return partial(silu_mul, self._inputs(seed).randn(num_rows, 2 * g.ffn, dtype=self.dtype))

        return Case("silu_mul", num_reqs, make, 3 * num_rows * g.ffn * self._size)

    def convolution(self, num_reqs: int) -> Case:
        """One side of the draft's convolution, with a residual."""
        g = self.g
        num_groups = g.hidden // g.conv_group

        def make(seed: int) -> Call:
            x = self._inputs(seed)
            y, residual = (x.randn(num_reqs, g.width, g.hidden, dtype=self.dtype) for _ in range(2))
            base = x.randn(2, 2, g.hidden, dtype=self.dtype)
            delta = x.randn(num_reqs, g.width, 4 * num_groups, dtype=self.dtype)
            return partial(dynamic_block_conv, y, base, delta, 1, residual)

        values = num_reqs * g.width * (3 * g.hidden + 2 * num_groups) + 2 * g.hidden
        return Case("block_conv", num_reqs, make, values * self._size)

    def largest_logits(self, num_reqs: int, k: int, num_rows: int) -> Case:
        """argmax, or the selector's candidates, of float32 logits."""
        g = self.g

        def make(seed: int) -> Call:
            logits = self._inputs(seed).randn(num_rows, g.vocab_size, dtype=torch.float32)
            mask_token = self._lens([g.vocab_size - 1])
            return partial(best_tokens, logits) if k == 1 else partial(top_candidates, logits, k, mask_token)

        return Case(f"top_tokens, k={k}", num_reqs, make, num_rows * (g.vocab_size * 4 + k * 12))

    def selector(self, num_reqs: int, predicts: bool = False) -> Case:
        """The walk, half of the requests sampled; `predicts` of two classes in the same launch."""
        g = self.g

        def make(seed: int) -> Call:
            x = self._inputs(seed)
            shape = num_reqs, g.gamma, g.num_candidates
            lattice = (
                x.randn(*shape, dtype=torch.float32),
                x.ids(g.vocab_size, *shape),
                x.ids(g.vocab_size, num_reqs),
                x.randn(num_reqs, g.gamma, g.rank, dtype=self.dtype),
                *(x.randn(g.vocab_size, g.rank, dtype=self.dtype) for _ in range(2)),
            )
            greedy = torch.arange(num_reqs, device=self.device) % 2 == 0
            noise = x.rand(num_reqs, g.gamma, dtype=torch.float64)
            walk = (*lattice, x.rand(num_reqs) + 0.3, greedy, noise, True)
            if not predicts:
                return partial(selector_walk_with_feature, *walk)
            values = x.rand(num_reqs + 1, 2, g.gamma)
            model = estimator.RowEstimator(x.ids(2, num_reqs + 1), x.rand(2), x.rand(2, g.gamma), values)
            rows = torch.arange(num_reqs, device=self.device)
            return partial(selector_walk_with_confidence, *walk, rows, model)

        per_slot = g.num_candidates * (4 + 8 + 4 + g.rank * self._size) + 2 * g.rank * self._size + 8 + 8 + 4
        num_bytes = num_reqs * g.gamma * per_slot
        if predicts:  # the row and its class; confidence, and what is left by row
            return Case(
                "selector walk, confidence", num_reqs, make, num_bytes + num_reqs * (g.gamma * 12 + 16)
            )
        return Case("selector walk", num_reqs, make, num_bytes)

    def markov(self, num_reqs: int, sampled: bool) -> Case:
        """DSpark's walk with a vanilla head: per slot a product over the vocabulary and a draw."""
        g = self.g

        def make(seed: int) -> Call:
            x = self._inputs(seed)
            logits = x.randn(g.gamma, num_reqs, g.vocab_size, dtype=torch.float32).transpose(0, 1)
            embedding = x.randn(g.vocab_size, g.rank, dtype=self.dtype)
            head = MarkovWeights("vanilla", embedding, x.randn(g.rank, g.vocab_size, dtype=self.dtype))
            greedy = torch.full((num_reqs,), not sampled, device=self.device)
            noise = x.rand(num_reqs, g.gamma, dtype=torch.float64) if sampled else None
            anchors, temperature = x.ids(g.vocab_size, num_reqs), x.rand(num_reqs) + 0.5
            return partial(markov_walk, logits, anchors, head, None, temperature, greedy, noise, None)

        per_slot = g.vocab_size * (g.rank * self._size + num_reqs * (8 if sampled else 4))
        name = f"markov walk, {'sampled' if sampled else 'greedy'}"
        flops = 2.0 * num_reqs * g.gamma * g.rank * g.vocab_size
        return Case(name, num_reqs, make, g.gamma * per_slot, flops)

    def predict(self, num_reqs: int) -> Case:
        """Confidence of a step's drafts, two classes."""
        g = self.g

        def make(seed: int) -> Call:
            x = self._inputs(seed)
            feature = x.randn(num_reqs, g.gamma, dtype=torch.float32)
            return partial(estimator.predict, feature, x.ids(2, num_reqs), x.rand(2), x.rand(2, g.gamma))

        return Case("estimator predict", num_reqs, make, num_reqs * (g.gamma * 8 + 8))

    def observe(self, num_reqs: int) -> Case:
        """A step's outcomes into the sums."""
        g = self.g

        def make(seed: int) -> Call:
            x = self._inputs(seed)
            moments = torch.zeros(2, estimator.NUM_MOMENTS, g.gamma, dtype=torch.float64, device=self.device)
            feature, prediction = x.randn(num_reqs, g.gamma, dtype=torch.float32), x.rand(num_reqs, g.gamma)
            lens = 1 + x.ids(g.width, num_reqs)
            accepted = torch.minimum(x.ids(g.width, num_reqs), lens - 1)
            classes, eligible = x.ids(2, num_reqs), x.rand(num_reqs) < 0.9
            return partial(estimator.observe, moments, feature, prediction, classes, accepted, lens, eligible)

        return Case("estimator observe", num_reqs, make, num_reqs * (g.gamma * 8 + 25))

    def allocate(self, num_reqs: int) -> Case:
        """Half of the drafts."""
        g = self.g

        def make(seed: int) -> Call:
            confidence = self._inputs(seed).rand(num_reqs, g.gamma)
            floors, caps = self._lens([1] * num_reqs), self._lens([g.width] * num_reqs)
            budget = torch.tensor(num_reqs * g.gamma // 2, device=self.device)
            return partial(allocate, confidence, budget, floors, caps, 0.01)

        return Case("allocate", num_reqs, make, num_reqs * (g.gamma * 4 + 24))

    def pack(self, num_reqs: int, lens: list[int]) -> Case:
        """Uneven blocks, padded to a multiple of 8."""
        g, num_rows = self.g, -(-sum(lens) // 8) * 8

        def make(seed: int) -> Call:
            x = self._inputs(seed)
            table, _ = x.pages(g, num_reqs)
            rows = torch.arange(num_reqs, device=self.device)
            anchors, drafts = x.ids(g.vocab_size, num_reqs), x.ids(g.vocab_size, num_reqs, g.gamma)
            context = self._lens([g.kv_len - g.width] * num_reqs)
            return partial(
                pack_rows, rows, anchors, context, table, g.page_size, drafts, self._lens(lens), num_rows
            )

        return Case("pack_rows", num_reqs, make, num_reqs * (g.gamma + 5 + g.width) * 8 + num_rows * 40)

    def accept_greedy(self, num_reqs: int) -> Case:
        """Argmaxes against drafts that are often right."""
        g = self.g

        def make(seed: int) -> Call:
            x = self._inputs(seed)
            lens = 1 + x.ids(g.width, num_reqs)
            return partial(accept_greedy, x.ids(2, num_reqs, g.width), x.ids(2, num_reqs, g.gamma), lens)

        return Case("accept, greedy", num_reqs, make, num_reqs * (2 * g.gamma + 5) * 8)

    def accept_step(self, num_reqs: int) -> Case:
        """Full blocks, drafts that are often right; lengths, anchors and step indices move on."""
        g, num_rows = self.g, num_reqs * self.g.width

        def make(seed: int) -> Call:
            x = self._inputs(seed)
            best = x.ids(2, num_rows), x.randn(num_rows, dtype=torch.float32)
            block_rows = torch.arange(num_rows, device=self.device).view(num_reqs, g.width)
            drafts, lens = x.ids(2, num_reqs, g.gamma), self._lens([g.width] * num_reqs)
            state = [self._lens([0] * (num_reqs + 1)) for _ in range(3)]
            rows = torch.arange(num_reqs, device=self.device)
            return partial(accept_step, *best, block_rows, drafts, lens, rows, *state, num_reqs)

        return Case("accept step", num_reqs, make, num_reqs * (g.width * 28 + g.gamma * 8 + 73))

    def accept_sampled(self, num_reqs: int) -> Case:
        """Full blocks, candidates of the selector; one row of p per request is drawn from."""
        g = self.g

        def make(seed: int) -> Call:
            x = self._inputs(seed)
            probs = x.softmax(num_reqs * g.width, g.vocab_size)
            block_rows = torch.arange(num_reqs * g.width, device=self.device).view(num_reqs, g.width)
            ids = x.ids(g.vocab_size, num_reqs, g.gamma, g.num_candidates)
            q, lens = x.softmax(num_reqs, g.gamma, g.num_candidates), self._lens([g.width] * num_reqs)
            noise = x.rand(num_reqs, g.width, 2, dtype=torch.float64)
            noise[..., 0] *= 1e-5  # or hardly anything would be accepted
            drafts = ids[..., 0].contiguous()
            args = drafts, ids, q, lens, noise[:, :-1, 0].contiguous(), noise[..., 1].contiguous()
            return partial(accept_sampled, probs, block_rows, *args)

        return Case("accept, sampled", num_reqs, make, num_reqs * (g.vocab_size * 4 + g.gamma * 220))

    def target_probs(self, num_reqs: int, kind: str, top_k: int, top_p: float) -> Case:
        """Logits of all rows to the distribution that is served; `kind` flat: no token stands out."""
        g, num_rows = self.g, num_reqs * self.g.width

        def make(seed: int) -> Call:
            logits = 3 * self._inputs(seed).randn(num_rows, g.vocab_size, dtype=torch.float32)
            if kind != "flat":  # as a model's: some hundred tokens have nearly all of the mass
                logits[:, :: g.vocab_size // 300] += 12
            ones = torch.ones(num_rows, device=self.device)
            return partial(target_probs, logits, ones, self._lens([top_k] * num_rows), top_p * ones, 0 * ones)

        return Case(f"target_probs, {kind}", num_reqs, make, 2 * num_rows * g.vocab_size * 4)
