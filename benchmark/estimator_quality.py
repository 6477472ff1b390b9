#!/usr/bin/env python3
"""How well the online acceptance estimator predicts the shipped pair: ranking, calibration, classes, more features.

    python benchmark/estimator_quality.py --out benchmark/results/estimator_quality.json

One scheduler in this process verifies every block in full, over the held-out prompts (and the same prompts cut to
three quarters and to half their length, for more steps), at temperature 0 and at 1. A request ends at a stop token, at
--max-new tokens, or in a loop (a period of at most 32 tokens, 4 times over): loops are easy to predict and would
flatter the figures. Every block's features and outcome are recorded in the order of the steps.

The estimator as shipped then sees those steps again, batch by batch. A trimmed block's outcome is known exactly
from the full one, so the same record also shows what happens when it trims by its own predictions. Ranking (AUC of
the predicted against the seen outcomes, positions pooled) is measured over the second half of the blocks,
calibration (expected against observed accepted drafts) over everything after the first 2,000 observations that the
coefficients in use have seen. Further features are judged by logistic fits on the first half, scored on the second.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "scripts")]

from demo_pair.decode import loop_end  # noqa: E402
from flashspark.args import ServerArgs  # noqa: E402
from flashspark.demo import DEMO_MODELS, DEMO_PROMPTS  # noqa: E402
from flashspark.ipc import GenerateRequest, RequestOutput, SamplingParams  # noqa: E402
from flashspark.kernels import selector  # noqa: E402
from flashspark.kernels.estimator import observed_mask  # noqa: E402
from flashspark.scheduler.build import build_scheduler  # noqa: E402
from flashspark.speculative import drafter as drafter_module  # noqa: E402
from flashspark.speculative.estimator import AcceptanceEstimator  # noqa: E402
from flashspark.speculative.sampling import RowSampling  # noqa: E402

CPU = torch.device("cpu")
SETTLED = 2000  # observations
TRIM_AT = 0.3  # survival below which the self-trimming replay stops


@dataclass
class Record:
    """Blocks in the order of their steps. N blocks."""

    step: Tensor  # int64 [N], batch step
    request: Tensor  # int64 [N]
    feature: Tensor  # float32 [N, g]
    margin: Tensor  # float32 [N, g]: the two best scores' difference, at the request's temperature
    verify_lens: Tensor  # int64 [N]
    num_accepted: Tensor  # int64 [N]
    is_greedy: Tensor  # bool [N]


class Recorder:
    """Drives a scheduler and notes what it drafts and accepts."""

    def __init__(self, batch_size: int) -> None:
        args = ServerArgs(
            model_path="demo",
            speculative_algorithm="DFLASH",
            speculative_draft_model_path="demo-dflash2",
            max_running_requests=batch_size,
            random_seed=1,
            decode_log_interval=10**6,
        )
        self.scheduler, _ = build_scheduler(args, self._receive)
        self._worker = self.scheduler._worker
        self._decode, self._worker.decode = self._worker.decode, self._decode_and_note
        self._tokens: dict[str, list[int]] = {}
        self._looping: list[str] = []
        self._parts: list[tuple[Any, ...]] = []
        self._num_steps = 0
        self._drafted: tuple[Tensor, Tensor, Tensor] | None = None
        # Whichever of the two the drafter calls.
        vars(drafter_module).update(
            selector_walk=lambda *a, **k: self._walk(*a, **k)[:2], selector_walk_with_feature=self._walk
        )

    def _walk(
        self, scores, ids, anchors, projected, predecessors, successors, temperature, greedy, *rest, **kw
    ):
        """The drafter's walk, with the feature and the margin of each slot noted on the way."""
        tokens, q, feature = selector.selector_walk_with_feature(
            scores, ids, anchors, projected, predecessors, successors, temperature, greedy, *rest, **kw
        )
        pairs = selector.pair_scores(scores, ids, anchors, projected, predecessors, successors)
        chosen = (ids == tokens[..., None]).int().argmax(-1)
        before = torch.cat((torch.zeros_like(chosen[:, :1]), chosen[:, :-1]), 1)
        realised = pairs.gather(2, before[..., None, None].expand(-1, -1, 1, ids.shape[2])).squeeze(2)
        best = realised.topk(2).values
        self._drafted = (feature, (best[..., 0] - best[..., 1]) / temperature[:, None], greedy)
        return tokens, q, feature

    def _decode_and_note(self, batch):
        self._drafted = None
        accepted = self._decode(batch)
        self._num_steps += 1
        if self._drafted is not None:
            drafted = [i for i, cap in enumerate(batch.cap_list) if cap > 1]
            owners = {r.row: r.arrival for r in self.scheduler.residency.residents}
            self._parts.append(
                (
                    torch.full((len(drafted),), self._num_steps),
                    torch.tensor([owners[batch.row_list[i]] for i in drafted]),
                    *self._drafted[:2],
                    batch.verify_caps[drafted],
                    accepted.num_tokens[drafted] - 1,
                    self._drafted[2],
                )
            )
        return accepted

    def _receive(self, output: RequestOutput) -> None:
        tokens = self._tokens.setdefault(output.request_id, [])
        tokens += output.token_ids
        if output.finish is None and loop_end(tokens):
            self._looping.append(output.request_id)

    def run(self, prompts: list[list[int]], temperature: float, max_new: int, seconds: float) -> Record:
        """Plays the prompts until they or the time have ended."""
        self._parts, self._tokens, self._looping = [], {}, []
        ids = [f"{temperature}-{i}" for i in range(len(prompts))]
        for request_id, prompt in zip(ids, prompts, strict=True):
            sampling = SamplingParams(max_new_tokens=max_new, temperature=temperature)
            self.scheduler.add(GenerateRequest(request_id, prompt, sampling))
        deadline = time.monotonic() + seconds
        while self.scheduler.has_work and time.monotonic() < deadline:
            self.scheduler.step()
            self.scheduler.abort(self._looping, "a loop")
            self._looping = []
        self.scheduler.abort(ids, "the time is over")
        step, request, feature, margin, lens, accepted, greedy = (
            torch.cat(c) for c in zip(*self._parts, strict=True)
        )
        return Record(step, request, feature, margin, lens, accepted, greedy)


