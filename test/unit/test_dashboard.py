"""/dashboard: the page as it is served, who may see what, and the Grafana dashboard's queries."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fake_scheduler import CHARTS
from fake_server import FakeServer
from flashspark.api.metrics import scheduler_families
from flashspark.speculative.adaptive import VerifyMode
from harness import Harness, Job
from tiny_models import write_tokenizer
from unit.test_lossless_adaptive import LINEAR, grid
from unit.test_lossless_tiny import folders, prompts  # noqa: F401 - fixtures

GRAFANA = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model):
    with FakeServer(model, "--served-model-name", "m", "--enable-metrics") as server:
        yield server


@pytest.fixture(scope="module")
def locked(model):
    with FakeServer(model, "--api-key", "k", "--admin-api-key", "a") as server:
        yield server


def test_the_page_runs_its_own_script_and_style_and_loads_nothing(server):
    response = server.client.get("/dashboard")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    for kind in ("script", "style"):
        (inline,) = re.findall(rf"<{kind}>(.*?)</{kind}>", response.text, re.S)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert policy.pop(f"{kind}-src") == f"'sha256-{digest}'"
    assert policy == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        **dict.fromkeys(("base-uri", "form-action", "frame-ancestors"), "'none'"),
    }
    assert response.headers["x-content-type-options"] == "nosniff"
    # Nothing from elsewhere, no attribute that the policy forbids, no markup made of text.
    assert re.findall(r"\w+://[\w./]+", response.text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"""\s(?:style|on\w+)=["']""", response.text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", response.text)
    assert len(response.text.splitlines()) < 600
    assert server.client.head("/dashboard").status_code == 200


def test_the_page_is_open_and_its_numbers_are_not(locked):
    response = locked.client.get("/dashboard")
    assert response.status_code == 200
    assert 'data-key="required"' in response.text
    for key in (None, "x", "a"):
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        assert locked.client.get("/dashboard/state", headers=headers).status_code == 401
    assert locked.client.get("/dashboard/", headers={}).status_code == 401
    headers = {"authorization": "Bearer k"}
    assert locked.client.get("/dashboard/state", headers=headers).status_code == 200


def test_its_numbers_are_those_of_server_info_without_the_records(server):
    server.client.post("/set_internal_state", json={"server_args": {"fake_records": 3}})
    body = server.client.get("/dashboard/state").json()
    info = server.client.get("/server_info").json()
    (internal,) = info["internal_states"]
    assert len(internal["dspark_info_record"]["records"]) == 3
    assert body["state"] == {name: internal[name] for name in body["state"]}
    assert body["state"].keys() == CHARTS.keys() | {"num_running_reqs", "num_aborted"}
    for name in ("status", "version", "served_model_name", "max_total_num_tokens"):
        assert body[name] == info[name]
    assert body["speculative_algorithm"] is None


def test_a_scheduler_that_has_died_is_told(model):
    with FakeServer(model) as server:
        crash = {"input_ids": [70], "sampling_params": {"sampling_seed": -1002}}
        server.client.post("/generate", json=crash)
        response = server.client.get("/dashboard/state")
        assert response.status_code == 503
        assert "the engine is down" in response.text
        assert server.client.get("/dashboard").status_code == 200


def queried(dashboard: dict) -> set[str]:
    """Every metric in every query of a Grafana dashboard."""
    return set(re.findall(r"sglang:\w+", json.dumps(dashboard)))


def test_grafana_queries_metrics_that_there_are(server, folders):  # noqa: F811
    """Names as /metrics has them, of the API process and of a scheduler that has planned and trimmed."""
    body = {"input_ids": [70, 71], "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    assert server.client.post("/generate", json=body).status_code == 200
    text = server.client.get("/metrics").text
    families = list(text_string_to_metric_families(text))
    harness = Harness(folders["target"], folders["dflash2"])
    adaptive = harness.make_adaptive(VerifyMode.COMPACT, LINEAR, grid(48), min_gain=0.0, draft_free=None)
    adaptive.source.num_refits = 100
    harness.run([Job(prompt, 20) for prompt in prompts(6)])
    families += scheduler_families(harness.scheduler.metrics(), {"model_name": "m", "engine_type": "unified"})
    names = {sample.name for family in families for sample in family.samples}
    dashboard = json.loads(GRAFANA.read_text())
    assert len(queried(dashboard)) > 30
    assert queried(dashboard) <= names


def test_grafana_panels_have_a_place_of_their_own():
    dashboard = json.loads(GRAFANA.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
        for target in panel.get("targets", []):
            assert target["expr"].count("(") == target["expr"].count(")")
            assert 'model_name="$model"' in target["expr"] or "http_responses" in target["expr"]
