"""What each running request asks of the target's distribution, by request row.

Plain greedy requests cost nothing here. Requests that sample, or whose logits are adjusted (penalties, bias,
`min_new_tokens`), are listed on the host, which knows who they are without asking the device.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashspark.kernels.philox import step_uniforms
from flashspark.kernels.target_probs import adjust_logits, target_probs
from flashspark.upload import upload

GREEDY_TEMPERATURE = 1e-5  # at or below it a request is greedy; one constant everywhere


@dataclass(frozen=True)
class LogprobRule:
    """Which log-probabilities of a position one request wants besides its token's own."""

    num_top: int = 0  # the most likely tokens
    token_ids: tuple[int, ...] = ()  # these


@dataclass(frozen=True)
class RowSampling:
    """Sampling settings of one request; neutral defaults. `stop_ids` are suppressed below `min_new_tokens`."""

    seed: int
    choice_index: int = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    min_new_tokens: int = 0
    stop_ids: Sequence[int] = ()
    logprobs: LogprobRule | None = None  # None: none are reported

    @property
    def is_greedy(self) -> bool:
        """Argmax instead of a draw."""
        return self.temperature <= GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits change before the argmax or the draw."""
        penalised = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (
            1.0,
            0.0,
            0.0,
        )
        return penalised or bool(self.logit_bias) or (self.min_new_tokens > 0 and len(self.stop_ids) > 0)

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p cut the distribution."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True)
class _Adjustment:
    """Vocabulary-wide state of one request that adjusts logits; `output_counts` advances with every commit."""

    output_counts: Tensor  # int32 [V]
    prompt_seen: Tensor  # bool [V]
    bias: Tensor  # float32 [V]
    stops: Tensor  # bool [V]


@dataclass(frozen=True)
class StepSampling:
    """The batch's view of one step. Index tensors are None where nobody is meant."""

    greedy: Tensor  # bool [R]
    temperature: Tensor  # float32 [R]; 1 for greedy rows
    sampled: Tensor | None  # int64 [S], batch indices of requests that draw
    adjusted: Tensor | None  # int64 [A], batch indices of requests whose logits change
    adjusted_list: list[int]  # the same on the host
    adjusted_rows: list[int]  # their request rows
    adjusted_among_sampled: tuple[list[int], list[int]]  # who does both: places in `sampled`, in `adjusted`
    truncates: bool  # whether any drawing request cuts its distribution
    uniforms: Tensor | None  # float64 [R, W, 3]: draft, accept, following token; None when nobody draws
    adjusted_places: dict[int, int]  # batch index to place in `adjusted`
    reported: dict[int, LogprobRule]  # by batch index, of requests whose log-probabilities are wanted


