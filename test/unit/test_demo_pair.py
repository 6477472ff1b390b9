"""The demo pair's training code is exact, and the shipped files are what docs/demo-pair.md says."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from demo_pair import calibration, checkpoint, decode, loop, settings, train_draft, train_dspark  # noqa: E402
from demo_pair.corpus import Deduplicator, Document, clean  # noqa: E402
from demo_pair.draft_model import Backbone, DFlash2, DSpark  # noqa: E402
from demo_pair.generate import LockStepSampler, Written  # noqa: E402
from demo_pair.mining import functions_of, mine_chats, mine_prompts  # noqa: E402
from demo_pair.optim import MuonAdamW  # noqa: E402
from demo_pair.sources import permitted_text  # noqa: E402
from demo_pair.target_model import Target  # noqa: E402

CPU = torch.device("cpu")
DEMO = ROOT / "python" / "flashspark" / "demo"


def _randomise(module: torch.nn.Module, scale: float = 0.25) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(False).add_(torch.randn_like(parameter) * scale)


@pytest.fixture(scope="module")
def tiny() -> tuple[Target, DFlash2]:
    torch.manual_seed(0)
    run = settings.smoke()
    shape = replace(run.target, vocab_size=96)
    target = Target(shape)
    draft = DFlash2(replace(run.draft, target=shape))
    _randomise(target)
    _randomise(draft)
    return target, draft


@pytest.fixture(scope="module")
def tiny_dspark(tiny: tuple[Target, DFlash2]) -> tuple[Target, DSpark]:
    target, _ = tiny
    torch.manual_seed(5)
    draft = DSpark(replace(settings.smoke().dspark, target=target.shape))
    _randomise(draft)
    return target, draft


def _incremental(target: Target, draft: Backbone, ids: torch.Tensor, anchor: int) -> torch.Tensor:
    """The block at one anchor, from caches filled token by token."""
    caches = [decode.Cache(target, n, 1, 128) for n in (len(target.model.layers), len(draft.layers))]
    for position in range(anchor):
        place = torch.tensor([[position]])
        features, _ = decode.target_forward(
            target, caches[0], ids[:, position : position + 1], place, draft.shape.target_layer_ids
        )
        decode.inject(draft, target, caches[1], features, place)
    return decode.draft_hidden(draft, target, caches[1], ids[:, anchor], torch.tensor([anchor]))


def test_packed_training_blocks_equal_incremental_blocks(tiny: tuple[Target, DFlash2]) -> None:
    target, draft = tiny
    ids = torch.randint(4, 96, (1, 40))
    anchors = torch.tensor([[0, 1, 5, 17, 31]])
    features, _ = target.hidden(ids, draft.shape.target_layer_ids)
    packed = draft.block_hidden(target, features, ids.gather(1, anchors), anchors)
    for column, anchor in enumerate(anchors[0].tolist()):
        alone = _incremental(target, draft, ids, anchor)
        torch.testing.assert_close(
            target.logits(packed[:, column]), target.logits(alone), atol=2e-4, rtol=1e-4
        )


def test_block_does_not_see_features_from_its_anchor_on(tiny: tuple[Target, DFlash2]) -> None:
    target, draft = tiny
    ids = torch.randint(4, 96, (1, 30))
    anchors = torch.tensor([[12]])
    features, _ = target.hidden(ids, draft.shape.target_layer_ids)
    before = draft.block_hidden(target, features, ids[:, 12:13], anchors)
    behind, inside = features.clone(), features.clone()
    behind[:, 12:] += 3.0
    inside[:, 11] += 3.0
    assert torch.equal(before, draft.block_hidden(target, behind, ids[:, 12:13], anchors))
    assert not torch.allclose(before, draft.block_hidden(target, inside, ids[:, 12:13], anchors))


def test_fresh_dflash2_equals_dflash_v1(tiny: tuple[Target, DFlash2]) -> None:
    target, _ = tiny
    torch.manual_seed(3)
    fresh = DFlash2(replace(settings.smoke().draft, target=target.shape))
    plain = Backbone(fresh.shape, convolution=False)
    for layer in fresh.layers:
        _randomise(layer.self_attn)
        _randomise(layer.mlp)
    shared = {n: t for n, t in fresh.state_dict().items() if "_conv." not in n and "selector" not in n}
    plain.load_state_dict(shared, strict=True)
    ids, anchors = torch.randint(4, 96, (2, 30)), torch.tensor([[3, 9], [4, 20]])
    features, _ = target.hidden(ids, fresh.shape.target_layer_ids)
    ours = fresh.block_hidden(target, features, ids.gather(1, anchors), anchors)
    theirs = plain.block_hidden(target, features, ids.gather(1, anchors), anchors)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    rows, before = ours[:, :, 1:], torch.randint(4, 96, (2, 2, 7))
    scores = fresh.candidate_selector(rows, before, torch.randint(4, 96, (2, 2, 7, 5)))
    assert torch.equal(scores, torch.zeros_like(scores))


def test_packed_dspark_blocks_equal_incremental_blocks(tiny_dspark: tuple[Target, DSpark]) -> None:
    """Corrected logits and confidence of the training step equal those of the walk over caches, at every anchor."""
    target, draft = tiny_dspark
    ids = torch.randint(4, 96, (1, 40))
    anchors, gamma = torch.tensor([[0, 1, 5, 17, 31]]), draft.shape.block_size
    features, _ = target.hidden(ids, draft.shape.target_layer_ids)
    packed = draft.block_hidden(target, features, ids.gather(1, anchors), anchors)
    head = target.model.embed_tokens.weight
    for column, anchor in enumerate(anchors[0].tolist()):
        alone = _incremental(target, draft, ids, anchor)
        proposal = decode.propose(draft, target, alone, ids[:, anchor], 0.0)
        predecessors = torch.cat((ids[:, anchor : anchor + 1], proposal.ids[:, :-1]), dim=1)
        logits, confidence = draft.heads(packed[:, column], predecessors, head)
        assert alone.shape[1] == gamma and torch.equal(logits.argmax(-1), proposal.ids)
        torch.testing.assert_close(confidence, proposal.confidence, atol=2e-4, rtol=1e-4)
        again, _ = draft.heads(alone, predecessors, head)
        torch.testing.assert_close(logits, again, atol=2e-4, rtol=1e-4)


def test_dspark_rows_draft_the_token_behind_them(tiny_dspark: tuple[Target, DSpark]) -> None:
    """A Markov head that knows which token follows which, over silent rows, is right from the first row on."""
    target, _ = tiny_dspark
    run = replace(settings.smoke(), target=target.shape)
    draft = DSpark(replace(run.dspark, target=target.shape, markov_rank=96))
    run = replace(run, dspark=draft.shape)
    ids = (torch.arange(60) * 7 % 96)[None]
    with torch.no_grad():
        draft.norm.weight.zero_()
        draft.markov_head.markov_w1.weight.copy_(torch.eye(96))
        draft.markov_head.markov_w2.weight.copy_(100.0 * torch.eye(96).roll(7, 0))
    step = train_dspark.DSparkStep(run, target, draft, Written(ids, torch.tensor([5]), 0.0))
    _, figures = step.on(ids, torch.tensor([[4, 20, 52]]))
    assert figures["label"].tolist() == [1.0] * draft.shape.block_size


def test_dspark_confidence_learns_the_acceptance_probability(tiny_dspark: tuple[Target, DSpark]) -> None:
    target, draft = tiny_dspark
    hidden, teacher = torch.randn(3, 7, 64), torch.randn(3, 7, 64)
    ids = torch.randint(4, 96, (3, 8))
    head, recipe = target.model.embed_tokens.weight, settings.DSparkRecipe(ce=0.0, tv=0.0, decay=1e9)
    loss, figures = train_dspark.block_losses(hidden, teacher, ids[:, 1:], ids[:, :-1], head, draft, recipe)
    logits, confidence = draft.heads(hidden, ids[:, :-1], head)
    q, p = torch.softmax(logits, -1), torch.softmax(target.logits(teacher), -1)
    accepted = torch.minimum(p, q).sum(-1)
    torch.testing.assert_close(figures[1], accepted.mean(0))
    expected = torch.nn.functional.binary_cross_entropy(torch.sigmoid(confidence), accepted)
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-4)


def test_calibration_figures_of_a_stretched_confidence() -> None:
    torch.manual_seed(2)
    true = torch.randn(20_000, 3, dtype=torch.float64) + 1.0
    prefix = (torch.rand_like(true) < torch.sigmoid(true)).cumprod(1).bool()
    stretched = true * torch.tensor([2.0, 0.5, 4.0])
    checked = calibration.check(stretched, prefix, [2.0, 0.5, 4.0])
    assert max(checked["ece_after"]) < 0.02 < min(checked["ece_before"])
    assert checked["expected_after"] == pytest.approx(checked["observed"], abs=0.02)
    ranked = calibration.ranking(true, prefix)
    assert 0.6 < ranked["auc"] < 0.9 and calibration.area_under_curve(-true[:, 0], prefix[:, 0]) < 0.4


def test_anchors_start_at_the_last_prompt_token_and_leave_room_for_a_block() -> None:
    anchors = train_draft.draw_anchors(torch.tensor([5, 30]), 4000, 64, 8)
    assert anchors[0].min() == 4 and anchors[1].min() == 29
    assert anchors.max() == 56


@pytest.mark.parametrize("pair", ["tiny", "tiny_dspark"])
def test_greedy_speculation_writes_what_the_target_writes(pair: str, request: pytest.FixtureRequest) -> None:
    target, draft = request.getfixturevalue(pair)
    prompts = [torch.randint(4, 96, (n,)).tolist() for n in (2, 9, 30)]
    traces = decode.speculate(target, draft, prompts, 0.0, 24)
    for prompt, trace in zip(prompts, traces, strict=True):
        ids = list(prompt)
        for token in trace.ids:
            assert int(target.logits(target.hidden(torch.tensor([ids]))[1])[0, -1].argmax()) == token
            ids.append(token)
        assert sum(trace.kept) == len(trace.ids) and trace.finish in {"stop", "loop", "length"}


def test_lock_step_sampler_is_greedy_at_temperature_zero(tiny: tuple[Target, DFlash2]) -> None:
    target, _ = tiny
    prompts = torch.randint(4, 96, (2, 6))
    written = LockStepSampler(target, 2, 20).write(prompts, torch.zeros(2), 20)
    logits = target.logits(target.hidden(written)[1])
    assert torch.equal(written[:, :6], prompts)
    assert torch.equal(logits[:, 5:-1].argmax(-1), written[:, 6:])


def test_rejection_sampling_keeps_the_distribution() -> None:
    torch.manual_seed(1)
    count, vocab = 40_000, 6
    logits = torch.randn(1, 2, vocab)
    candidates = torch.tensor([4, 1, 2]).expand(count, 1, 3)
    q = torch.tensor([0.6, 0.3, 0.1]).expand(count, 1, 3)
    ids = candidates[:, 0].gather(1, torch.multinomial(q[:, 0], 1))
    accepted, bonus = decode.verify(decode.Proposal(ids, candidates, q), logits.expand(count, -1, -1), 1.0)
    first = torch.where(accepted > 0, ids[:, 0], bonus)
    expected = torch.softmax(logits[0, 0], -1) * count
    observed = torch.bincount(first, minlength=vocab).float()
    chi_square = ((observed - expected) ** 2 / expected).sum().item()
    assert chi_square < 25.0  # 5 degrees of freedom, p about 1e-4
    wrong = torch.bincount(ids[:, 0], minlength=vocab).float()
    assert ((wrong - expected) ** 2 / expected).sum().item() > 1000.0


@pytest.mark.parametrize(
    ("ids", "end"),
    [
        ([1, 2, 3, 4, 5, 6], None),
        ([9, 7, 7, 7], None),
        ([9, 7, 7, 7, 7, 7], 5),
        ([5, 1, 2, 1, 2, 1, 2, 1, 2, 1], 9),
        ([*range(40), *range(40), *range(40), *range(40)], None),
        ([*range(32)] * 4, 128),
    ],
)
def test_loop_rule(ids: list[int], end: int | None) -> None:
    assert decode.loop_end(ids) == end


def test_trace_cuts_at_stop_tokens_loops_and_the_limit() -> None:
    trace = decode.Trace()
    assert trace.take([10, 11], 1, 50)
    assert not trace.take([12, 2, 13], 2, 50)
    assert (trace.ids, trace.kept, trace.finish) == ([10, 11, 12, 2], [2, 2], "stop")
    trace = decode.Trace()
    assert not trace.take([10, 11, 12], 2, 2)
    assert (trace.ids, trace.finish) == ([10, 11], "length")


def test_training_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    target = Target(replace(settings.smoke().target, vocab_size=32, num_hidden_layers=1))
    ids = torch.randint(0, 32, (2, 9))

    def phase(model: Target, num_steps: int, seconds: float) -> dict[str, object]:
        optimizer = MuonAdamW(model.named_parameters(), 0.02, 3e-3, 0.0)
        plan = loop.LoopPlan("tiny", seconds, 0.1, 0.1, tmp_path / "tiny.ckpt", max_steps=num_steps)
        return loop.run(plan, model, optimizer, lambda: (model.loss(ids[:, :-1], ids[:, 1:]), {}))

    first = phase(target, 8, 1e9)
    saved = {n: t.clone() for n, t in target.state_dict().items()}
    again = Target(target.shape)
    assert phase(again, 8, 1e9)["steps"] == first["steps"] == 8
    assert all(torch.equal(t, saved[n]) for n, t in again.state_dict().items())
    longer = phase(again, 30, 1e9)
    assert longer["steps"] == 30 and longer["loss"] < first["loss"]


_SOURCE = '''import os
import sys


def listing(path):
    """Give the sorted names of the files in a folder."""
    names = os.listdir(path)
    names.sort()
    result = []
    for name in names:
        result.append(name)
    return result
'''


def test_mining_keeps_imports_signature_and_docstring() -> None:
    document = Document("cpython", "x.py", _SOURCE)
    (function,) = functions_of(document)
    assert function.imports == "import os\n" and function.signature == "listing(path)"
    (prompt,) = mine_prompts([document])
    assert prompt.text.startswith("import os\n\n\ndef listing(path):\n") and prompt.text.endswith(
        'folder."""\n'
    )
    (chat,) = mine_chats([document], 1000)
    assert chat.startswith("<|im_start|>user\n") and chat.endswith("```<|im_end|>\n")


