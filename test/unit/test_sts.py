"""The calibration of a confidence head: what a server collects, what is fitted to it, what neither accepts."""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import replace

import pytest
import torch

from flashspark import envs
from flashspark.benchmark.dspark_sts_fit import main
from flashspark.benchmark.sts_fit import GRID, expected_calibration_error, fit, is_saturated
from flashspark.speculative import sts_records
from flashspark.speculative.calibration import load_sts
from flashspark.speculative.sts_records import load_records, record_files
from harness import Harness, Job, ScriptedDrafter
from tiny_models import write_dspark, write_target

COLLECT = envs.DSPARK_STS_COLLECT_PATH.name
GAMMA = 5
PENALISED = {"frequency_penalty": 0.5}  # a target that the draft does not see


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    target = write_target(root / "target", eos_token_id=None)
    return target, write_dspark(root / "dspark", target)


class MarkedDrafter(ScriptedDrafter):
    """Knows the future, spoils some drafts of it, and says in its signal which: positive where the draft is right."""

    has_signal = True

    def propose(self, rows, greedy, temperature, uniforms, with_signal=False):
        block = super().propose(rows, greedy, temperature, uniforms)
        draw = torch.rand(block.tokens.shape, generator=self.generator)
        tokens = torch.where(draw < 0.3, (block.tokens + 1) % self._vocab_size, block.tokens)
        return replace(block, tokens=tokens, candidate_ids=tokens[..., None], signal=draw.float() - 0.3)


def collect(pair, stem, monkeypatch, jobs):
    """Serves the jobs with a marked drafter; returns the harness, not closed yet, and the results."""
    expected = Harness(pair[0]).run(jobs)
    monkeypatch.setenv(COLLECT, str(stem))
    monkeypatch.setattr(sts_records, "STEPS_PER_FILE", 20)
    harness = Harness(*pair, ragged_verify_mode="cap-accept", max_running_requests=4)
    future = {tuple(job.prompt): result.tokens for job, result in zip(jobs, expected, strict=True)}
    drafter = MarkedDrafter(harness, GAMMA, future, 0)
    drafter.generator = torch.Generator().manual_seed(0)
    harness._worker.drafter = drafter
    results = harness.run(jobs)
    assert [r.tokens for r in results] == [r.tokens for r in expected]
    return harness, results


def test_collected_labels_are_what_was_accepted(pair, tmp_path, monkeypatch, caplog):
    """Every full block of the requests that the draft sees, once, the last ones at the end; and no other block."""
    caplog.set_level(logging.INFO)
    stem = tmp_path / "records"
    jobs = [Job([5 + i, 9, 40 + i], 60 + i, arrive=3 * i) for i in range(6)]
    jobs += [Job([7, 8, 9], 50, sampling=PENALISED)]
    harness, results = collect(pair, stem, monkeypatch, jobs)
    early = len(record_files(str(stem)))
    harness.scheduler.close()
    logits, prefix = load_records(str(stem))
    assert [path.name for path in record_files(str(stem))] == [f"records.{i}.pt" for i in range(early + 1)]
    assert early >= 2 and not list(tmp_path.glob("*.part"))
    assert torch.equal(prefix, (logits > 0).long().cumprod(1).bool())
    expected = Counter()
    for job, result in zip(jobs[:-1], results[:-1], strict=True):
        left = job.max_new_tokens
        for num_tokens in result.steps:
            if left > GAMMA:
                expected[num_tokens - 1] += 1
            left -= num_tokens
    assert Counter(prefix.sum(1).tolist()) == expected
    assert f"in {stem}.{early}.pt, {len(logits)} so far" in caplog.text