def auc(score: Tensor, label: Tensor) -> float:
    """Probability that a random accepted draft scores above a random refused one; ties count half."""
    _, inverse, counts = torch.unique(score.double(), return_inverse=True, return_counts=True)
    rank = (counts.cumsum(0) - (counts - 1) / 2.0)[inverse]
    positive = label.sum().item()
    negative = len(label) - positive
    return float((rank[label].sum() - positive * (positive + 1) / 2) / (positive * negative))


def seen(record: Record) -> tuple[Tensor, Tensor]:
    """Mask of the outcomes that full blocks show, and the labels; bool [N, g] each."""
    gamma = record.feature.shape[1]
    label = torch.arange(gamma) < record.num_accepted[:, None]
    return observed_mask(record.num_accepted, record.verify_lens, gamma), label


@dataclass
class Replay:
    """What the estimator predicted along a record, and what it had learned from by then."""

    confidence: Tensor  # float32 [N, g]
    lens: Tensor  # int64 [N], verified
    known: Tensor  # int64 [N], observations behind the coefficients in use
    estimator: AcceptanceEstimator


def batches(record: Record, size: int) -> list[Tensor]:
    """Indices of the blocks of each step, cut to at most `size`."""
    counts = torch.unique_consecutive(record.step, return_counts=True)[1].tolist()
    return [part for step in torch.arange(len(record.step)).split(counts) for part in step.split(size)]


@torch.inference_mode()
def replay(record: Record, per_class: bool, size: int, trims: bool) -> Replay:
    """The estimator sees the record in batches of at most `size`, in full or trimmed by itself."""
    gamma = record.feature.shape[1]
    estimator = AcceptanceEstimator(size, gamma, CPU, per_class=per_class)
    confidence, known = torch.zeros_like(record.feature), torch.zeros_like(record.num_accepted)
    lens = record.verify_lens.clone()
    total = behind = num_refits = 0
    for part in batches(record, size):
        row_list = list(range(len(part)))
        rows = torch.tensor(row_list)
        for row, greedy in zip(row_list, record.is_greedy[part].tolist(), strict=True):
            estimator.assign(row, RowSampling(seed=0, temperature=0.0 if greedy else 1.0))
        c = estimator.predict(rows, record.feature[part])
        if trims and estimator.is_ready:
            lens[part] = torch.minimum(lens[part], 1 + (c.cumprod(1) >= TRIM_AT).sum(1))
        accepted = torch.minimum(record.num_accepted[part], lens[part] - 1)
        confidence[part], known[part] = c, behind
        estimator.observe(rows, row_list, accepted, lens[part])
        total += int(torch.minimum(accepted + 1, lens[part] - 1).sum())
        if estimator.num_refits > num_refits:
            num_refits, behind = estimator.num_refits, total
    return Replay(confidence, lens, known, estimator)


