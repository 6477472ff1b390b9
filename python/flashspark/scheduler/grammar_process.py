"""A process per grammar: compiling one, or following it, may take any time and memory, and must cost nobody else.

The scheduler starts `python -m flashspark.scheduler.grammar_process` when the first grammar comes. It imports xgrammar
and reads the vocabulary once, and forks for each grammar it is sent a socket for. A fork ends with its socket, or when
it exceeds the limits that it has set itself; whoever follows its grammar then fails.
"""

from __future__ import annotations

import gc
import itertools
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from flashspark.ipc import GrammarSpec
from flashspark.speculative.grammar import Look, Matcher
from flashspark.text.tokenizer import TextTokenizer

from .grammar import GrammarError, MakeMatcher, TooManyGrammars, XGrammarCompiler

MEMORY_BYTES = 2 << 30  # that a grammar may take, compiled or followed
BURST_S, MEAN_S = (
    1.0,
    0.02,
)  # of processor time per token: a request's saved-up share, and what a token adds to it
_MAX_PROCESSES, _MAX_IDLE = 256, 64  # of some 5 MB each
_SPARE_S = 60.0  # for an answer, beyond the processor time it may take: nobody waits for ever
_LENGTH = struct.Struct("<I")


class _Start(msgspec.Struct):
    """What the forking process has to know."""

    tokenizer_path: str
    vocab_size: int


class _Compile(msgspec.Struct, tag="compile"):
    spec: GrammarSpec
    timeout_s: float
    memory_bytes: int


class _Follow(msgspec.Struct, tag="follow"):
    """What to do with one matcher, which its first message makes."""

    matcher: int
    rollback: int
    tokens: list[int]  # empty: look where it is
    ended: list[int]  # matchers that nobody needs any more


class _Answer(msgspec.Struct):
    error: str | None = None
    looks: list[tuple[bytes, bool]] = []


