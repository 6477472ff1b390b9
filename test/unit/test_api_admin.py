"""Live settings and the record feed over HTTP, against a scheduler without a model."""

from __future__ import annotations

import pytest

from fake_server import FakeServer
from tiny_models import write_tokenizer


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with FakeServer(write_tokenizer(tmp_path_factory.mktemp("model")), "--admin-api-key", "admin") as running:
        running.client.headers["authorization"] = "Bearer admin"
        yield running


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_settings_are_answered_per_rank(server, method):
    def change(values):
        return server.client.request(method, "/set_internal_state", json={"server_args": values})

    assert change({"fake_records": 3}).json() == [True]
    assert server.state["dspark_info_record"] == {"mode": "static", "records": [{}] * 3}
    assert change({"no_such_setting": 1}).json() == [False]
    assert "refused: no such setting" in server.log


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"server_args": None},
        {"server_args": [1]},
        {"server_args": {"a": "1" * 65}},
        {"server_args": {"a": [1]}},
        {"server_args": {"a" * 600: 1}},
        {"server_args": {str(i): 1 for i in range(100)}},
        {"server_args": {}, "other": 1},
    ],
)
def test_settings_of_another_shape_are_400(server, body):
    response = server.client.post("/set_internal_state", json=body)
    assert response.status_code == 400, response.text
    assert "server_args" in response.text or "other" in response.text
    assert server.client.post("/set_internal_state", json={"server_args": {"fake_records": 0}}).json() == [
        True
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1], "must be a number, a string, true, false or null"),
        ({"x": 1}, "must be a number, a string, true, false or null"),
        (2**63, "must be a whole number of at most 64 bits"),
        ("1" * 65, "has 65 characters, the limit is 64"),
    ],
)
def test_a_value_that_no_setting_takes_is_named(server, value, message):
    response = server.client.post("/set_internal_state", json={"server_args": {"speculation": value}})
    assert response.status_code == 400
    assert f"server_args.speculation: {message}" in response.text


def test_settings_want_the_admin_key(server):
    response = server.client.post(
        "/set_internal_state", json={"server_args": {}}, headers={"authorization": "Bearer other"}
    )
    assert response.status_code == 401
