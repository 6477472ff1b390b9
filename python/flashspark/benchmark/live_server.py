"""The control calls of a running server, with the standard library alone, and what a profiler must know of it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashspark.text import TextTokenizer, TokenizerLoadError

RECORDS_HINT = "start the server with SGLANG_DSPARK_ENABLE_SPS_RECORD=1 and SGLANG_SIMULATE_ACC_LEN=1.0"
ALGORITHMS = ("DSPARK", "DFLASH")
RAGGED_MODES = ("compact", "cap-accept")


class ProfileError(Exception):
    """Why nothing, or nothing more, can be measured; the message says what to change."""


class LiveServer:
    """HTTP calls to `base_url`, past any proxy: a profiler's server is near."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = 60.0
    ) -> tuple[int, bytes]:
        """Status and body of the answer, whatever the status.

        Raises:
            ProfileError: nobody answers.
        """
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.base_url + path, data, self._headers, method=method)
            with self._opener.open(request, timeout=timeout_s) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()
        except (OSError, ValueError) as error:
            raise ProfileError(
                f"{method} {self.base_url}{path}: {error}; is the server up, and is --base-url right?"
            ) from error

    def info(self) -> dict[str, Any]:
        """`/server_info`."""
        status, body = self.call("GET", "/server_info")
        if status == 401:
            raise ProfileError("/server_info wants a key: give --api-key")
        if status != 200:
            raise ProfileError(f"/server_info answers {status}: {_shown(body)}")
        try:
            return dict(json.loads(body))
        except (ValueError, TypeError):
            raise ProfileError(f"/server_info is no JSON object: {_shown(body)}") from None

    def set_state(self, name: str, value: bool | float | None) -> bool:
        """Changes a live setting; whether every rank took it."""
        status, body = self.call("POST", "/set_internal_state", {"server_args": {name: value}})
        if status != 200:
            raise ProfileError(
                f"/set_internal_state {name} answers {status}: {_shown(body)}; a server with --admin-api-key wants "
                "that key as --api-key"
            )
        answers = json.loads(body)
        answers = answers if isinstance(answers, list) else [answers]
        taken = [answer.get("updated") if isinstance(answer, dict) else answer for answer in answers]
        return bool(taken) and all(one is True for one in taken)

    def flush(self) -> None:
        """Empties the prefix cache where there is one; a busy server refuses, which is as well."""
        self.call("POST", "/flush_cache")

    def abort_all(self) -> None:
        """Ends every request of the server."""
        status, body = self.call("POST", "/abort_request", {"abort_all": True})
        if not 200 <= status < 300:
            raise ProfileError(f"/abort_request answers {status}: {_shown(body)}")

    def generate(self, prompts: list[list[int]], temperature: float, max_new_tokens: int) -> None:
        """One batch that runs to its length or until it is aborted; the answer is thrown away."""
        sampling = {"temperature": temperature, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        body = {"input_ids": prompts, "sampling_params": sampling, "stream": False}
        status, answer = self.call("POST", "/generate", body, timeout_s=600.0)
        if status != 200:
            raise ProfileError(f"/generate answers {status}: {_shown(answer)}")


def _shown(body: bytes) -> str:
    return body[:500].decode(errors="replace").strip()


@dataclass(frozen=True)
class ServerFacts:
    """What stays the same during a sweep. Sizes are per data-parallel rank."""

    algorithm: str
    mode: str
    width: int  # W, rows of a full block
    num_ranks: int
    tp_size: int
    max_batch_size: int
    running_cap: int | None
    token_capacity: int | None
    context_length: int | None
    vocab_size: int
    model_path: str
    version: str

    @classmethod
    def check(
        cls, info: dict[str, Any], two_dimensional: bool, tokenizer_path: str | None = None
    ) -> ServerFacts:
        """Reads `/server_info`.

        Raises:
            ProfileError: the server cannot be profiled as it was started.
        """
        algorithm = info.get("speculative_algorithm")
        if algorithm not in ALGORITHMS:
            raise ProfileError(
                f"the server speculates with {algorithm}, not one of {', '.join(ALGORITHMS)}: restart it with "
                "--speculative-algorithm and --speculative-draft-model-path"
            )
        if info.get("disable_cuda_graph"):
            raise ProfileError(
                "the server runs without fixed step shapes: restart it without --disable-cuda-graph"
            )
        states = info.get("internal_states") or []
        if not states:
            raise ProfileError("/server_info has no internal_states: is its scheduler alive?")
        feeds = [_checked_feed(state, two_dimensional) for state in states]
        modes, widths = {feed["mode"] for feed in feeds}, {feed["verify_num_draft_tokens"] for feed in feeds}
        if len(modes) > 1 or len(widths) > 1:
            raise ProfileError(f"the ranks differ: modes {sorted(modes)}, block widths {sorted(widths)}")
        first = states[0]
        return cls(
            algorithm=algorithm,
            mode=modes.pop(),
            width=widths.pop(),
            num_ranks=len(states) * (1 if len(states) > 1 else int(first.get("dp_size") or 1)),
            tp_size=int(info.get("tp_size") or 1),
            max_batch_size=_largest_graph(first),
            running_cap=first.get("effective_max_running_requests_per_dp"),
            token_capacity=(first.get("memory_usage") or {}).get("token_capacity"),
            context_length=info.get("context_length"),
            vocab_size=info.get("vocab_size")
            or _tokenizer_size(tokenizer_path or info.get("tokenizer_path")),
            model_path=str(info.get("model_path")),
            version=str(info.get("version")),
        )


def _checked_feed(state: dict[str, Any], two_dimensional: bool) -> dict[str, Any]:
    """A rank's `dspark_info_record`, if it is one that can be measured from."""
    feed = state.get("dspark_info_record")
    if not isinstance(feed, dict):
        raise ProfileError(f"the server keeps no records of its steps: {RECORDS_HINT}")
    missing = {"core", "step_cpu_time"} - set(feed.get("components") or [])
    if missing:
        raise ProfileError(f"the server's records lack {', '.join(sorted(missing))}: {RECORDS_HINT}")
    if feed.get("simulate_acc_len") != 1.0:
        raise ProfileError(
            f"the server accepts drafts (simulate_acc_len {feed.get('simulate_acc_len')}), so that steps are not "
            f"alike: {RECORDS_HINT}"
        )
    width = feed.get("verify_num_draft_tokens")
    if not isinstance(width, int) or width < 2:
        raise ProfileError(
            f"a block of {width} rows has no draft to verify: raise --speculative-num-draft-tokens"
        )
    mode = feed.get("mode")
    if two_dimensional and mode not in RAGGED_MODES:
        raise ProfileError(
            f"--fracs pins how much of each block is verified, and the server's mode is {mode}: restart it with "
            "--ragged-verify-mode compact, or leave --fracs out"
        )
    if not two_dimensional and mode != "static":
        raise ProfileError(
            f"without --fracs full blocks are measured, and the server's mode is {mode}: restart it with "
            "--ragged-verify-mode static, or give --fracs 0.25 0.5 0.75 1.0"
        )
    return feed


def _largest_graph(state: dict[str, Any]) -> int:
    decode = (state.get("cuda_graph_config") or {}).get("decode") or {}
    sizes = decode.get("bs") or ([decode["max_bs"]] if decode.get("max_bs") else [])
    if not sizes:
        raise ProfileError(
            "/server_info does not say which batch sizes have fixed step shapes (cuda_graph_config)"
        )
    return int(max(sizes))


def _tokenizer_size(path: str | None) -> int:
    if path is None or not Path(path).exists():
        raise ProfileError(
            "the vocabulary's size is unknown: give --local-tokenizer-path with the model's tokenizer"
        )
    try:
        return TextTokenizer.load(path).vocab_size
    except TokenizerLoadError as error:
        raise ProfileError(f"--local-tokenizer-path: {error}") from error