def calibration(record: Record, replayed: Replay, chosen: Tensor) -> dict[str, float | int]:
    """Expected (sum of survivals over the verified drafts) against observed accepted drafts of `chosen` blocks."""
    if not chosen.any():
        return {"blocks": 0}
    verified = torch.arange(record.feature.shape[1]) < replayed.lens[:, None] - 1
    expected = (replayed.confidence.double().cumprod(1) * verified).sum(1)[chosen].sum().item()
    observed = torch.minimum(record.num_accepted, replayed.lens - 1)[chosen].sum().item()
    return {
        "blocks": int(chosen.sum()),
        "mean_verified_drafts": round((replayed.lens - 1)[chosen].float().mean().item(), 3),
        "expected_accepted": round(expected, 1),
        "observed_accepted": observed,
        "expected_over_observed": round(expected / max(1, observed), 4),
    }


def second_half(record: Record) -> Tensor:
    """bool [N]."""
    return torch.arange(len(record.step)) >= len(record.step) // 2


def judge(record: Record, per_class: bool, size: int, trims: bool = False) -> dict[str, Any]:
    """Ranking and calibration of one replay; by class where the record has both."""
    replayed = replay(record, per_class, size, trims)
    mask, label = seen(record)
    later, settled = second_half(record), replayed.known >= SETTLED
    figures: dict[str, Any] = {
        "batch_size": size,
        "refits": replayed.estimator.num_refits,
        "slope": [round(w, 4) for w in replayed.estimator.slope.tolist()],
        "intercepts": [[round(b, 3) for b in c] for c in replayed.estimator.intercepts.tolist()],
    }
    classes = {"temperature 0": record.is_greedy, "temperature 1": ~record.is_greedy}
    for name, members in classes.items():
        if members.any():
            chosen = mask & (later & members)[:, None]
            c, y = replayed.confidence[chosen], label[chosen]
            loss = torch.nn.functional.binary_cross_entropy(c.double().clamp(1e-9, 1 - 1e-9), y.double())
            figures[name] = {
                "auc": round(auc(c, y), 4),
                "log_loss": round(loss.item(), 4),
                "calibration": calibration(record, replayed, settled & members),
            }
    return figures


def history(record: Record) -> tuple[Tensor, Tensor]:
    """Per block: accepted share of the request's last block, and its running mean (weight 0.3), float32 [N, 1]."""
    last, mean = torch.full((len(record.step), 1), 0.3), torch.full((len(record.step), 1), 0.3)
    share = (record.num_accepted / (record.verify_lens - 1).clamp_min(1)).tolist()
    state: dict[int, tuple[float, float]] = {}
    for i, request in enumerate(record.request.tolist()):
        if request in state:
            last[i], mean[i] = state[request]
        before = state.get(request, (0.3, 0.3))[1]
        state[request] = (share[i], 0.7 * before + 0.3 * share[i])
    return last, mean


def more_features(record: Record) -> dict[str, dict[str, float]]:
    """Logistic fits on the first half, scored on the second: does anything beside the feature help?"""
    mask, label = seen(record)
    gamma = record.feature.shape[1]
    f = record.feature
    earlier = torch.cat((torch.zeros_like(f[:, :1]), f[:, :-1]), 1)  # the feature of the draft before
    lowest = torch.cat((torch.full_like(f[:, :1], 8.0), f[:, :-1].cummin(1).values.clamp(max=8.0)), 1)
    last, mean = history(record)
    candidates = {
        "position alone": [],
        "feature": [f],
        "feature, a slope per position": [f[..., None] * torch.eye(gamma)],
        "feature + its square": [f, f.square() / 10],
        "margin of the two best": [record.margin],
        "feature + margin": [f, record.margin],
        "feature + last outcome": [f, last.expand_as(f)],
        "feature + outcome history": [f, mean.expand_as(f)],
        "feature + feature of the draft before": [f, earlier],
        "feature + lowest feature before": [f, lowest],
        "all of these": [
            f,
            f.square() / 10,
            record.margin,
            mean.expand_as(f),
            last.expand_as(f),
            earlier,
            lowest,
        ],
    }
    later = second_half(record)[:, None]
    figures = {}
    for name, columns in candidates.items():
        one_hot = torch.eye(gamma).expand(len(f), -1, -1)
        wide = [c if c.dim() == 3 else c[..., None] for c in columns]
        x = torch.cat((one_hot, *wide), dim=-1).double()
        weights = fit_logistic(x[mask & ~later], label[mask & ~later].double())
        c, y = torch.sigmoid(x[mask & later] @ weights), label[mask & later]
        loss = torch.nn.functional.binary_cross_entropy(c.clamp(1e-9, 1 - 1e-9), y.double())
        figures[name] = {"auc": round(auc(c, y), 4), "log_loss": round(loss.item(), 4)}
    return figures


