"""Grammars of requests: compiled by xgrammar beside the step loop, which asks no more than whether they are.

A request with a grammar waits here, not in the queue for a row, until its grammar is compiled. One that cannot be
compiled, or not in time, ends its own request and no other.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch

from flashspark import envs
from flashspark.ipc import FinishReason, GrammarSpec
from flashspark.speculative.grammar import GrammarState, Look, Matcher, is_allowed
from flashspark.text.tokenizer import TextTokenizer

from .request import Request, end_of_grammar

logger = logging.getLogger(__name__)

_NUM_THREADS = 2
_CACHE_BYTES = 256 << 20
# Blanks in a row of a JSON text. A weak model goes on with them for ever where any number is valid.
_MAX_WHITESPACE = 16

MakeMatcher = Callable[[], Matcher]
Compile = Callable[[GrammarSpec], MakeMatcher]


class GrammarError(ValueError):
    """A grammar that cannot be used; the message says why."""


class TooManyGrammars(RuntimeError):
    """No more can be held at once; the message says how many are."""


def unavailable_reason(backend: str | None, tokenizer: TextTokenizer | None) -> str | None:
    """Why this server takes no grammars; None where it does."""
    if backend == "none":
        return "structured output is switched off (--grammar-backend none)"
    if importlib.util.find_spec("xgrammar") is None:
        return (
            "structured output needs xgrammar: pip install 'flashspark[grammar]', and start the server again"
        )
    if tokenizer is None:
        return "structured output needs a tokenizer, and the server was started with --skip-tokenizer-init"
    if tokenizer.vocabulary(0) is None:
        return "structured output needs a byte-level or byte-fallback tokenizer, and this model's is another"
    return None


class XGrammarMatcher:
    """xgrammar's `GrammarMatcher` as a `Matcher`."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._num_words = matcher, -(-vocab_size // 32)

    def look(self) -> Look:
        """As `Matcher` has it, and so are the others."""
        mask = torch.empty(1, self._num_words, dtype=torch.int32)
        self._matcher.fill_next_token_bitmask(mask)
        return Look(mask[0], self._matcher.is_completed())

    def advance(self, tokens: Sequence[int]) -> list[Look]:
        looks: list[Look] = []
        for token in tokens:
            if looks and not is_allowed(looks[-1].mask, token):
                break
            self._matcher.accept_token(token)
            looks.append(self.look())
        return looks

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)


class XGrammarCompiler:
    """Compiles for one model's vocabulary, in this process and without limits: see `grammar_process`. xgrammar is
    imported, and the vocabulary read, when they are first needed. Safe to use from several threads."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._info: Any = None
        self._compiler: Any = None

    def prepare(self) -> None:
        """Reads the vocabulary. Starts no thread, so that the process may fork afterwards."""
        import xgrammar

        with self._lock:
            if self._info is None:
                vocabulary = self._tokenizer.vocabulary(self._vocab_size)
                assert vocabulary is not None  # `unavailable_reason`
                # Without stop tokens: `GrammarState` decides per request what may end it.
                self._info = xgrammar.TokenizerInfo(
                    vocabulary,
                    xgrammar.VocabType.RAW,
                    vocab_size=self._vocab_size,
                    stop_token_ids=[],
                )

    def __call__(self, spec: GrammarSpec) -> MakeMatcher:
        """What makes the matchers of a grammar.

        Raises:
            GrammarError: why it is none.
        """
        import xgrammar

        self.prepare()
        with self._lock:
            if self._compiler is None:
                self._compiler = xgrammar.GrammarCompiler(
                    self._info, max_threads=1, cache_limit_bytes=_CACHE_BYTES
                )
        try:
            grammar = self._compile(xgrammar, spec)
        except (RuntimeError, ValueError, TypeError, KeyError, MemoryError) as error:
            raise GrammarError(_reason(error)) from error
        return lambda: XGrammarMatcher(xgrammar.GrammarMatcher(grammar), self._vocab_size)

    def _compile(self, xgrammar: Any, spec: GrammarSpec) -> Any:
        compiler = self._compiler
        match spec.kind:
            case "json_schema":
                return compiler.compile_json_schema(spec.text, max_whitespace_cnt=_MAX_WHITESPACE)
            case "regex":
                return compiler.compile_regex(spec.text)
            case "ebnf":
                return compiler.compile_grammar(spec.text)
        tag = json.loads(spec.text)
        if "structures" not in tag:
            return compiler.compile_structural_tag(spec.text)
        items = [xgrammar.StructuralTagItem(**item) for item in tag["structures"]]  # the older form
        return compiler.compile_structural_tag(items, tag["triggers"])


def _reason(error: Exception) -> str:
    """xgrammar's message without the place in its sources."""
    text = str(error).strip()
    if isinstance(error, MemoryError) or "bad_alloc" in text:
        return "takes too much memory to compile; use a simpler one"
    if text.startswith("[") and ": " in text:
        text = text.split(": ", 1)[1]
    return text[:500] or type(error).__name__


