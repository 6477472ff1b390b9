"""What a step did for each of its requests: the component `reqs` of the record feed, in SGLang's fields."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from flashspark.speculative.step_results import StepResults
from flashspark.speculative.types import StepBatch

from .request import Request


class RequestRecord(msgspec.Struct, frozen=True):
    """One request in one step. Lengths count block rows, the anchor included, unless they say drafts."""

    rid: str
    req_pool_index: int
    prefix_len: int  # committed before the step: the anchor's position
    verify_len: int  # rows that could be accepted
    acc_len: int  # tokens the step committed: accepted drafts and the one that follows
    correct_drafts: int  # acc_len - 1
    num_output_tokens: int  # of acc_len, those up to the request's end
    # Drafts that the target would have accepted and the verify length kept out. None where only rows that were not
    # computed could tell: in compact, where every verified draft was accepted and more had been drafted.
    cap_trim: int | None
    bonus_token: int  # the token that follows the accepted drafts
    floor: int | None  # rows it had for certain; None in static mode
    cap: int  # most rows it could use
    draft_tokens: list[int] | None = None  # [gamma]; None where nothing was drafted for it
    confidence: list[float] | None = None  # [gamma]; None without a plan too
    survival: list[float] | None = None  # [gamma], running product of the confidence


def request_records(
    requests: Sequence[Request],
    batch: StepBatch,
    caps: Sequence[int],
    results: StepResults,
    num_kept: Sequence[int],
    num_uncapped: Sequence[int] | None,
) -> list[RequestRecord]:
    """Records of a step that was just handed out.

    Args:
        caps: [R], rows that each could use, as it turned out.
        results: with drafts.
        num_kept: [R], tokens each request took; -1 where the step gave it nothing usable, which leaves it out.
        num_uncapped: [R], drafts each would have accepted without a cutoff; None where that is not known.
    """
    plan = batch.plan
    lens, drafts = results.verify_lens, results.drafts
    confidence, survival = _rounded(results.confidence)
    records = []
    for i, request in enumerate(requests):
        if num_kept[i] < 0:
            continue
        is_drafted = (plan is None or plan.draft) and caps[i] > 1
        tokens, cap = results.tokens[i], caps[i] if plan is None else min(caps[i], int(plan.caps[i]))
        correct = len(tokens) - 1
        most = min(caps[i] - 1, len(drafts[i])) if is_drafted else 0
        if num_uncapped is not None:
            trim: int | None = num_uncapped[i] - correct
        else:
            trim = None if correct == lens[i] - 1 < most else 0
        records.append(
            RequestRecord(
                rid=request.request_id,
                req_pool_index=batch.row_list[i],
                prefix_len=request.context_len - len(tokens),
                verify_len=lens[i],
                acc_len=len(tokens),
                correct_drafts=correct,
                num_output_tokens=num_kept[i],
                cap_trim=trim,
                bonus_token=tokens[-1],
                floor=None if plan is None else min(cap, int(plan.floors[i])),
                cap=cap,
                draft_tokens=drafts[i] if is_drafted else None,
                confidence=confidence[i] if is_drafted and confidence else None,
                survival=survival[i] if is_drafted and survival else None,
            )
        )
    return records


def _rounded(confidence: Tensor | None) -> tuple[list[list[float]] | None, list[list[float]] | None]:
    """Confidence and survival to six places; NaN counts as 0, as where a budget is shared out."""
    if confidence is None:
        return None, None
    clean = torch.nan_to_num(confidence, nan=0.0).clamp(0.0, 1.0)
    return _places(clean), _places(clean.cumprod(1))


def _places(values: Tensor) -> list[list[float]]:
    rounded: list[list[float]] = values.double().round(decimals=6).tolist()
    return rounded