class _Link:
    """Messages over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def send(self, message: msgspec.Struct) -> None:
        data = msgspec.msgpack.encode(message)
        self.connection.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> bytes:
        """EOFError where the other end is gone."""
        return self._read(_LENGTH.unpack(self._read(_LENGTH.size))[0])

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self.connection.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return bytes(data)


# In the scheduler's process


class _GrammarProcess:
    """One grammar, compiled. Used from several threads."""

    def __init__(self, link: _Link) -> None:
        self._link, self._lock = link, threading.Lock()
        self._numbers = itertools.count()
        self._ended: list[int] = []
        self.has_ended = False

    def compile(self, order: _Compile) -> None:
        """GrammarError says why not."""
        try:
            answer = self._ask(order, order.timeout_s + _SPARE_S)
        except RuntimeError:  # killed by a limit, or by a bug of the library
            raise GrammarError("takes too much time or memory to compile; use a simpler one") from None
        if answer.error is not None:
            raise GrammarError(answer.error)

    def is_there(self) -> bool:
        """Whether it can be asked, as far as anybody knows."""
        with self._lock:
            return not self.has_ended and not _ends_now(self._link.connection)

    def make_matcher(self) -> Matcher:
        """At the beginning."""
        matcher = _RemoteMatcher(self, next(self._numbers))
        weakref.finalize(matcher, self._ended.append, matcher.number)
        return matcher

    def follow(self, number: int, rollback: int, tokens: Sequence[int]) -> list[Look]:
        """RuntimeError: the process is gone, or the library has given up."""
        ended = [self._ended.pop() for _ in range(len(self._ended))]
        answer = self._ask(_Follow(number, rollback, list(tokens), ended), BURST_S + _SPARE_S)
        if answer.error is not None:
            raise RuntimeError(answer.error)
        return [
            Look(torch.frombuffer(bytearray(mask), dtype=torch.int32), completed)
            for mask, completed in answer.looks
        ]

    def _ask(self, message: msgspec.Struct, timeout_s: float) -> _Answer:
        with self._lock:
            if self.has_ended:
                raise RuntimeError("its process has ended")
            try:
                self._link.connection.settimeout(timeout_s)
                self._link.send(message)
                return msgspec.msgpack.decode(self._link.receive(), type=_Answer)
            except (EOFError, OSError):
                self.has_ended = True
                self._link.connection.close()
                raise RuntimeError("it took too much time or memory") from None


class _RemoteMatcher:
    """A matcher in the process of its grammar."""

    def __init__(self, process: _GrammarProcess, number: int) -> None:
        self._process, self.number = process, number
        self._rollback = 0

    def look(self) -> Look:
        return self._follow([])[0]

    def advance(self, tokens: Sequence[int]) -> list[Look]:
        return self._follow(tokens)

    def rollback(self, num_tokens: int) -> None:
        self._rollback += num_tokens

    def _follow(self, tokens: Sequence[int]) -> list[Look]:
        rollback, self._rollback = self._rollback, 0
        return self._process.follow(self.number, rollback, tokens)


class IsolatedCompiler:
    """As `XGrammarCompiler`, a process per grammar. The latest stay for whoever sends the same again."""

    def __init__(self, tokenizer_path: str, vocab_size: int, timeout_s: float) -> None:
        """`timeout_s` is of processor time, to compile one grammar."""
        self._start = _Start(tokenizer_path, vocab_size)
        self.timeout_s, self.memory_bytes = timeout_s, MEMORY_BYTES
        self._lock = threading.Lock()
        self._forking: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._latest: OrderedDict[GrammarSpec, _GrammarProcess] = OrderedDict()
        self._all: weakref.WeakSet[_GrammarProcess] = weakref.WeakSet()

    def __call__(self, spec: GrammarSpec) -> MakeMatcher:
        """What makes the matchers of a grammar.

        Raises:
            GrammarError: why it is none, or that it takes too much.
            TooManyGrammars: for now.
        """
        for _ in range(2):
            process = self._process(spec)
            if process is not None:
                return process.make_matcher
        raise RuntimeError("the process that forks for grammars ends again and again; the log says why")

    def _process(self, spec: GrammarSpec) -> _GrammarProcess | None:
        """None where the one that forks has ended meanwhile."""
        with self._lock:
            process = self._latest.get(spec)
            if process is not None and process.is_there():
                self._latest.move_to_end(spec)
                return process
            while len(self._latest) >= _MAX_IDLE:
                self._latest.popitem(last=False)
            forking, control = self._forking_process()
            try:
                process = self._fork(control)
            except OSError:
                forking.wait()
                return None
        try:
            process.compile(_Compile(spec, self.timeout_s, self.memory_bytes))
        except GrammarError:
            if not process.has_ended or not _ends_now(control):
                raise
            forking.wait()
            return None
        with self._lock:
            self._latest[spec] = process
        return process

    def _forking_process(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        if self._forking is None or self._forking[0].poll() is not None:
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-m", __name__]
            with theirs:
                self._forking = (subprocess.Popen(command, stdin=theirs.fileno()), ours)
            _Link(ours).send(self._start)
        return self._forking

    def _fork(self, control: socket.socket) -> _GrammarProcess:
        if len(self._all) >= _MAX_PROCESSES:
            raise TooManyGrammars(f"{_MAX_PROCESSES} grammars are in use already; try again later")
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(control, [b"f"], [theirs.fileno()])
        process = _GrammarProcess(_Link(ours))
        weakref.finalize(process, ours.close)
        self._all.add(process)
        return process


def _ends_now(control: socket.socket) -> bool:
    """Whether nobody is at the other end, which sends nothing."""
    return bool(select.select([control], [], [], 0)[0])


# In the process that forks, and its forks


def main() -> None:
    """Forks for each socket that comes in on stdin, until that ends."""
    control = socket.socket(fileno=0)
    start = msgspec.msgpack.decode(_Link(control).receive(), type=_Start)
    compiler = XGrammarCompiler(TextTokenizer.load(Path(start.tokenizer_path)), start.vocab_size)
    compiler.prepare()
    gc.freeze()  # what is shared with the forks stays so
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        connection = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            control.close()
            try:
                _serve(_Link(connection), compiler)
            finally:
                os._exit(0)
        connection.close()


def _serve(link: _Link, compiler: XGrammarCompiler) -> None:
    """One grammar, until the other end is gone."""
    try:
        order = msgspec.msgpack.decode(link.receive(), type=_Compile)
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = num_pages * resource.getpagesize() + order.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _limit_time(order.timeout_s)
        try:
            make_matcher = compiler(order.spec)
        except GrammarError as error:
            link.send(_Answer(str(error)))
            return
        _limit_time(0)
        link.send(_Answer())
        _follow(link, make_matcher)
    except EOFError:
        pass


def _follow(link: _Link, make_matcher: MakeMatcher) -> None:
    matchers: dict[int, Matcher] = {}
    shares: dict[int, float] = {}
    while True:
        order = msgspec.msgpack.decode(link.receive(), type=_Follow)
        for number in order.ended:
            matchers.pop(number, None)
            shares.pop(number, None)
        share = min(BURST_S, shares.get(order.matcher, BURST_S) + MEAN_S * max(1, len(order.tokens)))
        _limit_time(share)
        try:
            if order.matcher not in matchers:
                matchers[order.matcher] = make_matcher()
            matcher = matchers[order.matcher]
            if order.rollback:
                matcher.rollback(order.rollback)
            looks = matcher.advance(order.tokens) if order.tokens else [matcher.look()]
            answer = _Answer(looks=[(look.mask.numpy().tobytes(), look.is_completed) for look in looks])
        except (RuntimeError, MemoryError) as error:
            answer = _Answer(f"{type(error).__name__}: {error}"[:500])
        shares[order.matcher] = signal.getitimer(signal.ITIMER_PROF)[0]
        _limit_time(0)
        link.send(answer)


def _limit_time(seconds: float) -> None:
    """The kernel ends this process after so much processor time; 0: it does not."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main()
