"""Runs every Triton kernel once under compute-sanitizer's memcheck, and beside them a kernel with a planted error.

    python scripts/gpu_memcheck.py --out FOLDER

Shapes are small and odd, so that every mask has something to keep out; each tensor is an allocation of its own and of
exactly its size (`PYTORCH_NO_CUDA_MEMORY_CACHING=1`), and indices reach the last page, slot and token. Passes if
memcheck finds nothing in the kernels and does find the planted write, one element past its tensor. A log per run.

`--run kernels` is what memcheck looks at. It also runs on a CPU, with TRITON_INTERPRET=1 in the environment.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

from flashspark.kernels import estimator  # noqa: E402
from flashspark.kernels.accept import accept_greedy, accept_sampled  # noqa: E402
from flashspark.kernels.accept_step import accept_step  # noqa: E402
from flashspark.kernels.allocate import allocate  # noqa: E402
from flashspark.kernels.block_conv import dynamic_block_conv  # noqa: E402
from flashspark.kernels.commit_rows import commit_rows  # noqa: E402
from flashspark.kernels.draft_inputs import draft_inputs  # noqa: E402
from flashspark.kernels.markov_walk import MarkovWeights, markov_walk  # noqa: E402
from flashspark.kernels.pack_rows import pack_rows  # noqa: E402
from flashspark.kernels.philox import step_uniforms  # noqa: E402
from flashspark.kernels.qk_norm_rope import HeadTurn, qk_norm_rope, qk_norm_rope_write  # noqa: E402
from flashspark.kernels.rms_norm import add_rms_norm, rms_norm  # noqa: E402
from flashspark.kernels.rope import rope_tables  # noqa: E402
from flashspark.kernels.selector import (  # noqa: E402
    selector_walk_with_confidence,
    selector_walk_with_feature,
    top_candidates,
)
from flashspark.kernels.silu_mul import silu_mul  # noqa: E402
from flashspark.kernels.target_probs import adjust_logits, sample_categorical, target_probs  # noqa: E402
from flashspark.kernels.top_tokens import best_tokens  # noqa: E402
from flashspark.kernels.triton.paged_attention import block_attention, ragged_attention  # noqa: E402

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
FOUND = 99  # memcheck's exit code where it found something
NUM_REQS, GAMMA, RANK, K = 5, 7, 12, 5
VOCAB_SIZE = 4096 + 77  # a chunk of the vocabulary, and a part of one
PAGE_SIZE, PAGES_PER_REQ = 16, 3
NUM_SLOTS = (NUM_REQS * PAGES_PER_REQ + 1) * PAGE_SIZE


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(*shape, dtype=dtype, device=DEVICE)


def integers(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def flags(*shape: int) -> Tensor:
    return rand(*shape) < 0.5


def token_ids(*shape: int) -> Tensor:
    """Random tokens, the vocabulary's last among them."""
    ids = torch.randint(VOCAB_SIZE, shape, device=DEVICE)
    ids.view(-1)[-1] = VOCAB_SIZE - 1
    return ids


def pages() -> Tensor:
    """[NUM_REQS, PAGES_PER_REQ], the pool's last page among them; the last position of each is used below."""
    return torch.arange(1, NUM_REQS * PAGES_PER_REQ + 1, device=DEVICE).view(NUM_REQS, PAGES_PER_REQ)