class SamplingRows:
    """Sampling settings of the running requests, by request row."""

    def __init__(self, max_reqs: int, vocab_size: int, device: torch.device) -> None:
        def zeros(dtype: torch.dtype) -> Tensor:  # the last row is scratch, as in `RequestRows`
            return torch.zeros(max_reqs + 1, dtype=dtype, device=device)

        self._vocab_size, self._device = vocab_size, device
        self._params: dict[int, RowSampling] = {}
        self._adjustments: dict[int, _Adjustment] = {}
        self._special_rows: set[int] = set()  # of requests that draw, adjust logits or want log-probabilities
        self._seeds, self._choices, self._steps = (zeros(torch.int64) for _ in range(3))
        self._prompt_lens, self._min_new_tokens, self._top_k = (zeros(torch.int64) for _ in range(3))
        self._greedy = torch.ones(max_reqs + 1, dtype=torch.bool, device=device)
        self._temperature, self._top_p, self._min_p = (zeros(torch.float32) for _ in range(3))
        self._temperature.fill_(1.0)
        self._repetition, self._frequency, self._presence = (zeros(torch.float32) for _ in range(3))

    def assign(
        self,
        row: int,
        params: RowSampling,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        step_index: int,
    ) -> None:
        """Takes over `row`. `output_ids` and `step_index` are non-empty and positive after a retraction."""
        self._params[row] = params
        self._seeds[row], self._choices[row], self._steps[row] = params.seed, params.choice_index, step_index
        self._prompt_lens[row], self._min_new_tokens[row] = len(prompt_ids), params.min_new_tokens
        self._greedy[row] = params.is_greedy
        self._temperature[row] = 1.0 if params.is_greedy else params.temperature
        self._top_k[row], self._top_p[row], self._min_p[row] = params.top_k, params.top_p, params.min_p
        self._repetition[row] = params.repetition_penalty
        self._frequency[row], self._presence[row] = params.frequency_penalty, params.presence_penalty
        if params.adjusts_logits or not params.is_greedy or params.logprobs is not None:
            self._special_rows.add(row)
        if params.adjusts_logits:
            self._adjustments[row] = self._make_adjustment(params, prompt_ids, output_ids)

    def release(self, row: int) -> None:
        """Gives `row` back."""
        self._params.pop(row, None)  # absent where `assign` failed
        self._adjustments.pop(row, None)
        self._special_rows.discard(row)

    @property
    def steps(self) -> Tensor:
        """Index of each row's next step, int64 [max_reqs + 1]; a commit adds 1."""
        return self._steps

    @property
    def num_assigned(self) -> int:
        """Rows in use."""
        return len(self._params)

    def begin_step(
        self, rows: Tensor, row_list: Sequence[int], width: int, constrained: Container[int] = ()
    ) -> StepSampling:
        """Who draws and who adjusts in this step, and the step's uniforms. `constrained` are the batch indices of
        requests with a grammar, which changes logits too."""
        greedy = [self._params[row].is_greedy for row in row_list]
        sampled = [i for i, is_greedy in enumerate(greedy) if not is_greedy]
        adjusted = [i for i, row in enumerate(row_list) if row in self._adjustments or i in constrained]
        both = [i for i in adjusted if not greedy[i]]

        def index(members: list[int]) -> Tensor | None:
            return upload(members, self._device) if members else None

        is_greedy, temperature = self.draft_settings(rows)
        return StepSampling(
            greedy=is_greedy,
            temperature=temperature,
            sampled=index(sampled),
            adjusted=index(adjusted),
            adjusted_list=adjusted,
            adjusted_rows=[row_list[i] for i in adjusted],
            adjusted_among_sampled=([sampled.index(i) for i in both], [adjusted.index(i) for i in both]),
            truncates=any(self._params[row_list[i]].truncates for i in sampled),
            uniforms=self.uniforms(rows, width) if sampled else None,
            adjusted_places={i: place for place, i in enumerate(adjusted)},
            reported={
                i: rule for i, row in enumerate(row_list) if (rule := self._params[row].logprobs) is not None
            },
        )

    def uniforms(self, rows: Tensor, width: int) -> Tensor:
        """This step's uniforms of `rows` int64 [R]: float64 [R, width, 3], as in `StepSampling`."""
        return step_uniforms(self._seeds[rows], self._choices[rows], self._steps[rows], width)[..., :3]

    def draft_settings(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What a drafter asks of `rows` int64 [R]: who is greedy, bool [R], and the temperature, float32 [R]."""
        return self._greedy[rows], self._temperature[rows]

    def is_plain(self, row_list: Sequence[int]) -> bool:
        """Whether these rows are all greedy, with nothing adjusted and nothing reported."""
        return self._special_rows.isdisjoint(row_list)

    def draws(self, row_list: Sequence[int]) -> bool:
        """Whether somebody among these rows is not greedy."""
        return any(not self._params[row].is_greedy for row in row_list)

    def dithered(self, rows: Tensor, mean: float) -> Tensor:
        """Integers, one of the two nearest to `mean`, whose mean over the steps of each of `rows` it is: int64 [R]."""
        steps = self._steps[rows].double()
        return (((steps + 1) * mean).floor() - (steps * mean).floor()).long()

    def adjust(self, rows: list[int], logits: Tensor, drafts: Tensor, context_lens: Tensor) -> Tensor:
        """Adjusted logits along the drafted prefix of each request; as they are, where it asks for nothing.

        Row i sees the counts of the output and of the i drafts before it, and suppresses stop ids while fewer
        than `min_new_tokens` tokens would stand before its own.

        Args:
            rows: A request rows.
            logits: float32 [A, W, V], which may be changed in place.
            drafts: int64 [A, W - 1].
            context_lens: int64 [A], n before the step.
        """
        members = [i for i, row in enumerate(rows) if row in self._adjustments]
        if len(members) < len(rows):
            if members:
                chosen = upload(members, self._device)
                logits[chosen] = self.adjust(
                    [rows[i] for i in members], logits[chosen], drafts[chosen], context_lens[chosen]
                )
            return logits
        num_reqs, width, vocab_size = logits.shape
        state = [self._adjustments[row] for row in rows]
        index = upload(rows, self._device)
        drafted = torch.zeros(num_reqs, width, vocab_size, dtype=torch.int32, device=self._device)
        drafted[:, 1:].scatter_(2, drafts[..., None], 1)
        counts = torch.stack([s.output_counts for s in state])[:, None] + drafted.cumsum(1)
        output_len = context_lens + 1 - self._prompt_lens[index]
        row_output_len = output_len[:, None] + torch.arange(width, device=self._device)
        below_minimum = row_output_len < self._min_new_tokens[index, None]
        suppressed = below_minimum[..., None] & torch.stack([s.stops for s in state])[:, None]

        def per_row(vector: Tensor) -> Tensor:
            return vector[index].repeat_interleave(width)

        def flat(matrix: Tensor) -> Tensor:
            return matrix[:, None].expand(-1, width, -1).reshape(-1, vocab_size)

        return adjust_logits(
            logits.reshape(-1, vocab_size),
            counts.reshape(-1, vocab_size),
            flat(torch.stack([s.prompt_seen for s in state])),
            per_row(self._repetition),
            per_row(self._frequency),
            per_row(self._presence),
            flat(torch.stack([s.bias for s in state])),
            suppressed.reshape(-1, vocab_size),
        ).view(num_reqs, width, vocab_size)

    def probs(self, rows: Tensor, logits: Tensor, truncates: bool) -> Tensor:
        """The serving distribution of each logits row: `rows` int64 [N], request rows, `logits` [N, V] -> [N, V].

        `truncates` false promises that nobody who draws uses top-k, top-p or min-p, and saves a sort.
        """
        temperature = self._temperature[rows]
        if not truncates:
            return torch.softmax(logits / temperature[:, None], dim=-1)
        return target_probs(logits, temperature, self._top_k[rows], self._top_p[rows], self._min_p[rows])

    def commit(self, rows: Tensor, step: StepSampling, tokens: Tensor, num_tokens: Tensor) -> None:
        """Counts committed tokens [R, W] (the first `num_tokens[r]` of each) and moves to the next step index."""
        self._steps[rows] += 1
        if step.adjusted is None:
            return
        kept = torch.arange(tokens.shape[1], device=self._device) < num_tokens[step.adjusted, None]
        counted = (tokens[step.adjusted], kept.to(torch.int32))
        for row, ids, ones in zip(step.adjusted_rows, *counted, strict=True):
            if row in self._adjustments:
                self._adjustments[row].output_counts.scatter_add_(0, ids, ones)

    def _make_adjustment(
        self, params: RowSampling, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> _Adjustment:
        def ids(members: Sequence[int]) -> Tensor:
            return torch.tensor(list(members), dtype=torch.int64, device=self._device)

        def flags(members: Sequence[int]) -> Tensor:
            return torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device).index_fill_(
                0, ids(members), True
            )

        bias = torch.zeros(self._vocab_size, device=self._device)
        if params.logit_bias:
            bias[ids(list(params.logit_bias))] = torch.tensor(
                list(params.logit_bias.values()), device=self._device
            )
        return _Adjustment(
            output_counts=torch.bincount(ids(output_ids), minlength=self._vocab_size).to(torch.int32),
            prompt_seen=flags(prompt_ids),
            bias=bias,
            stops=flags(params.stop_ids),
        )