def fit_logistic(x: Tensor, y: Tensor) -> Tensor:
    """Newton with a small ridge and step halving; x float64 [M, D], y float64 [M] -> [D]."""
    weights = torch.zeros(x.shape[1], dtype=torch.float64)

    def loss(w: Tensor) -> float:
        z = x @ w
        return float((torch.nn.functional.softplus(z) - y * z).sum() + 0.5e-3 * w.square().sum())

    for _ in range(30):
        p = torch.sigmoid(x @ weights)
        hessian = (x * (p * (1 - p))[:, None]).T @ x + 1e-3 * torch.eye(x.shape[1], dtype=torch.float64)
        step = torch.linalg.solve(hessian, x.T @ (y - p) - 1e-3 * weights)
        scale = 1.0
        while loss(weights + scale * step) > loss(weights) and scale > 1e-4:
            scale /= 2
        weights = weights + scale * step
        if step.abs().max() < 1e-8:
            break
    return weights


def mix(one: Record, other: Record) -> Record:
    """Two records step by step side by side, as if they had shared their batches."""
    order = torch.argsort(torch.cat((one.step - one.step.min(), other.step - other.step.min())), stable=True)
    joined = {name: torch.cat((getattr(one, name), getattr(other, name)))[order] for name in vars(one)}
    joined["step"] = torch.cat((one.step - one.step.min(), other.step - other.step.min()))[order]
    return Record(**joined)


def report(records: dict[float, Record], batch_size: int) -> dict[str, Any]:
    """All figures."""
    figures: dict[str, Any] = {}
    for temperature, record in records.items():
        mask, label = seen(record)
        chosen = mask & second_half(record)[:, None]
        figures[f"temperature {temperature:g}"] = {
            "blocks": len(record.step),
            "batch_steps": len(torch.unique(record.step)),
            "observations": int(mask.sum()),
            "acceptance_length": round(1 + record.num_accepted.float().mean().item(), 4),
            "auc_of_the_bare_feature": round(auc(record.feature[chosen], label[chosen]), 4),
            "online": judge(record, True, batch_size),
            "online, trimming by itself": [judge(record, True, size, trims=True) for size in (32, 8, 1)],
            "offline_fits": more_features(record),
        }
    both = mix(*records.values())
    for name, per_class in (("shared", False), ("per class", True)):
        figures[f"mixed traffic, {name} coefficients"] = judge(both, per_class, 16)
    return figures


def main() -> None:
    """Records, replays, prints, writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-new", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=100.0, help="per temperature, for the recording")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--save", type=Path, help="keep the records in this file")
    parser.add_argument("--records", type=Path, help="judge records that --save kept, instead of new ones")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    if args.records:
        records = {t: Record(**r) for t, r in torch.load(args.records).items()}
    else:
        prompts = [p["token_ids"] for p in json.loads(DEMO_PROMPTS.read_text())][: args.prompts]
        cut = [p[: max(8, int(len(p) * share))] for share in (1.0, 0.75, 0.5) for p in prompts]
        recorder = Recorder(args.batch_size)
        records = {t: recorder.run(cut, t, args.max_new, args.seconds) for t in (0.0, 1.0)}
    if args.save:
        torch.save({t: vars(r) for t, r in records.items()}, args.save)
    files = {name: DEMO_MODELS[name] / "model.safetensors" for name in ("demo", "demo-dflash2")}
    figures = {
        "machine": f"{torch.get_num_threads()} CPU thread, {platform.machine()}, torch {torch.__version__}",
        "commit": commit.stdout.strip() or "unknown",
        "command": " ".join(["python", "benchmark/estimator_quality.py", *sys.argv[1:]]),
        "sha256": {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()},
        **report(records, args.batch_size),
    }
    text = json.dumps(figures, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
