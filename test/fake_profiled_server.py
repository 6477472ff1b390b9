"""A server as the profiler sees it: the control calls, and records of steps whose times follow a known table."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WIDTH = 4
STEP_SECONDS = 0.002  # between two records, whatever times they claim


class FakeProfiledServer:
    """`seconds(requests, rows)` is what a step claims to take. `log` lists the control calls in order."""

    def __init__(self, mode: str = "static", seconds: Callable[[int, int], float] | None = None) -> None:
        self.seconds = seconds or (lambda requests, rows: 0.005 + 0.001 * requests + 0.0002 * rows)
        self.mode = mode
        self.log: list[tuple[str, Any]] = []
        self.pin: float | None = None
        self.refuses_pins = False
        self.generate_status = 200
        self.running = 0
        self.num_aborts = 0
        self.records: list[dict[str, Any]] = []
        self.info: dict[str, Any] = {
            "speculative_algorithm": "DFLASH",
            "disable_cuda_graph": False,
            "context_length": 4096,
            "vocab_size": 400,
            "model_path": "fake",
            "version": "0",
        }
        self.state: dict[str, Any] = {
            "cuda_graph_config": {"decode": {"bs": [1, 2, 4, 8], "max_bs": 8}},
            "effective_max_running_requests_per_dp": 8,
            "memory_usage": {"token_capacity": 100_000},
        }
        self.feed: dict[str, Any] = {
            "mode": mode,
            "gamma": WIDTH - 1,
            "verify_num_draft_tokens": WIDTH,
            "components": ["core", "step_cpu_time"],
            "simulate_acc_len": 1.0,
        }
        self._forward_ct = 0
        self._lock = threading.Lock()

    def __enter__(self) -> FakeProfiledServer:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def do_GET(self) -> None:
                self._answer(200, outer.server_info())

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                status, answer = outer.control(self.path, json.loads(body) if body else None)
                self._answer(status, answer)

            def _answer(self, status: int, answer: Any) -> None:
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def server_info(self) -> dict[str, Any]:
        with self._lock:
            feed = {**self.feed, "records": list(self.records)}
        return {**self.info, "internal_states": [{**self.state, "dspark_info_record": feed}]}

    def control(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/generate":
            return self._generate(body)
        self.log.append((path, body))
        if path == "/abort_request":
            self.num_aborts += 1
        if path == "/set_internal_state":
            ((name, value),) = body["server_args"].items()
            if name == "dspark_clear_info_records":
                with self._lock:
                    self.records.clear()
            elif name == "dspark_force_budget_frac" and not (self.refuses_pins and value is not None):
                self.pin = value
            else:
                return 200, [False]
            return 200, [True]
        return 200, {}

    def _generate(self, body: Any) -> tuple[int, Any]:
        if self.generate_status != 200:
            return self.generate_status, {"error": "no room"}
        self.log.append(("/generate", len(body["input_ids"])))
        requests, aborts = len(body["input_ids"]), self.num_aborts
        gamma = WIDTH - 1
        for _ in range(body["sampling_params"]["max_new_tokens"]):
            if self.num_aborts != aborts:
                break
            time.sleep(STEP_SECONDS)
            budget = requests * gamma if self.pin is None else int(self.pin * requests * gamma)
            rows = requests + budget
            self._forward_ct += 1
            record = {"forward_ct": self._forward_ct, "bs": requests, "num_running_reqs": requests}
            record |= {"num_verify_tokens": rows, "step_cpu_ms": 1e3 * self.seconds(requests, rows)}
            with self._lock:
                self.records.append(record)
        return 200, []
