"""A confidence head's calibration from end to end: a server collects, a fit writes the file, a server takes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e.server import running_server, speculative
from flashspark.benchmark.dspark_sts_fit import main
from flashspark.demo import DEMO_PROMPTS
from flashspark.speculative.sts_records import load_records

NUM_TOKENS = 100


def test_collect_fit_and_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*speculative("demo", "demo-dspark"), "--max-running-requests", "16"]
    flags[flags.index("DFLASH")] = "DSPARK"
    prompts = [item["token_ids"] for item in json.loads(DEMO_PROMPTS.read_text())][:32]
    stem, out = tmp_path / "records", tmp_path / "sts.json"
    with monkeypatch.context() as patch:
        patch.setenv("SGLANG_DSPARK_STS_COLLECT_PATH", str(stem))
        with running_server(*flags, "--ragged-verify-mode", "cap-accept", log=tmp_path / "log") as server:
            sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
            body = {"input_ids": prompts, "sampling_params": sampling}
            answers = server.http.post("/generate", json=body).json()
            steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
            assert all(answer["meta_info"]["spec_cap_length"] > 6 for answer in answers)
    _, prefix = load_records(str(stem))
    # All but the last blocks of a request, which are cut to what is left of it.
    assert steps - 7 * len(prompts) <= len(prefix) < steps
    accepted = sum(answer["meta_info"]["spec_accepted_drafts"] for answer in answers)
    assert accepted - 6 * 7 * len(prompts) <= int(prefix.sum()) <= accepted

    assert main(["--records", str(stem), "--out", str(out), "--min-samples", "300"]) == 0
    assert f"fitted to {len(prefix)} blocks" in capsys.readouterr().out
    temperatures = json.loads(out.read_text())["temperatures"]
    assert len(temperatures) == 7

    flags += ["--ragged-verify-mode", "compact", "--speculative-cost-table", "none"]
    flags += ["--speculative-dspark-confidence-sts-path", str(out)]
    with running_server(*flags, log=tmp_path / "log") as calibrated:
        info = calibrated.http.get("/server_info").json()
        assert info["speculative_dspark_confidence_sts_path"] == str(out)
        assert info["speculative_confidence_source"] == "head"
        assert len(calibrated.generate(prompts[0], max_new_tokens=20)["output_ids"]) > 0
