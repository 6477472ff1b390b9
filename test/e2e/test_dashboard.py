"""The dashboard in a real browser: it loads clean, streams an answer, and shows what /server_info says."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from browser import find_chromium, open_browser
from e2e.server import Server, running_server
from e2e.test_compact_live import batch
from fake_server import FakeServer
from flashspark.demo import DEMO_PROMPTS
from tiny_models import write_tokenizer

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="no Chromium with its driver on the PATH")

WAIT_SECONDS = 90
# A row costs half of what a step costs without it: most drafts are not worth it, and all that are get one.
TABLE = {
    "bias_seconds": 2e-3,
    "bs_probes": [1, 16],
    "alpha_seconds": [0.0, 1e-4],
    "m_probes": [1, 129],
    "theta_seconds": [0.0, 0.128],
}


def wait(driver: Chrome, what: str, condition: Any) -> Any:
    return WebDriverWait(driver, WAIT_SECONDS, poll_frequency=0.1).until(lambda _: condition(), what)


def shown(driver: Chrome, selector: str) -> list[float | None]:
    """The unrounded numbers behind everything that matches, as of one moment."""
    values = "[...document.querySelectorAll(arguments[0])].map(n => n.dataset.value ? Number(n.dataset.value) : null)"
    return driver.execute_script(f"return {values}", selector)


def text(driver: Chrome, selector: str) -> str:
    return driver.execute_script("return document.querySelector(arguments[0]).textContent", selector)


def complaints(driver: Chrome) -> list[str]:
    """What the console holds against the page, its security policy included."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def fill(driver: Chrome, element_id: str, value: str) -> None:
    driver.execute_script("document.getElementById(arguments[0]).value = arguments[1]", element_id, value)


def generate(driver: Chrome, prompt: str, num_tokens: int) -> str:
    """Asks through the prompt box; how the answer ended."""
    fill(driver, "prompt", prompt)
    fill(driver, "max-tokens", str(num_tokens))
    driver.find_element(By.ID, "send").click()
    outcome = driver.find_element(By.ID, "outcome")
    wait(driver, "a finished answer", lambda: driver.find_element(By.ID, "send").is_enabled())
    return outcome.get_attribute("data-finish") or outcome.text


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The shipped pair, which trims from its first step on, after eight requests."""
    folder = tmp_path_factory.mktemp("dashboard")
    (folder / "table.json").write_text(json.dumps(TABLE))
    flags = [
        *("--model-path", "demo", "--max-running-requests", "8", "--ragged-verify-mode", "compact"),
        *("--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", "demo-dspark"),
        *("--speculative-dspark-sps-table-path", str(folder / "table.json")),
        *("--speculative-cost-table", "none"),
    ]
    with running_server(*flags, log=folder / "log") as server:
        prompts = [item["token_ids"] for item in json.loads(DEMO_PROMPTS.read_text())][:8]
        batch(server, prompts, 60)
        yield server


@pytest.fixture
def driver() -> Iterator[Chrome]:
    with open_browser(1280, 1000) as driver:
        yield driver


def caught_up(driver: Chrome, server: Server) -> dict[str, Any]:
    """The state of the idle server, once the page has polled the same one twice."""
    state = server.wait_idle()
    wait(
        driver,
        "the page shows the idle server",
        lambda: shown(driver, "#throughput, #output-tokens, #running") == [0, state["output_tokens"], 0],
    )
    return state


def test_the_page_shows_what_server_info_says(live: Server, driver: Chrome) -> None:
    driver.get(f"{live.url}/dashboard")
    wait(driver, "a ready server", lambda: text(driver, "#status").startswith("ready"))
    assert (text(driver, "#model"), text(driver, "#algorithm")) == ("demo", "DSPARK")
    assert text(driver, "#mode") == "compact"
    driver.find_element(By.ID, "all").click()

    assert generate(driver, "import", 32) in ("length", "stop")
    # One request alone has one tier, which nothing is trimmed from unless a budget is pinned.
    pin = {"server_args": {"dspark_force_budget_frac": 0.4}}
    assert live.http.post("/set_internal_state", json=pin).json() == [True]
    assert generate(driver, "def add(a, b):\n    return", 96) in ("length", "stop")
    check_answer(driver)
    state = caught_up(driver, live)
    check_totals(driver, state)
    check_curves(driver, state)
    assert complaints(driver) == []

    phone = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    widths = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    wait(driver, "no sideways scrolling on a phone", lambda: driver.execute_script(widths) == [390, 390])


def check_answer(driver: Chrome) -> None:
    """Every token has one colour; they add up to the answer's own statistics."""
    origins = driver.execute_script(
        "return [...document.querySelectorAll('#answer .token')].map(n => n.className.split(' ')[1])"
    )
    told = text(driver, "#outcome")
    num_tokens, num_steps = (int(told.split(word)[0].split()[-1]) for word in (" tokens,", " steps,"))
    assert len(origins) == num_tokens
    legend = driver.execute_script(
        "return Object.fromEntries([...document.querySelectorAll('#legend span')]"
        ".map(n => [n.dataset.origin, Number(n.dataset.value)]))"
    )
    assert legend == {name: origins.count(name) for name in legend}
    assert sum(legend.values()) == num_tokens
    assert legend["bonus"] + legend.get("target", 0) in (num_steps, num_steps - 1)
    assert min(legend["draft"], legend["redraft"]) > 0