def test_records_that_cannot_be_written_do_not_stop_the_server(pair, tmp_path, monkeypatch, caplog):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.setattr(torch, "save", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
    harness, _ = collect(pair, folder / "records", monkeypatch, [Job([5, 9, 40], 60)])
    harness.scheduler.close()
    assert "confidence records are lost" in caplog.text and "disk full" in caplog.text
    assert harness._worker.adaptive.source.num_blocks == 0


def synthetic(temperatures, num_blocks=20_000, seed=2):
    """Logits of a head that is off by the given temperatures, and what happens to its drafts."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_blocks, len(temperatures))
    true = torch.randn(shape, dtype=torch.float64, generator=generator) + 1.0
    hits = torch.rand(shape, dtype=torch.float64, generator=generator) < torch.sigmoid(true)
    return true * torch.tensor(temperatures), hits.cumprod(1).bool()


def test_fit_recovers_known_temperatures():
    temperatures = (2.0, 0.5, 4.0)
    logits, prefix = synthetic(temperatures)
    found = fit(logits, prefix, "synthetic")
    for got, true in zip(found.temperatures, temperatures, strict=True):
        assert 0.8 < got / true < 1.25
    assert found.num_samples == 20_000 and found.dataset == "synthetic"
    assert max(found.ece_after) < 0.02 < min(found.ece_before)


def test_a_true_head_is_left_alone():
    found = fit(*synthetic((1.0, 1.0)), "true")
    assert all(0.85 < t < 1.2 for t in found.temperatures)


def test_calibration_error_by_hand():
    """Two bins: two predictions of 0.25 of which one comes true, two of 0.95 of which both do."""
    predicted = torch.tensor([0.25, 0.25, 0.95, 0.95], dtype=torch.float64)
    happened = torch.tensor([True, False, True, True])
    assert expected_calibration_error(predicted, happened) == pytest.approx((0.5 + 0.1) / 4)


def test_ends_of_the_grid_are_saturated():
    assert [is_saturated(round(t, 6)) for t in GRID] == [True, *[False] * 39, True]


def save(path, logits, prefix):
    torch.save({"logits": logits.float(), "prefix_mask": prefix.float()}, path)


def test_command_fits_and_warns(tmp_path, capsys):
    """The second position's logits are noise: the flatter they are made, the better."""
    logits, prefix = synthetic((2.0, 1.0, 1.0), 3000)
    logits[:, 1] = 30 * torch.randn(3000, generator=torch.Generator().manual_seed(0))
    for i, part in enumerate(torch.arange(3000).split(700)):
        save(tmp_path / f"r.{i}.pt", logits[part], prefix[part])
    out = tmp_path / "sts.json"
    assert main(["--records", str(tmp_path / "r"), "--out", str(out), "--dataset", "synthetic"]) == 0
    told = capsys.readouterr()
    calibration = load_sts(out)
    assert calibration.num_samples == 3000 and calibration.dataset == "synthetic"
    assert 1.6 < calibration.temperatures[0] < 2.5 and calibration.temperatures[1] == 10.0
    assert set(json.loads(out.read_text())) == {
        *("temperatures", "dataset", "num_samples", "ece_before", "ece_after")
    }
    lines = told.out.splitlines()
    assert lines[1].split() == [
        *("1", f"{calibration.temperatures[0]:.4f}", f"{prefix[:, 0].double().mean():.4f}"),
        *(f"{calibration.ece_before[0]:.4f}", f"{calibration.ece_after[0]:.4f}"),
    ]
    assert lines[-1] == f"wrote {out}, fitted to 3000 blocks"
    assert "warning: the temperature of draft 2 is 10, the end of what is tried" in told.err
    assert "draft 1" not in told.err


def test_too_few_records_are_refused(tmp_path, capsys):
    save(tmp_path / "r.0.pt", *synthetic((1.0,), 999))
    flags = ["--records", str(tmp_path / "r"), "--out", str(tmp_path / "sts.json")]
    assert main(flags) == 1
    assert "999 blocks are too few" in capsys.readouterr().err
    assert not (tmp_path / "sts.json").exists()
    assert main([*flags, "--min-samples", "500"]) == 0


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no records: there is no file .*r.<number>.pt"),
        ({"r.0.pt": b"no archive"}, "r.0.pt is no file of records"),
        ({"r.0.pt": {"logits": torch.zeros(2, 3)}}, "r.0.pt is no file of records: .*prefix_mask"),
        ({"r.0.pt": (torch.zeros(2, 3), torch.zeros(2, 2))}, "must be \\[blocks, drafts\\] both"),
        ({"r.0.pt": (torch.zeros(3), torch.zeros(3))}, "must be \\[blocks, drafts\\] both"),
        ({"r.0.pt": (torch.full((1, 1), torch.nan), torch.zeros(1, 1))}, "logits must be finite"),
        ({"r.0.pt": (torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]))}, "1 for leading drafts only"),
        (
            {f"r.{i}.pt": (torch.zeros(1, 2 + i), torch.zeros(1, 2 + i)) for i in range(2)},
            "different lengths: 2 in .*r.0.pt, 3 in .*r.1.pt drafts",
        ),
    ],
)
def test_files_that_are_no_records_are_refused(tmp_path, files, words):
    for name, content in files.items():
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        elif isinstance(content, dict):
            torch.save(content, tmp_path / name)
        else:
            save(tmp_path / name, *content)
    with pytest.raises(ValueError, match=words):
        load_records(str(tmp_path / "r"))


def test_only_the_stem_s_own_files_are_read_in_order(tmp_path):
    for name in ("r.10.pt", "r.2.pt", "r.x.pt", "rr.0.pt", "r.0.part", "r.pt"):
        (tmp_path / name).touch()
    assert [path.name for path in record_files(str(tmp_path / "r"))] == ["r.2.pt", "r.10.pt"]
