"""Servers that cannot start: a non-zero code within seconds, a message with the thing and the remedy, no orphan."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.server import Server, speculative
from tiny_models import write_dflash2, write_target

SECONDS = 60.0  # generous for a loaded machine; a refusal takes one to four


def refused(tmp_path: Path, *flags: str, port: int | None = None, code: int = 1) -> str:
    """Starts a server that must not start; returns the last thing it says."""
    server = Server(*flags, log=tmp_path / "log", port=port)
    try:
        assert server.wait_exit(SECONDS) == code, server.log
        assert server.leftovers() == []
        assert "Traceback" not in server.log, server.log
        lines = server.log.strip().splitlines()
        assert lines, "it says nothing"
        return lines[-1]
    finally:
        server.kill()


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def truncate(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def lost_shard(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.rename(folder / "model-00001-of-00002.safetensors")
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"model.norm.weight": shards[0], "lm_head.weight": shards[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


WRONG_MODELS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "no config": (lambda f: (f / "config.json").unlink(), ["config.json", "missing"]),
    "half a config": (lambda f: truncate(f / "config.json", 200), ["config.json", "written completely"]),
    "another architecture": (
        lambda f: edit_config(f, architectures=["LlamaForCausalLM"]),
        ["LlamaForCausalLM", "Qwen3ForCausalLM"],
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["no weights", "model.safetensors"]),
    "half the weights": (
        lambda f: truncate(f / "model.safetensors", 20_000),
        ["model.safetensors", "written to the end"],
    ),
    "only pickled weights": (only_pickle, ["pytorch_model.bin", "only safetensors"]),
    "a lost shard": (lost_shard, ["model-00002-of-00002.safetensors", "missing"]),
    "a layer less in the file": (
        lambda f: edit_config(f, num_hidden_layers=5),
        ["missing", "layers.4.", "do not fit config.json"],
    ),
    "a layer more in the file": (
        lambda f: edit_config(f, num_hidden_layers=3),
        ["unexpected", "layers.3.", "do not fit config.json"],
    ),
    "another width": (
        lambda f: edit_config(f, intermediate_size=96),
        ["of another shape", "mlp.", "do not fit config.json"],
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), ["tokenizer.json", "--tokenizer-path"]),
    "half a tokenizer": (
        lambda f: truncate(f / "tokenizer.json", 300),
        ["tokenizer.json", "cannot be loaded"],
    ),
}


# A start-up that gets as far as the weights imports torch, seconds each: the fast tier has one of a kind.
FAST = {"no config", "half the weights", "a layer less in the file", "no tokenizer", "half a tokenizer"}


@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.full) for case in WRONG_MODELS]
)
def test_wrong_model_folder(tmp_path: Path, case: str) -> None:
    spoil, expected = WRONG_MODELS[case]
    target = write_target(tmp_path / "target")
    spoil(target)
    message = refused(tmp_path, "--model-path", str(target))
    for part in [*expected, str(target)]:
        assert part in message, message


def test_no_model_folder(tmp_path: Path) -> None:
    message = refused(tmp_path, "--model-path", str(tmp_path / "nowhere"))
    assert "--model-path" in message and "no such folder" in message and "demo" in message
    (tmp_path / "file").write_text("x")
    assert str(tmp_path / "file") in refused(tmp_path, "--model-path", str(tmp_path / "file"))
    assert "--model-path" in refused(tmp_path, code=2)


@pytest.mark.full
def test_a_draft_is_no_target(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    draft = write_dflash2(tmp_path / "draft", target)
    (draft / "tokenizer.json").write_bytes((target / "tokenizer.json").read_bytes())
    message = refused(tmp_path, "--model-path", str(draft))
    assert "DFlash2DraftModel" in message and "--speculative-draft-model-path" in message
    message = refused(tmp_path, *speculative(target, target))
    assert "Qwen3ForCausalLM" in message and "draft" in message


WRONG_DRAFTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "hidden size": ({"hidden_size": 64}, ["hidden_size 64", "48"]),
    "vocabulary": ({"vocab_size": 300}, ["vocab_size 300", "260"]),
    "layer ids": ({"dflash_config": {"target_layer_ids": [0, 9]}}, ["target_layer_ids [9]", "4"]),
    "mask id": ({"dflash_config": {"mask_token_id": 260}}, ["mask_token_id 260", "260"]),
}


@pytest.mark.parametrize("case", WRONG_DRAFTS)
def test_draft_that_does_not_fit(tmp_path: Path, case: str) -> None:
    config, expected = WRONG_DRAFTS[case]
    target = write_target(tmp_path / "target")
    draft = write_dflash2(tmp_path / "draft", target, **config)
    message = refused(tmp_path, *speculative(target, draft))
    for part in [*expected, str(draft), "does not fit the target"]:
        assert part in message, message


def test_nothing_to_plan_from(tmp_path: Path, tiny_pair: tuple[Path, Path]) -> None:
    message = refused(tmp_path, "--model-path", str(tiny_pair[0]), "--ragged-verify-mode", "compact")
    for part in (
        "SGLANG_RAGGED_VERIFY_MODE",
        "compact",
        "there is no draft",
        "--speculative-algorithm",
        "static",
    ):
        assert part in message, message


@pytest.mark.full
def test_half_a_draft(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    draft = write_dflash2(tmp_path / "draft", target)
    truncate(draft / "model.safetensors", 5000)
    assert str(draft / "model.safetensors") in refused(tmp_path, *speculative(target, draft))
    assert "no-draft" in refused(tmp_path, *speculative(target, tmp_path / "no-draft"))


WRONG_FLAGS: dict[str, tuple[list[str], list[str]]] = {
    "algorithm": (["--speculative-algorithm", "EAGLE"], ["--speculative-algorithm EAGLE", "DFLASH"]),
    "no draft": (["--speculative-algorithm", "DFLASH"], ["--speculative-draft-model-path"]),
    "dtype": (["--dtype", "int3"], ["--dtype int3", "bfloat16"]),
    "number": (["--page-size", "many"], ["--page-size", "many"]),
    "range": (["--page-size", "0"], ["--page-size 0", "at least 1"]),
    "not finite": (["--shutdown-timeout", "nan"], ["--shutdown-timeout nan", "finite"]),
    "unknown flag": (["--no-such-flag"], ["--no-such-flag"]),
    "not yet": (["--tp-size", "2"], ["--tp-size 2", "not available yet"]),
    "json": (["--json-model-override-args", "{"], ["--json-model-override-args", "JSON"]),
    "backend": (["--attention-backend", "fa3"], ["--attention-backend fa3", "torch_native"]),
}


@pytest.mark.parametrize("case", WRONG_FLAGS)
def test_unknown_flag_value(tmp_path: Path, tiny_pair: tuple[Path, Path], case: str) -> None:
    flags, expected = WRONG_FLAGS[case]
    message = refused(tmp_path, "--model-path", str(tiny_pair[0]), *flags, code=2)
    for part in expected:
        assert part in message, message


WRONG_SIZES: dict[str, tuple[list[str], list[str]]] = {
    "context": (["--context-length", "5000"], ["--context-length 5000", "4096"]),
    "pool": (["--max-total-tokens", "8"], ["--max-total-tokens", "page", "8 tokens"]),
    "block": (["--speculative-num-draft-tokens", "9"], ["--speculative-num-draft-tokens 9", "2 to 6"]),
    "cost table": (
        ["--ragged-verify-mode", "compact", "--speculative-dspark-sps-table-path", "absent.json"],
        ["--speculative-dspark-sps-table-path", "absent.json", "No such file"],
    ),
}


@pytest.mark.parametrize("case", WRONG_SIZES)
def test_sizes_that_the_model_refuses(tmp_path: Path, tiny_pair: tuple[Path, Path], case: str) -> None:
    flags, expected = WRONG_SIZES[case]
    message = refused(tmp_path, *speculative(*tiny_pair), *flags)
    for part in expected:
        assert part in message, message


def test_port_in_use(tmp_path: Path, tiny_pair: tuple[Path, Path]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        message = refused(tmp_path, "--model-path", str(tiny_pair[0]), port=port)
    assert f"127.0.0.1:{port}" in message and "in use" in message and "--port" in message


def test_address_of_nobody(tmp_path: Path, tiny_pair: tuple[Path, Path]) -> None:
    message = refused(tmp_path, "--model-path", str(tiny_pair[0]), "--host", "203.0.113.7")
    assert "203.0.113.7" in message and "--host" in message
