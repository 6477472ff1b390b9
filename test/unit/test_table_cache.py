"""Cached tables: found under their own fingerprint, and refused, with a reason, under any other."""

from __future__ import annotations

import logging
import os
import tempfile

import msgspec
import pytest

from flashspark.engine.fingerprint import folder_fingerprint
from flashspark.speculative.cost_table import PlainStepCosts, SpsAdditiveCostTable
from flashspark.speculative.table_cache import FORMAT, StoredTables, TableCache, cache_folder
from tiny_models import write_dflash2, write_target

FINGERPRINT = {"target": "a", "draft": "b", "width": 8, "versions": "torch 1"}
TABLE = SpsAdditiveCostTable(5e-3, (1, 4, 8), (0.0, 6e-4, 1.4e-3), (0, 64, 128), (0.0, 2e-3, 5e-3))
STORED = StoredTables(FORMAT, FINGERPRINT, TABLE, PlainStepCosts((1, 8), (1e-3, 2e-3)), 0.07, 5.5)


@pytest.fixture(autouse=True)
def _log_level(caplog):
    caplog.set_level(logging.INFO)


def cache(folder, **changes) -> TableCache:
    return TableCache(folder, FINGERPRINT | changes, ("target", "draft", "width"))


def test_what_is_stored_is_loaded(tmp_path, caplog):
    folder = tmp_path / "deep" / "folder"
    assert cache(folder).load() is None
    cache(folder).store(STORED)
    assert cache(folder).load() == STORED
    assert [path.name for path in folder.iterdir()] == [cache(folder).path.name]
    assert caplog.text == ""


def test_another_fingerprint_is_not_served(tmp_path, caplog):
    cache(tmp_path).store(STORED)
    assert cache(tmp_path, versions="torch 2").load() is None
    assert "versions torch 1, now torch 2" in caplog.text
    caplog.clear()
    assert cache(tmp_path, target="c").load() is None  # other models: nothing to compare with
    assert caplog.text == ""
    assert cache(tmp_path).load() == STORED


def test_a_file_that_was_moved_is_refused(tmp_path, caplog):
    cache(tmp_path).store(STORED)
    cache(tmp_path).path.rename(cache(tmp_path, versions="torch 2").path)
    assert cache(tmp_path, versions="torch 2").load() is None
    assert "is not used, it was measured for versions torch 1, now torch 2; measuring again" in caplog.text
    assert cache(tmp_path).load() is None
    assert "is not used, it has another file's name" in caplog.text


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (b"", "cannot be read"),
        (b"{", "cannot be read"),
        (b"\xff\x00", "cannot be read"),
        (b"[]", "cannot be read"),
        (msgspec.json.encode(STORED)[:-40], "cannot be read"),
        (
            msgspec.json.encode(STORED).replace(b'"bias_seconds":0.005', b'"bias_seconds":-1.0'),
            "bias_seconds",
        ),
        (msgspec.json.encode(msgspec.structs.replace(STORED, format=FORMAT + 1)), "has format"),
    ],
)
def test_a_damaged_file_is_measured_again(tmp_path, caplog, text, word):
    cache(tmp_path).path.write_bytes(text)
    assert cache(tmp_path).load() is None
    assert word in caplog.text
    assert "measuring again" in caplog.text
    caplog.clear()
    assert cache(tmp_path, versions="torch 2").load() is None  # looks at it as the newest of its family
    assert "the newest cached cost table of these models is not used, it " in caplog.text
    assert word in caplog.text
    cache(tmp_path).store(STORED)
    assert cache(tmp_path).load() == STORED


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    cache(tmp_path / "file").store(STORED)
    assert "is not cached" in caplog.text
    assert cache(tmp_path / "file").load() is None


def test_a_full_disk_costs_a_warning_and_leaves_no_rubbish(tmp_path, caplog, monkeypatch):
    mkstemp = tempfile.mkstemp

    def on_a_full_disk(**options):
        number, name = mkstemp(**options)
        os.close(number)
        return os.open("/dev/full", os.O_WRONLY), name

    monkeypatch.setattr(tempfile, "mkstemp", on_a_full_disk)
    cache(tmp_path).store(STORED)
    assert "the cost table is not cached" in caplog.text
    assert "No space left on device" in caplog.text
    assert list(tmp_path.iterdir()) == []
    assert cache(tmp_path).load() is None
    monkeypatch.undo()
    cache(tmp_path).store(STORED)
    assert cache(tmp_path).load() == STORED


def test_the_folder_follows_the_desktop_standard(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "flashspark" / "cost-tables"
    monkeypatch.setenv("HOME", str(tmp_path / "ann"))
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder() == tmp_path / "ann" / ".cache" / "flashspark" / "cost-tables"


def test_a_folders_fingerprint_follows_shapes_not_weights(tmp_path):
    target = write_target(tmp_path / "a")
    assert folder_fingerprint(target) == folder_fingerprint(write_target(tmp_path / "b", seed=5))
    assert folder_fingerprint(target) != folder_fingerprint(
        write_target(tmp_path / "c", intermediate_size=96)
    )
    draft = write_dflash2(tmp_path / "draft", target)
    before = folder_fingerprint(draft)
    assert before != folder_fingerprint(target)
    config = draft / "config.json"
    config.write_text(config.read_text() + "\n")
    assert folder_fingerprint(draft) != before
