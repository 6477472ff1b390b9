"""The engine in one process, step by step: scheduled arrivals and aborts, scripted drafts, the near-tie rule."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from flashspark.args import ServerArgs
from flashspark.args.server_args import resolve_model_path
from flashspark.engine.graph_runner import EagerRunner
from flashspark.ipc import (
    FinishReason,
    GenerateRequest,
    LogprobParams,
    RequestOutput,
    SamplingParams,
    SpeculativeStats,
    TokenLogprobs,
)
from flashspark.kernels.estimator import RowEstimator
from flashspark.scheduler import adaptive_build, build, graph_build
from flashspark.scheduler.build import build_scheduler
from flashspark.scheduler.grammar import GrammarQueue, XGrammarCompiler
from flashspark.scheduler.request import Request
from flashspark.scheduler.scheduler import Scheduler
from flashspark.speculative.adaptive import AdaptiveVerifier, VerifyMode
from flashspark.speculative.drafter import make_confidence_source
from flashspark.speculative.planner import VerifyPlanner
from flashspark.speculative.planner_input import PlannerSettings
from flashspark.speculative.types import DraftBlock
from flashspark.text.tokenizer import TextTokenizer

ON_GPU = torch.cuda.is_available()
# What takes a GPU tries itself out on a CPU: engines whose device nobody names are then built as a GPU's.
AS_ON_GPU = ON_GPU or os.environ.get("FLASHSPARK_GPU_TESTS_ON_CPU") == "1"
# On a GPU the same comparisons hold in float32, and few tests run long enough for graphs to be worth their capture.
GPU_ARGS = {"dtype": "float32", "disable_cuda_graph": True}
COLLECTED_ABOVE = 3 << 30  # bytes resident
NEAR_TIE = 1e-4  # float32: a difference is excused only where the plain run's best two logits are closer


@dataclass
class Job:
    """One request, and the step at which it arrives or is aborted."""

    prompt: Sequence[int]
    max_new_tokens: int = 32
    arrive: int = 0
    abort: int | None = None
    speculation: str = "adaptive"
    max_verify_len: int | None = None
    choice_index: int = 0
    sampling: dict = field(default_factory=dict)
    token_origin: bool = False
    message: dict = field(default_factory=dict)  # further fields of `GenerateRequest`
    logprobs: LogprobParams | None = None


@dataclass
class Result:
    """What came back for one job."""

    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # tokens of each verify step
    origins: list[str] = field(default_factory=list)
    finish: FinishReason | None = None
    stats: SpeculativeStats = field(default_factory=SpeculativeStats)
    num_retractions: int = 0
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each message that had tokens
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each message that had any


class Harness:
    """A scheduler over real models, whose outputs land in `results`."""

    def __init__(self, target: Path | str, draft: Path | str | None = None, **args) -> None:
        if draft is not None:
            speculation = {
                "speculative_draft_model_path": str(draft),
                "speculative_algorithm": algorithm_of(draft),
            }
            args = speculation | args
        args = (GPU_ARGS if AS_ON_GPU else {}) | args
        _reclaim()
        self.results: dict[str, Result] = {}
        self.args = ServerArgs(model_path=str(target), random_seed=1, decode_log_interval=10**6, **args)
        self.scheduler: Scheduler
        with as_on_gpu(AS_ON_GPU and not ON_GPU and "device" not in args):
            self.scheduler, self.ready = build_scheduler(self.args, self._receive)
        self._worker = self.scheduler._worker
        grammars = self.scheduler._grammars
        if grammars._compile is not None:  # in this process: another takes seconds to start
            vocab_size = self.ready.vocab_size
            tokenizer = TextTokenizer.load(self.args.tokenizer_path or target)
            self.scheduler._grammars = GrammarQueue(XGrammarCompiler(tokenizer, vocab_size), vocab_size)

    def _receive(self, output: RequestOutput) -> None:
        result = self.results[output.request_id]
        assert result.finish is None, "an ended request spoke again"
        result.tokens += output.token_ids
        result.steps += [len(output.token_ids)] * bool(output.token_ids)
        result.origins += output.token_origins
        result.finish, result.stats = output.finish, output.speculative
        result.num_retractions = output.num_retractions
        result.num_cached_tokens = output.num_cached_tokens
        result.logprobs += [output.logprobs] if output.logprobs is not None else []
        result.prompt_logprobs += [output.prompt_logprobs] if output.prompt_logprobs is not None else []

    def make_adaptive(self, mode: VerifyMode, table=None, grid=None, **settings) -> AdaptiveVerifier:
        """Switches to cap-accept or compact, with a source of confidence as a server would choose it."""
        worker, max_reqs = self._worker, self.scheduler.limits.max_running_requests
        source = make_confidence_source(worker.runner, max_reqs)
        assert source is not None
        planner = VerifyPlanner(
            PlannerSettings(worker.gamma, trim_without_table=mode is VerifyMode.CAP_ACCEPT, **settings),
            table,
            grid,
        )
        worker.adaptive = AdaptiveVerifier(mode, planner, source, max_reqs, worker.runner.device)
        worker.graphs = None  # a GPU's would predict with the source they were built for
        return worker.adaptive

    def request_in_row(self, row: int) -> Request:
        """Who decodes in `row` now."""
        return next(r for r in self.scheduler.residency.residents if r.row == row)

    def script_drafts(
        self, gamma: int, continuation: dict[tuple[int, ...], list[int]], shift: int = 0
    ) -> None:
        """Replaces the draft: it proposes what `continuation` says follows the prompt, each id moved by `shift`."""
        self._worker.drafter = ScriptedDrafter(self, gamma, continuation, shift)
        self._worker.gamma, self._worker.width = gamma, gamma + 1
        self._worker.graphs = None

    def run(self, jobs: Sequence[Job], max_steps: int = 100_000) -> list[Result]:
        """Plays the jobs to their ends."""
        ids = [f"job{i}" for i in range(len(jobs))]
        self.results = {request_id: Result() for request_id in ids}
        waiting, step = dict(zip(ids, jobs, strict=True)), 0
        while waiting or self.scheduler.has_work:
            for request_id, job in list(waiting.items()):
                if job.arrive <= step:
                    self.scheduler.add(to_message(request_id, waiting.pop(request_id)))
            self.scheduler.abort(
                [i for i, job in zip(ids, jobs, strict=True) if job.abort == step], "aborted by the test"
            )
            self.scheduler.step()
            step += 1
            assert step < max_steps, "the engine makes no progress"
        assert all(result.finish is not None for result in self.results.values())
        self.assert_everything_is_free()
        return [self.results[request_id] for request_id in ids]

    def assert_everything_is_free(self) -> None:
        """Rows, pages and sampling state are back in their pools."""
        state = self.scheduler.state()
        assert state["num_free_rows"] == state["max_running_requests"]
        assert state["num_free_pages"] + state["num_evictable_pages"] == state["num_pages"]
        assert state["num_cached_pages"] == state["num_evictable_pages"]
        assert state["num_used_tokens"] == state["num_sampling_rows"] == 0
        assert state["num_running_reqs"] == state["num_queue_reqs"] == state["num_grammar_queue_reqs"] == 0


@contextmanager
def as_on_gpu(forced: bool) -> Iterator[None]:
    """Where `forced`, engines are built on a CPU as a GPU's without graphs: overlapped, and steps in its pieces."""
    if not forced:
        yield
        return
    gpu, rule = torch.device("cuda"), graph_build.tier_rule
    with (
        patch.object(build, "runs_ahead", lambda device: True),
        patch.object(graph_build, "make_step_runner", lambda device, captures: EagerRunner()),
        patch.object(adaptive_build, "tier_rule", lambda args, device, width: rule(args, gpu, width)),
    ):
        yield


