"""docs/compatibility.md is what scripts/compatibility.py writes, and that leaves nothing out."""

from __future__ import annotations

import pytest

import compatibility
from flashspark.api.fields import neutral_fields
from flashspark.api.protocol import ChatBody, CompletionBody, GenerateBody, NativeSampling, SpeculationOptions
from flashspark.args.server_args import flag_name, flags


def test_the_committed_page_is_what_the_code_says() -> None:
    assert compatibility.PAGE.read_text() == compatibility.page(), (
        f"flags, routes or fields have changed: run `{compatibility.COMMAND}` and commit docs/compatibility.md"
    )


def test_every_flag_is_there_with_its_status() -> None:
    rows = {row[0].split(", ")[0].strip("`"): row for row in compatibility.flag_rows()}
    assert rows.keys() == {flag_name(name) for name in flags()}
    assert rows["--tp-size"][0] == "`--tp-size`, `--tensor-parallel-size`"
    assert rows["--tp-size"][3] == "neutral only: `1`"
    assert rows["--trust-remote-code"][3] == "no effect"
    assert rows["--context-length"][1:4] == ["size from 2", "", "honoured"]


def test_every_variable_is_there_with_its_meaning() -> None:
    rows = {row[0].strip("`"): row[1:] for row in compatibility.variable_rows()}
    assert rows["SGLANG_REQ_WAITING_TIMEOUT"][:2] == ["`-1.0`", "honoured"]
    assert rows["SGLANG_RECORD_STEP_TIME"] == ["`False`", "neutral only: `False`", ""]
    assert not [name for name, (_, status, text) in rows.items() if status == "honoured" and not text]


@pytest.mark.parametrize("model", [model for _, model in compatibility.models()])
def test_every_field_is_there_with_its_status(model) -> None:
    rows = {row[0].strip("`"): row for row in compatibility.field_rows(model)}
    assert rows.keys() == model.model_fields.keys()
    for name, row in rows.items():
        assert row[3].startswith("neutral only" if name in neutral_fields(model) else "honoured")


def test_models_are_found_at_any_depth() -> None:
    models = {model for _, model in compatibility.models()}
    assert {GenerateBody, NativeSampling, CompletionBody, ChatBody, SpeculationOptions} <= models
    assert [row for row in compatibility.field_rows(NativeSampling) if row[0] == "`top_p`"] == [
        ["`top_p`", "number above 0 to 1", "", "honoured", ""]
    ]


def test_a_changed_page_is_noticed(tmp_path, monkeypatch, capsys) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(compatibility, "PAGE", page)
    monkeypatch.setattr("sys.argv", ["compatibility.py"])
    assert compatibility.main() == 0
    page.write_text(page.read_text() + "edited")
    monkeypatch.setattr("sys.argv", ["compatibility.py", "--check"])
    assert compatibility.main() == 1
    assert compatibility.COMMAND in capsys.readouterr().err