def test_cleaning_drops_licence_headers_generated_files_and_duplicates() -> None:
    assert clean("# Copyright someone\n\n" + _SOURCE) == _SOURCE
    assert clean("# Generated by a tool. Do not edit.\n" + _SOURCE) is None
    assert clean("def broken(:\n" + _SOURCE) is None
    dedup = Deduplicator()
    assert dedup.is_new(_SOURCE) and not dedup.is_new(_SOURCE.replace("    ", "  "))


def test_copyleft_files_are_not_read() -> None:
    assert permitted_text(b"# GNU General Public License\nx = 1\n") is None
    assert permitted_text(b"# SPDX-License-Identifier: MPL-2.0\nx = 1\n") is None
    assert permitted_text(b"x = 'simple'\n") == "x = 'simple'\n"


def test_prompts_are_fixed_and_sane() -> None:
    path = DEMO / "prompts.json"
    prompts = json.loads(path.read_text())
    assert [p["id"] for p in prompts] == [f"p{i:02d}" for i in range(64)]
    assert len({p["text"] for p in prompts}) == 64 and len({p["source"] for p in prompts}) == 64
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    for prompt in prompts:
        assert 20 <= len(prompt["token_ids"]) <= 400
        assert tokenizer.encode(prompt["text"]).ids == prompt["token_ids"]
        name, _, path_and_function = prompt["source"].partition("/")
        assert Document(name, path_and_function.rpartition(":")[0], "").split == "heldout"


