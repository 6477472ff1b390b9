"""A training loop that is scheduled by the wall clock, logs, checkpoints and takes up where it was stopped."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .optim import MuonAdamW, lr_factor

_START = time.monotonic()


def log(message: str) -> None:
    """Print with the seconds since start."""
    print(f"[{time.monotonic() - _START:7.1f}] {message}", flush=True)


@dataclass(frozen=True)
class LoopPlan:
    """How long a phase runs (over all its resumptions) and where its checkpoint lies."""

    name: str
    seconds: float
    warmup: float
    final_lr: float
    checkpoint: Path
    log_every_s: float = 15.0
    checkpoint_every_s: float = 120.0
    max_steps: int | None = None


def _save(plan: LoopPlan, model: nn.Module, optimizer: MuonAdamW, steps: int, elapsed: float) -> None:
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "steps": steps,
        "elapsed": elapsed,
    }
    temporary = plan.checkpoint.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(plan.checkpoint)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def run(
    plan: LoopPlan,
    model: nn.Module,
    optimizer: MuonAdamW,
    step: Callable[[], tuple[Tensor, dict[str, Tensor]]],
    stop_at: float = math.inf,
) -> dict[str, Any]:
    """Train until the phase's seconds are used up, or until `stop_at` (time.monotonic), whichever comes first.

    `step` returns the loss and figures to log. Returns steps, seconds, whether the phase is complete, last figures.
    """
    device = next(model.parameters()).device
    steps, elapsed = 0, 0.0
    if plan.checkpoint.exists():
        state = torch.load(plan.checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        steps, elapsed = state["steps"], state["elapsed"]
        log(f"{plan.name}: resumed at step {steps}, {elapsed:.0f} s")
    loss, figures = step()  # compiles; its gradients are thrown away so that compilation stays off the clock
    loss.backward()
    optimizer.adam.zero_grad(set_to_none=True)
    model.zero_grad(set_to_none=True)
    _synchronise(device)
    log(f"{plan.name}: first step done, loss {loss.item():.4f}")
    begin = time.monotonic() - elapsed
    last_log = last_save = time.monotonic()
    last_steps = steps
    while True:
        now = time.monotonic()
        progress = (now - begin) / max(plan.seconds, 1e-6)
        if plan.max_steps is not None:
            progress = max(progress, steps / plan.max_steps)
        if progress >= 1.0 or now >= stop_at:
            break
        loss, figures = step()
        loss.backward()
        optimizer.step(lr_factor(progress, plan.warmup, plan.final_lr))
        steps += 1
        if steps % 8 == 0:
            _synchronise(device)
        if now - last_log > plan.log_every_s:
            value = loss.item()
            rate = (steps - last_steps) / (now - last_log)
            shown = ", ".join(f"{k} {_short(v)}" for k, v in figures.items())
            log(
                f"{plan.name}: step {steps} loss {value:.4f} {rate:.1f} steps/s progress {progress:.2f} {shown}"
            )
            if not math.isfinite(value):
                raise RuntimeError(f"{plan.name}: the loss is not finite at step {steps}")
            last_log, last_steps = now, steps
        if now - last_save > plan.checkpoint_every_s:
            _save(plan, model, optimizer, steps, now - begin)
            last_save = now
    _synchronise(device)
    elapsed = time.monotonic() - begin
    _save(plan, model, optimizer, steps, elapsed)
    complete = elapsed >= plan.seconds or (plan.max_steps is not None and steps >= plan.max_steps)
    result: dict[str, Any] = {
        "steps": steps,
        "seconds": round(elapsed, 1),
        "complete": complete,
        "loss": loss.item(),
    }
    result.update({k: v.tolist() for k, v in figures.items()})
    log(f"{plan.name}: {json.dumps(result)}")
    return result


def _short(value: Tensor) -> str:
    numbers = value.flatten().tolist()
    return " ".join(f"{n:.3f}" for n in numbers)
