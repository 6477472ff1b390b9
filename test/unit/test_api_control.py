"""Load, pause and traces over HTTP, against a scheduler without a model; whose key they want."""

from __future__ import annotations

import threading
import time

import pytest

from fake_server import FakeServer
from flashspark.api.app import ROUTES
from flashspark.api.middleware import KeyMiddleware, auth_class
from tiny_models import write_tokenizer

ADMIN = {"authorization": "Bearer admin"}
DRAFT = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "none")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = ("--api-key", "user", "--admin-api-key", "admin", "--max-running-requests", "1")
    with FakeServer(write_tokenizer(tmp_path_factory.mktemp("model")), *DRAFT, *flags) as running:
        running.client.headers["authorization"] = "Bearer user"
        yield running


@pytest.mark.parametrize(
    "path", ["/pause_generation", "/continue_generation", "/start_profile", "/stop_profile", "/flush_cache"]
)
def test_management_wants_the_admin_key(server, path):
    assert server.client.post(path).status_code == 401
    assert server.client.post(path, headers={"authorization": "Basic admin"}).status_code == 401


def test_keys_may_have_letters_beyond_ascii():
    guard = KeyMiddleware(None, "schlüssel", None)

    def allowed(header: bytes) -> bool:
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/generate",
            "headers": [(b"authorization", header)],
        }
        return guard._allowed(scope)

    assert allowed("bEARER  schlüssel ".encode())
    assert not allowed(b"Bearer schlussel")
    assert not allowed("Bearer schlüssel".encode("latin-1"))


def test_every_route_has_the_key_of_its_kind():
    classes = {path: auth_class(path) for path, _, _ in ROUTES}
    admin = {path for path, kind in classes.items() if kind == "admin"}
    assert admin == {
        *("/abort_request", "/flush_cache", "/set_internal_state"),
        *("/pause_generation", "/continue_generation", "/start_profile", "/stop_profile"),
    }
    opened = {path for path, kind in classes.items() if kind == "open"}
    assert opened == {
        "/health",
        "/health_generate",
        "/ready",
        "/metrics",
        "/metrics/{path:path}",
        "/dashboard",
    }


def test_loads_want_the_normal_key(server):
    for path in ("/v1/loads", "/get_load", "/server_info"):
        assert server.client.get(path).status_code == 200
        assert server.client.get(path, headers={"authorization": "Bearer other"}).status_code == 401
    assert server.client.get("/ready", headers={"authorization": ""}).status_code == 200


def test_sections_of_loads(server):
    def load(query: str) -> dict:
        response = server.client.get(f"/v1/loads?{query}")
        assert response.status_code == 200, response.text
        (found,) = response.json()["loads"]
        return found

    core = load("include=core")
    assert core["num_running_reqs"] == 3  # what the fake says of itself
    assert {"memory", "speculative", "queues"}.isdisjoint(core)
    assert load("include=memory,%20queues&dp_rank=0").keys() - core.keys() == {"memory", "queues"}
    assert load("").keys() == load("include=all").keys() >= {"memory", "queues"}
    assert server.client.get("/v1/loads?dp_rank=1").json()["loads"] == []
    for query, name in (
        ("include=core,nothing", "include"),
        ("dp_rank=x", "dp_rank"),
        ("dp_rank=-1", "dp_rank"),
        ("format=xml", "format"),
    ):
        response = server.client.get(f"/v1/loads?{query}")
        assert (response.status_code, response.json()["param"]) == (400, name)
    text = server.client.get("/v1/loads?format=prometheus").text
    assert 'sglang:load_num_running_reqs{dp_rank="0"} 3\n' in text


def test_requests_wait_while_the_server_is_paused(server):
    post = server.client.post
    assert post("/pause_generation", json={"mode": "in_place"}, headers=ADMIN).json()["status"] == "ok"
    assert server.client.get("/ready").status_code == 503
    assert server.client.get("/ping").status_code == server.client.get("/health").status_code == 200
    answers = []
    body = {"text": "ab", "sampling_params": {"max_new_tokens": 2}}
    thread = threading.Thread(target=lambda: answers.append(post("/generate", json=body)))
    thread.start()
    deadline = time.monotonic() + 10
    while server.client.get("/server_info").json()["num_requests_in_flight"] != 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert answers == []
    assert post("/pause_generation", json={"mode": "later"}, headers=ADMIN).status_code == 400
    assert post("/continue_generation", json={"now": True}, headers=ADMIN).status_code == 400
    assert post("/continue_generation", headers=ADMIN).json()["status"] == "ok"
    thread.join(10)
    assert answers[0].json()["text"] == "ab"
    assert server.client.get("/ready").status_code == 200


def test_profile_bodies(server):
    def start(**body) -> int:
        return server.client.post("/start_profile", json=body, headers=ADMIN).status_code

    assert start(num_steps="5", profile_by_stage=False, profile_stages=None, output_dir=None) == 200
    for wrong in (
        {"num_steps": "many"},
        {"num_steps": -1},
        {"profile_prefix": "../up"},
        {"profile_by_stage": True},
    ):
        assert start(**wrong) == 400
    refused = server.client.get("/stop_profile", headers=ADMIN)
    assert (refused.status_code, "no trace" in refused.text) == (400, True)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_the_only_data_parallel_rank(server, path):
    body = {"text": "ab"} if path == "/generate" else {"prompt": "ab", "max_tokens": 2}
    assert server.client.post(path, json=body, headers={"x-data-parallel-rank": "0"}).status_code == 200
    for rank in ("1", "-1", "x"):
        refused = server.client.post(path, json=body, headers={"X-Data-Parallel-Rank": rank})
        assert refused.status_code == 400
        assert "X-Data-Parallel-Rank" in refused.text
