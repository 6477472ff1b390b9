"""What is shipped keeps what its model cards say: the target is transformers' Qwen3, and the draft is accepted."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import Qwen3ForCausalLM

from demo_pair.decode import loop_end
from flashspark.attention.registry import make_backend
from flashspark.demo import DEMO_MODELS, DEMO_PROMPTS
from flashspark.engine.loader import load_target
from harness import Harness, Job
from paged import Pages

# The issue of a worse pair would be silent otherwise. The cards' figures lie well above.
FLOORS = {0.0: 2.8, 1.0: 2.05}
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [prompt["token_ids"] for prompt in json.loads(DEMO_PROMPTS.read_text())]


@pytest.mark.parametrize("temperature", FLOORS)
def test_acceptance_floor(prompts, temperature):
    """All 64 prompts; a loop (a period of at most 32 tokens, 4 times over) ends a request's count."""
    harness = Harness("demo", DEMO_MODELS["demo-dflash2"], max_running_requests=32)
    sampling = {"temperature": temperature, "ignore_eos": False}
    num_tokens = num_steps = 0
    for result in harness.run([Job(p, NUM_TOKENS, sampling=sampling) for p in prompts]):
        counted = loop_end(result.tokens) or len(result.tokens)
        done = 0
        for step in result.steps:
            if done >= counted:
                break
            done += step
            num_steps += 1
        num_tokens += min(done, counted)
    acceptance_length = num_tokens / num_steps
    print(f"acceptance length at temperature {temperature}: {acceptance_length:.3f}")
    assert acceptance_length >= FLOORS[temperature]


def test_target_equals_transformers(prompts):
    reference = Qwen3ForCausalLM.from_pretrained(DEMO_MODELS["demo"], dtype=torch.float32).eval()
    target, backend = load_target(DEMO_MODELS["demo"]), make_backend("torch_native")
    for prompt in prompts[:8]:
        with torch.no_grad():
            expected = reference(torch.tensor([prompt])).logits[0]
        pages = Pages(1, len(prompt))
        for spans in ([len(prompt)], [len(prompt) - 21, 1, 8, 1, 3, 8]):
            pool, start, got = target.make_kv_pool(pages.num_slots), 0, []
            for count in spans:
                ids = torch.tensor(prompt[start : start + count])
                hidden = target.forward(ids, pages.ragged([(0, start, count)]), pool, backend)
                got.append(target.logits(hidden.final))
                start += count
            assert start == len(prompt)
            assert (torch.cat(got) - expected).abs().max() < 1e-4
