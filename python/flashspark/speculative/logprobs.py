"""Log-probabilities of committed tokens and of prompts, computed for the rows of those who ask and for no other.

Of output tokens they are log softmax of what the token was chosen from: the target's logits, adjusted as the
request wants (penalties, bias, suppressed ids), over its temperature; top-k, top-p and min-p are not in them.
Of prompt tokens they are the log softmax of the target's bare logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashspark.models.qwen3 import Qwen3

from .sampling import LogprobRule, StepSampling
from .types import Accepted, Logprobs, RaggedLayout

LOGITS_AT_ONCE = 1 << 24  # of a prompt's rows: 64 MiB, however long the chunk and large the vocabulary
_LOWEST = torch.finfo(torch.float32).min  # stands for -inf, which JSON does not have


@dataclass(frozen=True)
class PromptRows:
    """Rows of a prefill whose next tokens are to be reported."""

    rows: range  # of the prefill's packed rows
    next_ids: Sequence[int]  # the token that follows each
    rule: LogprobRule


def gather_logprobs(
    logits: Tensor, tokens: Tensor, rules: Sequence[LogprobRule], counts: Sequence[int]
) -> list[Logprobs]:
    """What `rules` ask of the distributions that `logits` [N, V] stand for; one transfer to the host.

    Args:
        tokens: int64 [N], the token that each row is asked about.
        rules, counts: by request: what is asked of it, and how many rows, one request after the other, are its own.
    """
    logprobs = torch.log_softmax(logits, dim=-1).clamp_(min=_LOWEST)  # leaves NaN alone
    num_top = max(rule.num_top for rule in rules)
    num_listed = max(len(rule.token_ids) for rule in rules)
    columns = [logprobs.gather(1, tokens[:, None])]
    if num_top:
        top = logprobs.topk(num_top, dim=-1)
        columns += [top.values, top.indices]
    if num_listed:
        padded = [[*rule.token_ids] + [0] * (num_listed - len(rule.token_ids)) for rule in rules]
        of_row = torch.tensor(padded).repeat_interleave(torch.tensor(counts), dim=0)
        columns.append(logprobs.gather(1, of_row.to(logits.device)))
    # Ids up to 2^53 are exact in float64.
    table: list[list[float]] = torch.cat([column.double() for column in columns], dim=1).tolist()
    found, at = [], 0
    for rule, count in zip(rules, counts, strict=True):
        found.append(_of_rows(table[at : at + count], rule, num_top))
        at += count
    return found


def _of_rows(table: list[list[float]], rule: LogprobRule, num_top: int) -> Logprobs:
    top, ids = 1, 1 + num_top
    listed, num_listed = 1 + 2 * num_top, len(rule.token_ids)
    return Logprobs(
        values=[row[0] for row in table],
        top_values=[row[top : top + rule.num_top] for row in table] if rule.num_top else [],
        top_ids=[[int(i) for i in row[ids : ids + rule.num_top]] for row in table] if rule.num_top else [],
        listed_values=[row[listed : listed + num_listed] for row in table] if num_listed else [],
    )


def committed_logprobs(
    logits: Tensor, layout: RaggedLayout, accepted: Accepted, step: StepSampling, scaled: bool
) -> dict[int, Logprobs]:
    """Of the tokens that a step commits, by batch index, for the requests in `step.reported`.

    Args:
        logits: float32 [M, V], the packed verify rows.
        scaled: whether temperature is in them.
    """
    members = list(step.reported)
    counts: list[int] = accepted.num_tokens[members].tolist()
    rows = []
    for i, count in zip(members, counts, strict=True):
        if i in step.adjusted_places:
            assert accepted.adjusted_logits is not None
            chosen = accepted.adjusted_logits[step.adjusted_places[i], :count]
        else:
            chosen = logits[layout.block_rows[i, :count]]
        rows.append(chosen / step.temperature[i] if scaled else chosen)
    tokens = torch.cat([accepted.tokens[i, :count] for i, count in zip(members, counts, strict=True)])
    found = gather_logprobs(torch.cat(rows), tokens, list(step.reported.values()), counts)
    return dict(zip(members, found, strict=True))


def prompt_logprobs(target: Qwen3, hidden: Tensor, wanted: Sequence[PromptRows]) -> list[Logprobs]:
    """Of the tokens that follow the wanted rows of a prefill, one entry per member of `wanted`.

    Args:
        hidden: [M, H], final-normed, of every row of the prefill.
    """
    rows_at_once = max(1, LOGITS_AT_ONCE // target.config.vocab_size)
    found = []
    for prompt in wanted:
        of_prompt = Logprobs()
        for start in range(0, len(prompt.rows), rows_at_once):
            rows, next_ids = (
                prompt.rows[start : start + rows_at_once],
                prompt.next_ids[start : start + rows_at_once],
            )
            logits = target.logits(hidden[rows.start : rows.stop])
            tokens = torch.tensor(next_ids, device=logits.device)
            of_prompt += gather_logprobs(logits, tokens, [prompt.rule], [len(rows)])[0]
        found.append(of_prompt)
    return found