class GrammarQueue:
    """Requests whose grammars are being compiled. Used by the step loop alone."""

    def __init__(
        self,
        compile: Compile | None,
        vocab_size: int,
        unavailable: str | None = None,
        timeout_s: float = envs.GRAMMAR_TIMEOUT_S.default,
    ) -> None:
        """`unavailable` is why requests with grammars are refused where `compile` is None."""
        self._compile, self._vocab_size = compile, vocab_size
        self._unavailable, self._timeout_s = unavailable, timeout_s
        self._waiting: dict[str, tuple[Request, Future[MakeMatcher], float]] = {}
        self._running: dict[GrammarSpec, Future[MakeMatcher]] = {}
        self._jobs: queue.SimpleQueue[tuple[GrammarSpec, Future[MakeMatcher]]] = queue.SimpleQueue()
        self._num_threads = 0
        self.num_added = 0  # ever

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Begins to compile a request's grammar, unless somebody's like it is being compiled."""
        spec = request.message.sampling.grammar
        assert spec is not None
        self.num_added += 1
        deadline = time.monotonic() + self._timeout_s
        self._waiting[request.request_id] = (request, self._submit(spec), deadline)

    def discard(self, request: Request) -> bool:
        """Forgets a request that has ended; whether it waited."""
        return self._waiting.pop(request.request_id, None) is not None

    def take(self, wait_s: float = 0.0) -> list[tuple[Request, FinishReason | None]]:
        """Requests that need not wait any more, oldest first: with their grammars, or with the reason why they end,
        and these stay until they are discarded. Waits up to `wait_s` for the first."""
        if not self._waiting:
            return []
        if wait_s > 0:
            wait([future for _, future, _ in self._waiting.values()], wait_s, "FIRST_COMPLETED")
        now = time.monotonic()
        done = [
            (request, self._outcome(request, future))
            for request, future, deadline in self._waiting.values()
            if future.done() or now > deadline
        ]
        for request, finish in done:
            if finish is None:
                del self._waiting[request.request_id]
        return done

    def _submit(self, spec: GrammarSpec) -> Future[MakeMatcher]:
        for done in [key for key, future in self._running.items() if future.done()]:
            del self._running[done]
        if (running := self._running.get(spec)) is not None:
            return running
        future: Future[MakeMatcher] = Future()
        if self._compile is None:
            future.set_exception(GrammarError(self._unavailable or "structured output is not available"))
            return future
        self._running[spec] = future
        self._jobs.put((spec, future))
        if self._num_threads < _NUM_THREADS:
            # Daemons: a compilation without end must not keep the process from leaving.
            self._num_threads += 1
            threading.Thread(target=self._work, daemon=True, name="grammar").start()
        return future

    def _work(self) -> None:
        assert self._compile is not None
        while True:
            spec, future = self._jobs.get()
            future.set_running_or_notify_cancel()
            try:
                make_matcher = self._compile(spec)
                self._begin(make_matcher)  # one that takes for ever does so here
                future.set_result(make_matcher)
            except (GrammarError, TooManyGrammars) as error:
                future.set_exception(error)
            except Exception as error:  # a bug of ours or the library's: this grammar alone fails
                logger.exception("compiling a grammar failed")
                future.set_exception(error)

    def _begin(
        self, make_matcher: MakeMatcher, stop_ids: Sequence[int] = (), min_new_tokens: int = 0
    ) -> GrammarState:
        try:
            return GrammarState(make_matcher(), self._vocab_size, stop_ids, min_new_tokens)
        except RuntimeError as error:
            raise GrammarError(f"cannot be followed ({error}); use a simpler one") from error

    def _outcome(self, request: Request, future: Future[MakeMatcher]) -> FinishReason | None:
        spec = request.message.sampling.grammar
        assert spec is not None
        if future.running():
            return _refused(spec, f"takes longer than {self._timeout_s:g} s to compile; use a simpler one")
        if not future.done():
            waited = f"was not compiled within {self._timeout_s:g} s, since others take long"
            return FinishReason("abort", message=f"{spec.field}: {waited}", status_code=503)
        error = future.exception()
        if isinstance(error, TooManyGrammars):
            return FinishReason("abort", message=f"{spec.field}: {error}", status_code=503)
        if isinstance(error, GrammarError):
            return _refused(spec, str(error))
        if error is not None:
            message = f"{spec.field}: the grammar could not be compiled ({error})"
            return FinishReason("abort", message=message, status_code=500)
        stop_ids, min_new_tokens = request.row_sampling.stop_ids, request.row_sampling.min_new_tokens
        try:
            request.grammar = self._begin(future.result(), stop_ids, min_new_tokens)
        except GrammarError as error:
            return _refused(spec, str(error))
        return end_of_grammar(spec, request.grammar.standing)


def _refused(spec: GrammarSpec, reason: str) -> FinishReason:
    return FinishReason("abort", message=f"{spec.field}: {reason}", status_code=400, param=spec.field)
