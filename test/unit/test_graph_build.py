"""What captured steps are built from: simulated acceptance that a mode and a width can have."""

from __future__ import annotations

import pytest

from flashspark.args import ServerArgs
from flashspark.scheduler.build import build_scheduler
from flashspark.scheduler.graph_build import accept_rule
from flashspark.speculative.adaptive import VerifyMode
from unit.test_lossless_tiny import folders  # noqa: F401 - fixture


@pytest.mark.parametrize(
    ("length", "mode", "drafts"),
    [(None, VerifyMode.COMPACT, None), ("1", VerifyMode.COMPACT, 0.0), ("2.5", VerifyMode.STATIC, 1.5)],
)
def test_simulated_acceptance(monkeypatch, length, mode, drafts):
    if length is not None:
        monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", length)
    assert accept_rule(mode, 8).simulated_drafts == drafts


@pytest.mark.parametrize(
    ("length", "mode", "reason"),
    [
        ("2", VerifyMode.COMPACT, "past a trimmed block"),
        ("1.5", VerifyMode.CAP_ACCEPT, "use static, or 1"),
        ("9", VerifyMode.STATIC, "at most its block of 8"),
    ],
)
def test_what_cannot_be_simulated(monkeypatch, length, mode, reason):
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", length)
    with pytest.raises(ValueError, match=reason):
        accept_rule(mode, 8)


@pytest.mark.parametrize(("size", "length", "width"), [(None, "7", 6), (4, "5", 4)])
def test_what_cannot_be_simulated_is_refused_before_a_model_is_loaded(
    tmp_path,
    folders,  # noqa: F811
    monkeypatch,
    size,
    length,
    width,
):
    """There is no target to load."""
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", length)
    args = ServerArgs(
        model_path=str(tmp_path / "nowhere"),
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=str(folders["dflash2"]),
        speculative_num_draft_tokens=size,
    )
    with pytest.raises(ValueError, match=f"at most its block of {width}"):
        build_scheduler(args, lambda output: None)