def caches(num_kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of the pool."""
    shape = NUM_SLOTS, num_kv_heads, dim
    return randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)


def norms(dtype: torch.dtype) -> None:
    weight = randn(200, dtype=dtype)
    rms_norm(randn(7, 200, dtype=dtype), weight, 1e-6, "triton")
    rms_norm(randn(3, 5, 24, dtype=dtype), randn(5, 24, dtype=dtype), 1e-6, "triton")
    add_rms_norm(randn(7, 200, dtype=dtype), randn(7, 200, dtype=dtype), weight, 1e-6, "triton")


def gate(dtype: torch.dtype) -> None:
    silu_mul(randn(3, 2 * 1501, dtype=dtype), "triton")


def heads(dtype: torch.dtype) -> None:
    num_rows, num_heads, num_kv_heads, dim = 6, 6, 2, 24
    qkv = randn(num_rows, num_heads + 2 * num_kv_heads, dim, dtype=dtype)
    weight = randn(num_heads + num_kv_heads, dim, dtype=dtype)
    positions = integers([[0], [1], [5], [700], [3], [40000]])
    tables = rope_tables(positions, randn(dim), 1.0, dtype, "triton")
    qk_norm_rope(qkv, weight, 1e-6, *tables, num_kv_heads, 1.0, "triton")
    slots = integers([0, 0, 17, 40, 2, NUM_SLOTS - 1])
    pool = caches(num_kv_heads, dim, dtype)
    qk_norm_rope_write(qkv, weight, 1e-6, *tables, slots, *pool, 1.0, "triton")


def verify_attention(dtype: torch.dtype) -> None:
    """Contexts that end with their pages, rows of nobody, absent slots full of nonsense; one share and four."""
    lens, counts = [1, PAGE_SIZE * PAGES_PER_REQ, 33], [1, 8, 3]
    nonsense = 10**9
    indptr = integers([0, 1, 9, 12, nonsense, -5])
    kv_lens = integers([*lens, nonsense, -3])
    table = pages()
    table[3:] = nonsense
    table[0, 1:] = nonsense  # pages that a request of one position does not have
    for dim, splits in ((24, 1), (128, 4)):
        q = randn(sum(counts) + 2, 8, dim, dtype=dtype)
        common = indptr, kv_lens, integers([3]), table, PAGE_SIZE, 0.2, 8, splits
        k, v = caches(2, dim, dtype)
        ragged_attention(q, k, v, *common)
        tables = rope_tables(integers([[n] for n in range(len(q))]), randn(dim), 1.0, dtype, "triton")
        heads = randn(len(q), 8 + 2 * 2, dim, dtype=dtype)
        turn = HeadTurn(randn(8 + 2, dim, dtype=dtype), 1e-6, *tables)
        ragged_attention(heads, k, v, *common, turn=turn)


def prefill_attention(dtype: torch.dtype) -> None:
    """Several tiles of rows, and fewer rows than a tile has."""
    for count in (PAGE_SIZE * PAGES_PER_REQ - 1, 3):
        q = randn(count, 8, 64, dtype=dtype)
        indptr, lens = integers([0, count]), integers([count + 1])
        k, v = caches(2, 64, dtype)
        table = pages()[-1:].clone()
        ragged_attention(q, k, v, indptr, lens, None, table, PAGE_SIZE, 0.2, count, is_prefill=True)


def draft_attention(dtype: torch.dtype) -> None:
    lens = integers([PAGE_SIZE * PAGES_PER_REQ, 0, 17, 1, 10**9])
    width = GAMMA + 1
    for dim, causal, window, splits in ((128, False, None, 1), (24, True, 9, 4)):
        q, k, v = (randn(NUM_REQS, width, n, dim, dtype=dtype) for n in (8, 2, 2))
        common = lens, integers([4]), pages(), PAGE_SIZE, 0.2, causal, window, splits
        k_cache, v_cache = caches(2, dim, dtype)
        block_attention(q, k, v, k_cache, v_cache, *common)


def convolution(dtype: torch.dtype) -> None:
    y, base = randn(3, 5, 200, dtype=dtype), randn(2, 2, 200, dtype=dtype)
    delta = randn(3, 5, 2 * 2 * 25, dtype=dtype)
    dynamic_block_conv(y, base, delta, 0, None, "triton")
    dynamic_block_conv(y, base, delta, 1, randn(3, 5, 200, dtype=dtype), "triton")


def largest_logits(dtype: torch.dtype) -> None:
    logits = randn(6, VOCAB_SIZE, dtype=dtype)
    best_tokens(logits, "triton")
    top_candidates(logits, 16, integers([3, VOCAB_SIZE - 1]), "triton")


def selector(dtype: torch.dtype) -> None:
    walk = (
        randn(NUM_REQS, GAMMA, K),
        token_ids(NUM_REQS, GAMMA, K),
        token_ids(NUM_REQS),
        randn(NUM_REQS, GAMMA, RANK, dtype=dtype),
        randn(VOCAB_SIZE, RANK, dtype=dtype),
        randn(VOCAB_SIZE, RANK, dtype=dtype),
        rand(NUM_REQS) + 0.1,
        flags(NUM_REQS),
        rand(NUM_REQS, GAMMA, dtype=torch.float64),
        True,
    )
    selector_walk_with_feature(*walk, "triton")
    selector_walk_with_confidence(*walk, *predictor(), "triton")


def predictor() -> tuple[Tensor, estimator.RowEstimator]:
    """Request rows, the last one and padding among them, and an estimator of so many."""
    slope, intercepts = torch.ones(2, device=DEVICE), torch.ones(2, GAMMA, device=DEVICE)
    kinds, values = integers([0, 1, 1, 0, 1, 0]), torch.zeros(NUM_REQS + 1, 2, GAMMA, device=DEVICE)
    return integers([5, 0, 2, 4, -1]), estimator.RowEstimator(kinds, slope, intercepts, values)


def markov() -> None:
    weights = MarkovWeights("vanilla", randn(VOCAB_SIZE, RANK), randn(RANK, VOCAB_SIZE))
    for noise in (None, rand(NUM_REQS, 2, dtype=torch.float64)):
        greedy = flags(NUM_REQS) | (noise is None)
        logits, temperature = randn(NUM_REQS, 2, VOCAB_SIZE), rand(NUM_REQS) + 0.1
        markov_walk(logits, token_ids(NUM_REQS), weights, None, temperature, greedy, noise, None, "triton")


def planning() -> None:
    floors, caps = integers([1] * NUM_REQS), integers([GAMMA + 1] * NUM_REQS)
    for budget in (11, integers([11])[0]):
        allocate(rand(NUM_REQS, GAMMA), budget, floors, caps, 0.01, "triton")
    lens = integers([GAMMA + 1, 1, 3, 8, 2])
    context = integers([PAGE_SIZE * PAGES_PER_REQ - 8, 0, 15, 16, 46])  # the last rows end with their pages
    rows, anchors = integers(list(range(NUM_REQS))), token_ids(NUM_REQS)
    drafts = token_ids(NUM_REQS, GAMMA)
    at_most = torch.full_like(context, PAGE_SIZE * PAGES_PER_REQ)
    for least_run, max_lens in ((None, None), (lens // 2, at_most)):
        places = rows, anchors, context, pages(), PAGE_SIZE, drafts, lens, 24, True, None
        pack_rows(*places, least_run, max_lens, "triton")
    draft_inputs(rows, anchors, context, pages(), GAMMA + 1, VOCAB_SIZE - 1, "triton")
    commit_rows(context, anchors, rows, token_ids(NUM_REQS, GAMMA + 1), lens, "triton")
    step_uniforms(rows, rows, rows, GAMMA + 1, "triton")


def distribution() -> None:
    logits, ones = randn(3, VOCAB_SIZE), torch.ones(3, device=DEVICE)
    target_probs(logits, ones, integers([0, 50, 7]), 0.9 * ones, 0.01 * ones, "triton")
    counts = torch.ones(3, VOCAB_SIZE, dtype=torch.int32, device=DEVICE)
    seen, suppressed = flags(3, VOCAB_SIZE), flags(3, VOCAB_SIZE)
    bias = randn(3, VOCAB_SIZE)
    adjust_logits(logits, counts, seen, 1.1 * ones, 0.1 * ones, ones, bias, suppressed, "triton")
    sample_categorical(rand(3, VOCAB_SIZE), rand(3, dtype=torch.float64), "triton")


def acceptance() -> None:
    lens, width = integers([GAMMA + 1, 1, 3, 8, 2]), GAMMA + 1
    num_rows = int(lens.sum())
    accept_greedy(token_ids(NUM_REQS, width), token_ids(NUM_REQS, GAMMA), lens, "triton")
    starts = lens.cumsum(0) - lens
    block_rows = starts[:, None] + torch.minimum(torch.arange(width, device=DEVICE), lens[:, None] - 1)
    drafts = token_ids(NUM_REQS, GAMMA)
    best_ids, best_logits, rows = token_ids(num_rows), randn(num_rows), integers([3, 0, 4, 4, 1])
    for rows_of_block, drafted, cutoff, simulated in (
        (block_rows, drafts, lens, None),
        (block_rows, drafts, lens, lens - 1),
        (block_rows[:, :1], drafts[:, :0], lens // lens, None),
    ):
        context, anchors, steps = (integers(list(range(NUM_REQS))) for _ in range(3))  # the last is scratch
        block = best_ids, best_logits, rows_of_block, drafted, cutoff
        accept_step(*block, rows, context, anchors, steps, NUM_REQS - 1, simulated, "triton")
    probs = torch.softmax(randn(num_rows, VOCAB_SIZE), -1)
    uniforms = rand(NUM_REQS, width, 2, dtype=torch.float64)
    for ids, q in (
        (token_ids(NUM_REQS, GAMMA, K), rand(NUM_REQS, GAMMA, K)),
        (None, torch.softmax(randn(NUM_REQS, GAMMA, VOCAB_SIZE), -1)),
    ):
        args = probs, block_rows, drafts, ids, q, lens, uniforms[:, :-1, 0], uniforms[..., 1]
        accept_sampled(*args, "triton")


def learning() -> None:
    feature, prediction = randn(NUM_REQS, GAMMA), rand(NUM_REQS, GAMMA)
    classes, lens = integers([0, 1, 0, 1, 1]), integers([8, 1, 3, 8, 2])
    slope, intercepts = torch.ones(2, device=DEVICE), torch.ones(2, GAMMA, device=DEVICE)
    moments = torch.zeros(2, estimator.NUM_MOMENTS, GAMMA, dtype=torch.float64, device=DEVICE)
    estimator.predict(feature, classes, slope, intercepts, "triton")
    rows, model = predictor()
    estimator.predict_rows(feature, rows, *model, "triton")
    estimator.observe(moments, feature, prediction, classes, lens - 1, lens, flags(NUM_REQS), "triton")
    estimator.refit(slope, intercepts, moments, implementation="triton")


BY_DTYPE: list[Callable[[torch.dtype], None]] = [
    *(norms, gate, heads, verify_attention, prefill_attention, draft_attention, convolution),
    *(largest_logits, selector),
]
OTHERS: list[Callable[[], None]] = [markov, planning, distribution, acceptance, learning]


def run_kernels() -> None:
    """Every kernel once, with bfloat16 and float32 where both are used; prints each by name."""
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        for case in BY_DTYPE:
            finish(f"{case.__name__} {dtype}", case, dtype)
    for plain in OTHERS:
        finish(plain.__name__, plain)


def finish(name: str, case: Callable[..., None], *args: torch.dtype) -> None:
    """Runs a case to its end on the device, so that an error is told beside its name."""
    case(*args)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print(f"ran {name}", flush=True)


@triton.jit
def _one_past_kernel(out_ptr, size, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(out_ptr + index, 1.0, mask=index <= size)  # `<` would be right


def run_planted() -> None:
    """Writes one element past a tensor of 1,000."""
    out = torch.zeros(1000, device="cuda")
    _one_past_kernel[(1,)](out, 1000, BLOCK=1024)
    torch.cuda.synchronize()
    print("ran the planted write", flush=True)


def sanitizer() -> list[str]:
    """The command line of memcheck.

    Raises:
        SystemExit: there is none.
    """
    path = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if path is None:
        raise SystemExit("FAIL: compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    command = [path, "--tool", "memcheck", "--error-exitcode", str(FOUND), "--report-api-errors", "no"]
    told = subprocess.run([path, "--help"], capture_output=True, text=True, check=False).stdout
    if "--padding" in told:  # so that what runs far past a tensor does not land in the next one
        command += ["--padding", "4096"]
    return command


def look(memcheck: list[str], run: str, log: Path, limit_s: float) -> tuple[int, str]:
    """Exit code and output of one run under `memcheck`; the output is also written to `log`."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    command = [*memcheck, sys.executable, str(Path(__file__).resolve()), "--run", run]
    started = time.monotonic()
    with log.open("w+") as file:
        try:
            code = subprocess.run(
                command, env=env, stdout=file, stderr=subprocess.STDOUT, timeout=limit_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
            file.write(f"\nstopped after {limit_s:.0f} s\n")
        file.seek(0)
        output = file.read()
    print(f"{run}: exit code {code} after {time.monotonic() - started:.1f} s, {log}", flush=True)
    return code, output


def check(out: Path, limit_s: float) -> bool:
    """Both runs side by side; prints what they show, and the end of the log of one that is not as it should be."""
    out.mkdir(parents=True, exist_ok=True)
    memcheck = sanitizer()
    print(" ".join(memcheck), flush=True)
    names = ("kernels", "planted")
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(look, memcheck, name, out / f"memcheck_{name}.log", limit_s) for name in names]
        (code, output), (planted_code, planted) = (run.result() for run in runs)
    is_clean = code == 0 and "ERROR SUMMARY: 0 errors" in output
    is_caught = planted_code == FOUND and "Invalid __global__ write" in planted
    for good, text in ((is_clean, output), (is_caught, planted)):
        if not good:
            print(text[-3000:])
    print(f"{'PASS' if is_clean else 'FAIL'}: memcheck finds nothing in the kernels")
    print(f"{'PASS' if is_caught else 'FAIL'}: memcheck finds the planted write past a tensor's end")
    return is_clean and is_caught


def main() -> int:
    """Exit code 0 where all is as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--run", choices=("kernels", "planted"), help="only this, here, without memcheck")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the logs")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds a run may take")
    options = parser.parse_args()
    if options.run == "kernels":
        run_kernels()
    elif options.run == "planted":
        run_planted()
    else:
        return 0 if check(options.out, options.limit) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