def algorithm_of(draft: Path | str) -> str:
    """DSPARK where the draft's config.json speaks of it."""
    config = Path(resolve_model_path(str(draft))) / "config.json"
    return "DSPARK" if config.is_file() and "DSpark" in config.read_text() else "DFLASH"


def _reclaim() -> None:
    """Frees the engines of earlier tests. They are cycles, and with a gigabyte of K/V each a few objects to Python's
    collector, which takes its time: 12 GB were seen."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    if pages * os.sysconf("SC_PAGE_SIZE") > COLLECTED_ABOVE:
        gc.collect()


class ScriptedDrafter:
    """A draft that knows the future (`shift` 0), or is always wrong (`shift` not 0)."""

    has_signal = False

    def __init__(
        self, harness: Harness, gamma: int, continuation: dict[tuple[int, ...], list[int]], shift: int
    ):
        self._harness, self.gamma, self._continuation, self._shift = harness, gamma, continuation, shift
        self._vocab_size = harness.ready.vocab_size

    def propose(
        self,
        rows: Tensor,
        greedy: Tensor,
        temperature: Tensor,
        uniforms: Tensor | None,
        with_signal: bool = False,
        estimator: RowEstimator | None = None,
    ) -> DraftBlock:
        """See `Drafter`."""
        blocks = []
        # The host's tokens are a step behind where steps overlap.
        context_lens = self._harness._worker.runner.request_rows.context_lens[rows]
        for row, context_len in zip(rows.tolist(), context_lens.tolist(), strict=True):
            request = self._harness.request_in_row(row)
            future = self._continuation[tuple(request.message.input_ids)]
            at = context_len + 1 - request.prompt_len
            block = (future[at : at + self.gamma] + [0] * self.gamma)[: self.gamma]
            blocks.append([(token + self._shift) % self._vocab_size for token in block])
        tokens = torch.tensor(blocks, device=rows.device)
        return DraftBlock(tokens, tokens[..., None], torch.ones(*tokens.shape, 1, device=rows.device))


def to_message(request_id: str, job: Job) -> GenerateRequest:
    """The job as the API would send it."""
    sampling = SamplingParams(
        max_new_tokens=job.max_new_tokens, **({"temperature": 0.0, "ignore_eos": True} | job.sampling)
    )
    return GenerateRequest(
        request_id,
        list(job.prompt),
        sampling,
        choice_index=job.choice_index,
        speculation=job.speculation,
        max_verify_len=job.max_verify_len,
        return_token_origin=job.token_origin,
        **job.message,
        logprobs=job.logprobs,
    )


def next_logits(harness: Harness, tokens: Sequence[int]) -> Tensor:
    """float32 [V] after `tokens`, from one plain forward pass."""
    from flashspark.attention.interface import RaggedQueries

    runner = harness._worker.runner
    n, page_size, device = len(tokens), runner.request_rows.page_size, runner.device
    pages = torch.arange(1, n // page_size + 2, device=device)
    assert len(pages) <= harness.scheduler.limits.num_pages
    assert harness.scheduler.flush_cache()  # what is written here belongs to nobody
    positions = torch.arange(n, device=device)
    queries = RaggedQueries(
        positions=positions,
        slots=pages[positions // page_size] * page_size + positions % page_size,
        qo_indptr=torch.tensor([0, n], device=device),
        kv_lens=torch.tensor([n], device=device),
        page_table=pages[None],
        page_size=page_size,
    )
    with torch.inference_mode():
        return runner.verify(torch.tensor(list(tokens), device=device), queries)[-1]


def near_tie_gap(harness: Harness, tokens: Sequence[int]) -> float:
    """Difference of the two best logits after `tokens`, from one plain forward pass."""
    best = next_logits(harness, tokens).topk(2).values
    return (best[0] - best[1]).item()


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs, None if equal (lengths included)."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def count_excused(
    plain: Harness, jobs: Sequence[Job], expected: list[list[int]], got: list[list[int]]
) -> int:
    """Compares greedy outputs token for token under the near-tie rule.

    Where they differ, the plain run's best two logits there must be closer than `NEAR_TIE`; the plain run is
    then started again from the other's prefix, and the comparison goes on. Returns how often that was needed.
    """
    excused = 0
    for job, plain_tokens, tokens in zip(jobs, expected, got, strict=True):
        while (at := first_difference(plain_tokens, tokens)) is not None:
            prefix = [*job.prompt, *tokens[:at]]
            gap = near_tie_gap(plain, prefix)
            assert gap < NEAR_TIE, f"token {at} differs at a logit gap of {gap:.2e}"
            excused += 1
            rest = Job(prefix + tokens[at : at + 1], len(tokens) - at - 1, sampling=job.sampling)
            tail = plain.run([rest])[0].tokens if rest.max_new_tokens else []
            plain_tokens = tokens[: at + 1] + tail
    return excused
