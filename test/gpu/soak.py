"""2,000 requests of all sizes through one engine in this process: every slot comes back, and all of the memory.

    python test/gpu/soak.py --out FILE.json [--requests 2000] [--device cuda]

Prompts of 8 to 900 tokens, 1 to 512 tokens of output, together at most 1,024; temperatures mixed, every tenth request
aborted; verification compact, everything else as a server has it. Fails where a request ends otherwise than it should,
rows, pages or counters are not back, or the GPU's memory is more than 16 MiB above where it was after a warm-up of a
tenth of the requests.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "test")]

import torch  # noqa: E402

from flashspark.demo import DEMO_PROMPTS  # noqa: E402
from harness import Harness, Job, Result, to_message  # noqa: E402

MIB = 2**20
CONTEXT = 1024
ALLOWED_MIB = 16
OUTSTANDING = 96  # requests running or queued
ABORTED = "aborted by the soak"


def random_jobs(count: int, seed: int) -> list[Job]:
    """Jobs whose `abort` counts steps from their own arrival."""
    rng = random.Random(seed)
    text = [token for prompt in json.loads(DEMO_PROMPTS.read_text()) for token in prompt["token_ids"]]
    jobs = []
    for i in range(count):
        num_output = rng.randint(1, 512)
        num_prompt = rng.randint(8, min(900, CONTEXT - num_output))
        start = rng.randrange(len(text) - num_prompt)
        sampling = {"temperature": rng.choice([0.0, 0.0, 0.7, 1.0, 1.3]), "ignore_eos": rng.random() < 0.5}
        if rng.random() < 0.2:
            sampling["top_p"] = 0.9
        if rng.random() < 0.1:
            sampling["frequency_penalty"] = 0.3
        abort = rng.randrange(1, 60) if i % 10 == 3 else None
        jobs.append(Job(text[start : start + num_prompt], num_output, abort=abort, sampling=sampling))
    return jobs


def serve(harness: Harness, jobs: list[Job], name: str) -> int:
    """Plays the jobs, some at a time; returns the number of steps."""
    scheduler, ids = harness.scheduler, [f"{name}-{i}" for i in range(len(jobs))]
    harness.results = {}
    running: dict[str, int | None] = {}  # the step at which to abort
    step, sent, shown = 0, 0, time.monotonic()
    while sent < len(jobs) or scheduler.has_work:
        while sent < len(jobs) and len(running) < OUTSTANDING:
            job, request_id = jobs[sent], ids[sent]
            harness.results[request_id] = Result()
            running[request_id] = None if job.abort is None else step + job.abort
            scheduler.add(to_message(request_id, job))
            sent += 1
        scheduler.abort([i for i, at in running.items() if at is not None and at <= step], ABORTED)
        scheduler.step()
        running = {i: at for i, at in running.items() if harness.results[i].finish is None}
        step += 1
        if time.monotonic() - shown > 5:
            shown = time.monotonic()
            print(f"{name}: {sent - len(running)} of {len(jobs)} requests, {step} steps", flush=True)
    return step


def problems_of(harness: Harness, jobs: list[Job]) -> list[str]:
    """What is not as it should be, of the requests."""
    found = []
    for (request_id, result), job in zip(harness.results.items(), jobs, strict=True):
        finish, num_tokens = result.finish, len(result.tokens)
        if finish is None:
            found.append(f"{request_id} never ended")
        elif finish.type == "abort" and (job.abort is None or finish.message != ABORTED):
            found.append(f"{request_id} was aborted: {finish.message}")
        elif finish.type == "length" and num_tokens != job.max_new_tokens:
            found.append(f"{request_id} ended with {num_tokens} of {job.max_new_tokens} tokens")
        elif finish.type == "stop" and job.sampling["ignore_eos"]:
            found.append(f"{request_id} stopped though it ignores stop tokens")
    return found


def memory() -> dict[str, float]:
    """MiB allocated by tensors, and in use on the device, once nothing is left to run."""
    if not torch.cuda.is_available():
        return {"allocated": 0.0, "used": 0.0}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return {"allocated": torch.cuda.memory_allocated() / MIB, "used": (total - free) / MIB}


def soak(harness: Harness, num_requests: int) -> dict[str, Any]:
    """Serves and looks at what is left.

    Raises:
        AssertionError: something is not back.
    """
    serve(harness, random_jobs(max(num_requests // 10, 2), seed=1), "warm-up")
    harness.assert_everything_is_free()
    assert harness.scheduler.flush_cache()
    before, totals = memory(), dict(harness.scheduler.totals)
    jobs, started = random_jobs(num_requests, seed=2), time.monotonic()
    num_steps = serve(harness, jobs, "soak")
    seconds = time.monotonic() - started
    harness.assert_everything_is_free()
    assert harness.scheduler.flush_cache()
    after, state = memory(), harness.scheduler.state()
    problems = problems_of(harness, jobs)
    assert not problems, "\n".join(problems[:20])
    counted = {name: harness.scheduler.totals[name] - totals[name] for name in ("finished", "aborted")}
    num_aborted = sum(result.finish.type == "abort" for result in harness.results.values())
    assert counted == {"finished": num_requests - num_aborted, "aborted": num_aborted}, counted
    grown = {name: round(after[name] - before[name], 2) for name in after}
    assert all(mib <= ALLOWED_MIB for mib in grown.values()), f"memory has grown by {grown} MiB"
    return {
        "requests": num_requests,
        **counted,
        "output_tokens": sum(len(result.tokens) for result in harness.results.values()),
        "steps": num_steps,
        "seconds": round(seconds, 1),
        "retractions": state["num_retractions"],
        "memory_mib": before,
        "memory_grown_mib": grown,
    }


def main() -> int:
    """Exit code 1 where something is not back."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--max-running-requests", type=int, default=48)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    harness = Harness(
        "demo",
        "demo-dflash2",
        device=options.device,
        dtype="auto",
        disable_cuda_graph=False,
        max_running_requests=options.max_running_requests,
        max_total_tokens=options.max_running_requests * 400,  # less than they may want: some are retracted
        ragged_verify_mode="compact",
    )
    try:
        result = soak(harness, options.requests)
    except AssertionError as error:
        print(f"FAIL: {error}")
        return 1
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print("PASS:", json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
