"""One request as the host sees it: its tokens, what it holds, and when it ends."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property

from flashspark.ipc import FinishReason, GenerateRequest, GrammarSpec, SpeculativeStats
from flashspark.speculative.grammar import GrammarState, Standing
from flashspark.speculative.sampling import RowSampling
from flashspark.text.detokenizer import IncrementalDetokenizer
from flashspark.text.stop import StopMatcher
from flashspark.text.tokenizer import TextTokenizer

from .logprobs import PromptLogprobs, logprob_rule
from .prefix_cache import CachedPage
from .token_origins import TokenOrigins


class StopChecker:
    """Finds the token at which a request ends: a stop id, a stop string, or the length limit."""

    def __init__(
        self, request: GenerateRequest, eos_token_ids: frozenset[int], tokenizer: TextTokenizer | None
    ) -> None:
        sampling = request.sampling
        self._max_new_tokens, self._min_new_tokens = sampling.max_new_tokens, sampling.min_new_tokens
        self.stop_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self.stop_ids |= eos_token_ids
        self._num_tokens = 0
        self._detokenizer: IncrementalDetokenizer | None = None
        if sampling.stop:
            if tokenizer is None:
                raise ValueError(
                    "stop strings need a tokenizer: drop --skip-tokenizer-init or the field 'stop'"
                )
            self._detokenizer = tokenizer.detokenizer(sampling.skip_special_tokens)
            self._matcher = StopMatcher(sampling.stop)

    def push(self, token: int) -> FinishReason | None:
        """The next output token; the reason if the request ends with it."""
        self._num_tokens += 1
        text = self._detokenizer.push([token]) if self._detokenizer else ""
        if self._num_tokens >= max(self._min_new_tokens, 1):
            if token in self.stop_ids:
                return FinishReason("stop", matched=token)
            match = self._matcher.push(text) if text else None
            if match is not None:
                return FinishReason("stop", matched=match.stop)
        if self._num_tokens >= self._max_new_tokens:
            return FinishReason("length")
        return None


def end_of_grammar(spec: GrammarSpec, standing: Standing) -> FinishReason | None:
    """Why a request ends where its grammar stands so; None where it goes on."""
    match standing:
        case Standing.OPEN:
            return None
        case Standing.ENDED:
            return FinishReason("stop")
    reason = f"{spec.field}: {standing.value}"
    return FinishReason("abort", message=reason, status_code=400, param=spec.field)


@dataclass(eq=False)  # itself only: comparing contents would make leaving a long queue quadratic work
class Request:
    """Tokens and holdings of one request.

    `tokens` is prompt + output; K/V is committed for the first `context_len` of them. A request decodes once
    all but its last token, the anchor, are committed, which goes for a fresh prompt and for a resumed one alike.
    """

    message: GenerateRequest
    arrival: int  # order of arrival; smaller is older
    seed: int
    stop_checker: StopChecker
    gamma: int  # drafts per step this request may ask for; 0 without speculation
    counts_verify_lens: bool = False  # in the ragged modes, where they say something
    grammar: GrammarState | None = None  # what the output has to match; set once it is compiled
    tokens: list[int] = field(init=False)
    arrived_s: float = field(default_factory=time.monotonic)  # monotonic
    queue_seconds: float | None = None  # until it first got a row
    row: int = -1
    pages: list[int] = field(default_factory=list)
    cached_pages: list[CachedPage] = field(
        default_factory=list
    )  # those that lead `pages` and are the cache's
    num_pages_found: int = 0  # as many of them were there when it got its row
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache at the first admission
    context_len: int = 0
    num_verify_steps: int = 0  # also the index that keys the random draws; survives retraction
    num_drafted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    num_uncapped_tokens: int | None = (
        None  # what it would have got without cutoffs; None where that is not known
    )
    num_steps_without_draft: int = 0  # drafted steps in a row that verified the anchor alone
    steps_without_draft_before: int = 0  # the same, a step earlier
    cap_in_flight: int = 0  # most rows of its step that was launched and not collected yet
    has_ended: bool = False  # and been reported: what a step in flight brings is nobody's
    num_retractions: int = 0
    accept_histogram: list[int] = field(init=False)
    verify_histogram: list[int] = field(init=False)  # steps by verify length
    origins: TokenOrigins | None = field(init=False)  # where the request asked for them
    prompt_logprobs: PromptLogprobs | None = field(init=False)  # None: no log-probabilities are asked for

    def __post_init__(self) -> None:
        self.tokens = list(self.message.input_ids)
        self.accept_histogram = [0] * (self.gamma + 1)
        self.verify_histogram = [0] * (self.gamma + 2) if self.counts_verify_lens else []
        self.origins = TokenOrigins() if self.message.return_token_origin else None
        logprobs = self.message.logprobs
        self.prompt_logprobs = PromptLogprobs(self.message, logprobs) if logprobs is not None else None

    @property
    def request_id(self) -> str:
        """The id everything about it is sent under."""
        return self.message.request_id

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return len(self.message.input_ids)

    @property
    def num_remaining(self) -> int:
        """Output tokens it may still produce."""
        return self.message.sampling.max_new_tokens - (len(self.tokens) - self.prompt_len)

    @property
    def max_cached_tokens(self) -> int:
        """Most tokens whose K/V may come from the prefix cache. Never the anchor's, whose K/V a step writes, and none
        whose row has log-probabilities to tell."""
        wanted = self.prompt_logprobs.first_row if self.prompt_logprobs is not None else None
        return len(self.tokens) - 1 if wanted is None else wanted

    @property
    def is_decodable(self) -> bool:
        """Everything but the anchor is committed."""
        return self.context_len == len(self.tokens) - 1

    @property
    def verify_cap(self) -> int:
        """Most rows the next step may verify: what it may still emit, of which a step in flight brings one at least.
        0: it ends with that step, if not before."""
        width, num_remaining = self.gamma + 1, self.num_remaining - (self.cap_in_flight > 0)
        return min(width, num_remaining, self.message.max_verify_len or width)

    @property
    def num_slots_wanted(self) -> int:
        """K/V slots it has to hold for its next step: none past its last token but one, whatever steps may run."""
        wanted = len(self.tokens) - 1 + self.cap_in_flight + self.verify_cap
        return min(wanted, self.max_len - 1)

    @property
    def max_len(self) -> int:
        """Tokens it may become."""
        return self.prompt_len + self.message.sampling.max_new_tokens

    @property
    def num_waited(self) -> int:
        """`num_steps_without_draft` before the latest step, for plans: a step in flight has told nothing yet, and
        plans must not depend on whether there is one."""
        return self.num_steps_without_draft if self.cap_in_flight else self.steps_without_draft_before

    @property
    def waits_for_host(self) -> bool:
        """Whether the host has to have its last step's outcome before the next one, or reads within it."""
        return self.grammar is not None or self.message.logprobs is not None

    @property
    def keeps_block(self) -> bool:
        """Whether no plan may trim it: it asked for that, or its output must not depend on where a block is cut."""
        if self.message.speculation == "static":
            return True
        return self.message.sampling.seed is not None and not self.row_sampling.is_greedy

    @cached_property
    def row_sampling(self) -> RowSampling:
        """Its settings as the device side wants them. They never change, and every planned step looks at them."""
        sampling, logprobs = self.message.sampling, self.message.logprobs
        return RowSampling(
            seed=self.seed,
            choice_index=self.message.choice_index,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            logit_bias=sampling.logit_bias,
            min_new_tokens=sampling.min_new_tokens,
            stop_ids=sorted(self.stop_checker.stop_ids),
            logprobs=None if logprobs is None else logprob_rule(logprobs),
        )

    def append_step(
        self, tokens: list[int], verify_len: int, num_drafted: int
    ) -> tuple[list[int], FinishReason | None]:
        """Takes what a verify step committed, cut at the first stop. Returns what was kept and the reason if any.

        `verify_len` of its rows were verified, anchor included, of `num_drafted` drafts that were proposed.
        """
        self.num_drafted += num_drafted
        self.num_verified += verify_len - 1
        if self.verify_histogram:
            self.verify_histogram[verify_len] += 1
        waits = num_drafted > 0 and verify_len == 1
        self.steps_without_draft_before = self.num_steps_without_draft
        self.num_steps_without_draft = self.num_steps_without_draft + 1 if waits else 0
        kept: list[int] = []
        finish = None
        for token in tokens:
            kept.append(token)
            finish = self._finish_with(token)
            if finish is not None:
                break
        self.tokens += kept
        self.context_len += len(tokens)
        if self.origins is not None:
            self.origins.add_step(len(tokens), len(kept), verify_len, num_drafted)
        num_accepted = min(len(tokens) - 1, len(kept))
        self.num_accepted += num_accepted
        self.num_verify_steps += 1
        self.accept_histogram[num_accepted] += 1
        return kept, finish

    def _finish_with(self, token: int) -> FinishReason | None:
        """The next output token; the reason if the request ends with it. Where a grammar can go no further, that is
        an end like a stop id, and before the length limit."""
        finish = self.stop_checker.push(token)
        if self.grammar is None or (finish is not None and finish.type == "stop"):
            return finish
        spec = self.message.sampling.grammar
        assert spec is not None
        if not self.grammar.push(token):
            reason = f"{spec.field}: token {token} does not match the grammar"
            return FinishReason("abort", message=reason, status_code=500)
        return end_of_grammar(spec, self.grammar.standing) or finish

    def count_uncapped(self, num_uncapped: int, num_kept: int, has_ended: bool) -> int:
        """Counts what the step would have given without its cutoff, and returns it.

        `num_uncapped` drafts would have been accepted; a request that ended would have ended at the same token.
        """
        num_tokens = num_kept if has_ended else num_uncapped + 1
        self.num_uncapped_tokens = (self.num_uncapped_tokens or 0) + num_tokens
        return num_tokens

    def statistics(self) -> SpeculativeStats:
        """Verify statistics so far."""
        return SpeculativeStats(
            num_verify_steps=self.num_verify_steps,
            num_drafted=self.num_drafted,
            num_verified=self.num_verified,
            num_accepted=self.num_accepted,
            accept_histogram=list(self.accept_histogram),
            verify_histogram=list(self.verify_histogram),
            num_uncapped_tokens=self.num_uncapped_tokens,
        )