def check_totals(driver: Chrome, state: dict[str, Any]) -> None:
    """With the totals since the start, which is what /server_info has."""
    pool = shown(driver, "#kv-total")[0]
    assert (
        shown(driver, "#running, #queued") == [0, 0] == [state["num_running_reqs"], state["num_queue_reqs"]]
    )
    assert shown(driver, "#accept") == [pytest.approx(state["avg_spec_accept_length"])]
    assert shown(driver, "#width") == [state["speculative_num_draft_tokens"]] == [8]
    share = state["verify_tokens"] / state["full_block_tokens"]
    assert shown(driver, "#budget") == [pytest.approx(share)]
    assert 0.1 < share < 0.9
    assert shown(driver, "#kv-used") == [state["num_used_tokens"]]
    assert shown(driver, "#kv") == [pytest.approx(state["num_used_tokens"] / pool)]
    bars, steps = shown(driver, "#tiers rect"), state["steps_by_rows"]
    assert [count or 0 for count in bars] == steps[: len(bars)]
    assert sum(steps[: len(bars)]) == sum(steps) > 0
    outcomes = state["plan_outcomes"]
    percent, _, most = text(driver, "#tiers-card p").split(" · ")[0].split(" ", 2)
    assert outcomes[most] == max(outcomes.values())
    assert float(percent) == pytest.approx(100 * outcomes[most] / sum(outcomes.values()), abs=0.51)
    calibration = state["confidence_calibration"]
    assert shown(driver, ".ece") == pytest.approx(calibration["errors"])
    counts = driver.execute_script("return [...document.querySelectorAll('.ece')].map(n => +n.dataset.count)")
    assert counts == [sum(row) for row in calibration["counts"]]
    points = driver.execute_script("return document.querySelectorAll('#calibration circle').length")
    assert points == sum(count > 0 for row in calibration["counts"] for count in row) > 10


def check_curves(driver: Chrome, state: dict[str, Any]) -> None:
    """Each point of a curve is what the counters of two polls say; their sums are the counters' growth."""
    samples = driver.execute_script("return samples")
    last = samples[-1]["state"]
    fixed = state.keys() & last.keys() - {"monotonic_seconds"}
    assert {name: last[name] for name in fixed} == {name: state[name] for name in fixed}
    assert {"last_gen_throughput", "predicted_step_seconds", "confidence_calibration"} <= fixed
    growth = 0.0
    for before, after in itertools.pairwise(samples):
        a, b = before["state"], after["state"]
        growth += after["throughput"] * (b["monotonic_seconds"] - a["monotonic_seconds"])
        for name, above, below, scale in (
            ("accept", "output_tokens", "verify_steps", 1),
            ("verified", "verify_tokens", "verify_steps", 1),
            ("full", "full_block_tokens", "verify_steps", 1),
            ("predicted", "predicted_step_seconds", "predicted_steps", 1e3),
            ("measured", "measured_step_seconds", "predicted_steps", 1e3),
        ):
            count = b[below] - a[below]
            expected = pytest.approx(scale * (b[above] - a[above]) / count) if count else None
            assert after[name] == expected, name
    first = samples[0]["state"]["output_tokens"]
    assert growth == pytest.approx(state["output_tokens"] - first)
    assert state["output_tokens"] - first > 30  # the answer came in while the page looked on
    assert samples[-1]["throughput"] == last["last_gen_throughput"] == 0
    # What stands beside a curve is its last point.
    assert shown(driver, "#throughput-chart-card p span") == [samples[-1]["throughput"]]
    assert shown(driver, "#requests-chart-card p span") == [0, 0]
    for chart in ("throughput", "accept", "budget", "step-time", "kv", "requests"):
        assert driver.execute_script(f"return document.querySelectorAll('#{chart}-chart path').length") > 0


def test_text_is_text_and_the_key_is_asked_for(tmp_path: Path, driver: Chrome) -> None:
    """A server that repeats the prompt: markup in it stays text, characters of several tokens come out whole."""
    hostile = "<img src=x onerror='window.hit=1'><b>wörd</b> 🙂 &amp; \u2028</pre><script>hit=1</script>\n"
    folder = write_tokenizer(tmp_path)
    draft = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "none")
    with FakeServer(folder, *draft, "--api-key", "secret") as server:
        driver.get(f"{server.url}/dashboard")
        assert driver.find_element(By.ID, "key-card").is_displayed()
        assert complaints(driver) == []  # it asks before the server has to refuse
        driver.find_element(By.ID, "key").send_keys("wrong\n")
        wait(driver, "a refusal", lambda: "refused this key" in text(driver, "#key-note"))
        assert driver.find_element(By.ID, "key-card").is_displayed()
        driver.find_element(By.ID, "key").send_keys("secret\n")
        wait(driver, "a ready server", lambda: text(driver, "#status").startswith("ready"))
        assert not driver.find_element(By.ID, "key-card").is_displayed()
        assert driver.execute_script("return [localStorage.length, sessionStorage.length]") == [0, 0]

        num_tokens = len(
            server.client.post(
                "/tokenize", json={"prompt": hostile}, headers={"authorization": "Bearer secret"}
            ).json()["tokens"]
        )
        assert generate(driver, hostile, num_tokens) == "length"
        assert text(driver, "#answer .given") == hostile
        assert text(driver, "#answer") == 2 * hostile
        assert driver.execute_script("return document.querySelectorAll('#answer *:not(span)').length") == 0
        assert driver.execute_script("return window.hit") is None
        assert generate(driver, "x" * 300, 8).startswith("{")  # the server's refusal, as it came
        assert "error" in driver.find_element(By.ID, "outcome").get_attribute("class")