def test_shipped_files_have_the_documented_names_shapes_and_sizes() -> None:
    files = [path for path in DEMO.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert max(path.stat().st_size for path in files) <= 16 * 2**20
    assert sum(path.stat().st_size for path in files) <= 32 * 2**20
    target = json.loads((DEMO / "target" / "config.json").read_text())
    assert target["architectures"] == ["Qwen3ForCausalLM"] and target["tie_word_embeddings"] is True
    assert (target["head_dim"], target["rope_theta"], target["max_position_embeddings"]) == (128, 1e6, 1024)
    assert json.loads((DEMO / "target" / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    draft = json.loads((DEMO / "dflash2" / "config.json").read_text())
    special = draft["dflash_config"]
    assert draft["architectures"] == ["DFlash2DraftModel"] and draft["is_causal"] is False
    assert draft["layer_types"] == ["full_attention"] * draft["num_hidden_layers"]
    assert (special["block_size"], special["conv_kernel_size"], special["conv_group_size"]) == (8, 2, 16)
    assert special["mask_token_id"] == 3 and all(
        i < target["num_hidden_layers"] for i in special["target_layer_ids"]
    )
    shapes = {n: tuple(t.shape) for n, t in load_file(DEMO / "dflash2" / "model.safetensors").items()}
    assert all(t.dtype == torch.bfloat16 for t in load_file(DEMO / "target" / "model.safetensors").values())
    assert shapes["fc.weight"] == (256, 256 * len(special["target_layer_ids"]))
    assert shapes["layers.0.attention_conv.base_kernel"] == (2, 2, 256)
    assert shapes["layers.0.mlp_conv.kernel_projection.weight"] == (2 * 2 * 16, 256)
    assert shapes["candidate_selector.predecessor_codebook"] == (4096, special["selector_rank"])
    assert "embed_tokens.weight" not in shapes and "lm_head.weight" not in shapes
    spark = json.loads((DEMO / "dspark" / "config.json").read_text())
    assert spark["architectures"] == ["Qwen3DSparkModel"] and spark["sample_from_anchor"] is True
    assert (spark["block_size"], spark["markov_head_type"], spark["is_causal"]) == (7, "vanilla", False)
    assert spark["target_layer_ids"] == special["target_layer_ids"] and spark["mask_token_id"] == 3
    shapes = {n: tuple(t.shape) for n, t in load_file(DEMO / "dspark" / "model.safetensors").items()}
    assert shapes["markov_head.markov_w1.weight"] == shapes["markov_head.markov_w2.weight"] == (4096, 128)
    assert shapes["confidence_head.proj.weight"] == (1, 256 + 128)
    assert shapes["confidence_head.proj.bias"] == (1,) and "lm_head.weight" not in shapes
    sts = json.loads((DEMO / "dspark" / "sts.json").read_text())
    assert len(sts["temperatures"]) == len(sts["ece_after"]) == 7 and min(sts["temperatures"]) > 0
    assert 6.0e6 <= sum(p.numel() for p in checkpoint.load_target(DEMO / "target", CPU).parameters()) <= 8.3e6


@pytest.mark.parametrize(("name", "floors"), [("dflash2", (3.2, 2.0)), ("dspark", (2.9, 1.9))])
def test_shipped_pair_keeps_its_acceptance(name: str, floors: tuple[float, float]) -> None:
    target = checkpoint.load_target(DEMO / "target", CPU)
    draft = checkpoint.load_draft(DEMO / name, target)
    prompts = [p["token_ids"] for p in json.loads((DEMO / "prompts.json").read_text())[:8]]
    for temperature, floor in zip((0.0, 1.0), floors, strict=True):
        traces = decode.speculate(target, draft, prompts, temperature, 48)
        assert sum(sum(t.kept) for t in traces) / sum(len(t.kept) for t in traces) >= floor


def test_shipped_target_equals_transformers() -> None:
    reference = Qwen3ForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32).eval()
    target = checkpoint.load_target(DEMO / "target", CPU)
    ids = torch.tensor([json.loads((DEMO / "prompts.json").read_text())[0]["token_ids"]])
    with torch.no_grad():
        theirs = reference(ids, output_hidden_states=True)
        features, hidden = target.hidden(ids, (1, 3, 5))
    torch.testing.assert_close(target.logits(hidden), theirs.logits, atol=1e-4, rtol=1e-4)
    taken = torch.cat([theirs.hidden_states[i + 1] for i in (1, 3, 5)], dim=-1)
    torch.testing.assert_close(features, taken, atol=1e-3, rtol=1e-3)
