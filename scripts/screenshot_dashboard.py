"""Makes docs/dashboard.png: the shipped pair in mode compact under a small load, seen through a headless Chromium.

    python scripts/screenshot_dashboard.py [--out docs/dashboard.png] [--dark] [--seconds 110]

Needs the extras test and bench (Pillow comes with matplotlib), and Chromium with its driver.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import io
import itertools
import json
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.request import Request, urlopen

from PIL import Image
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from browser import open_browser
from demo import HOST, Server
from flashspark.demo import DEMO_PROMPTS

ROOT = Path(__file__).resolve().parents[1]
NUM_CLIENTS = 10
WIDTH = 1280  # CSS pixels
FLAGS = (
    *("--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", "demo-dspark"),
    *("--ragged-verify-mode", "compact", "--max-running-requests", "8", "--enable-metrics"),
    *("--speculative-dspark-confidence-sts-path", str(ROOT / "python/flashspark/demo/dspark/sts.json")),
)


def load(port: int, client: int, stop: threading.Event) -> None:
    """Held-out prompts one after the other, a client after the other; more clients as time goes by."""
    prompts = [item["token_ids"] for item in json.loads(DEMO_PROMPTS.read_text())]
    stop.wait(6.0 * client)
    for i in itertools.count(client):
        if stop.is_set():
            return
        sampling = {"temperature": 0.8, "max_new_tokens": 40 + 20 * (i % 4), "ignore_eos": True}
        body = {"input_ids": prompts[i % len(prompts)], "sampling_params": sampling}
        request = Request(f"http://{HOST}:{port}/generate", json.dumps(body).encode())
        with contextlib.suppress(OSError), urlopen(request, timeout=60) as response:
            response.read()
        stop.wait(0.4 * (i % 4))


def take(port: int, seconds: float, dark: bool) -> bytes:
    """The page's PNG after `seconds` of load, an answer in its prompt box."""
    with open_browser(WIDTH, 900, dark=dark) as driver:
        driver.get(f"http://{HOST}:{port}/dashboard")
        time.sleep(seconds)
        driver.find_element(By.ID, "temperature").clear()
        driver.find_element(By.ID, "temperature").send_keys("0.6")
        driver.find_element(By.ID, "send").click()
        outcome = driver.find_element(By.ID, "outcome")
        WebDriverWait(driver, 60).until(lambda _: outcome.get_attribute("data-finish"))
        time.sleep(2)  # one more poll
        height = driver.execute_script("return document.documentElement.scrollHeight")
        metrics = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        return driver.get_screenshot_as_png()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "dashboard.png")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--seconds", type=float, default=110.0, help="of load before the picture")
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    stop = threading.Event()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as started:
        server = Server(port, Path(folder) / "log", FLAGS)
        started.callback(server.stop)
        server.wait_ready(180)
        clients = started.enter_context(concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS))
        started.callback(stop.set)
        for client in range(NUM_CLIENTS):
            clients.submit(load, port, client, stop)
        png = take(port, args.seconds, args.dark)
    # A flat page has few colours; with a palette the file is a third of the size.
    Image.open(io.BytesIO(png)).convert("RGB").quantize(256).save(args.out, optimize=True)
    print(f"{args.out}: {args.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
