"""Flags: spelling, sizes, files, what is refused and how, and the way to the scheduler process."""

from __future__ import annotations

import dataclasses

import pytest

from flashspark import envs
from flashspark.args import ArgumentError, ServerArgs, parse_args
from flashspark.args.command_line import parse_size
from flashspark.args.server_args import flag_name, flags


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv("SGLANG_RAGGED_VERIFY_MODE", raising=False)


def parse(*argv: str) -> ServerArgs:
    return parse_args(["--model-path", "/models/target", *argv])


def refusal(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        parse(*argv)
    assert exit_info.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_defaults_are_resolved():
    args = parse()
    assert args.tokenizer_path == args.served_model_name == args.model_path == "/models/target"
    assert (args.host, args.port, args.page_size) == ("127.0.0.1", 30000, 16)
    assert args.shutdown_timeout == 30
    assert 0 <= args.random_seed <= 2**30
    assert args.ragged_verify_mode == "static"
    assert not args.speculative


def test_draft_limits_running_requests():
    draft = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "/models/draft"]
    assert parse(*draft).max_running_requests == 48
    assert parse(*draft, "--max-running-requests", "7").max_running_requests == 7


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--model=/other"], "model_path", "/other"),
        (["--tp", "1"], "tp_size", 1),
        (["--tensor-parallel-size=1"], "tp_size", 1),
        (["--cuda-graph-max-bs", "8"], "cuda_graph_max_bs_decode", 8),
        (["--cuda-graph-bs", "1", "2", "4"], "cuda_graph_bs_decode", (1, 2, 4)),
        (["--context-length", "32Ki"], "context_length", 32768),
        (["--max-total-tokens=1.5k"], "max_total_tokens", 1500),
        (["--chunked-prefill-size", "-1"], "chunked_prefill_size", -1),
        (["--disable-radix"], "disable_radix_cache", True),
        (["--ragged-verify-mode", "static"], "ragged_verify_mode", "static"),
        (["--ragged-verify-mode", "cap-accept"], "ragged_verify_mode", "cap-accept"),
        (["--speculative-dspark-sps-table-path", "t.json"], "speculative_dspark_sps_table_path", "t.json"),
        (["--speculative-dspark-conf", "s.json"], "speculative_dspark_confidence_sts_path", "s.json"),
        (["--speculative-cost-table", "none"], "speculative_cost_table", "none"),
        (["--disable-cost-table-correction"], "disable_cost_table_correction", True),
        (["--speculative-min-drafts-every", "16"], "speculative_min_drafts_every", 16),
        (["--speculative-verify-tier-tokens", "4"], "speculative_verify_tier_tokens", 4),
        (["--log-requests-level", "0"], "log_requests_level", 0),
        (["--prefill-attention-backend", "flashinfer"], "prefill_attention_backend", "flashinfer"),
        (["--decode-attention-backend", "triton"], "decode_attention_backend", "triton"),
    ],
)
def test_spellings(argv, field, value):
    assert getattr(parse(*argv), field) == value


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--tp-size", "2"], ["--tp-size 2", "not available yet", "accepted: 1"]),
        (["--dp", "2"], ["--dp-size 2", "docs/scale-out.md"]),
        (["--nnodes", "2"], ["--nnodes 2", "docs/scale-out.md"]),
        (["--attention-backend", "fa3"], ["--attention-backend fa3", "torch_native", "flashinfer"]),
        (["--decode-attention-backend", "fa3"], ["--decode-attention-backend fa3", "triton"]),
        (["--dtype", "int8"], ["--dtype int8", "bfloat16"]),
        (["--load-format", "gguf"], ["--load-format gguf", "safetensors"]),
        (["--ragged-verify-mode", "ragged"], ["--ragged-verify-mode ragged", "static, cap-accept, compact"]),
        (["--speculative-cost-table", "t.json"], ["--speculative-cost-table t.json", "measured, none"]),
        (["--speculative-min-drafts-every", "-1"], ["--speculative-min-drafts-every -1", "at least 0"]),
        (["--speculative-verify-tier-tokens", "0"], ["--speculative-verify-tier-tokens 0", "at least 1"]),
        (["--quantization", "fp8"], ["--quantization fp8", "leave it out"]),
        (["--base-gpu-id", "1"], ["--base-gpu-id 1", "CUDA_VISIBLE_DEVICES"]),
        (["--speculative-dflash-draft-window-size", "64"], ["--speculative-draft-window-size 64", "context"]),
        (["--speculative-algorithm", "EAGLE3"], ["--speculative-algorithm EAGLE3", "use DFLASH"]),
        (
            ["--speculative-algorithm", "DFLASH"],
            ["--speculative-algorithm", "--speculative-draft-model-path"],
        ),
        (
            ["--speculative-draft-model-path", "d"],
            ["--speculative-draft-model-path", "--speculative-algorithm"],
        ),
        (
            ["--speculative-num-draft-tokens", "4"],
            ["--speculative-num-draft-tokens 4", "--speculative-algorithm"],
        ),
        (["--port", "70000"], ["--port 70000", "at most 65535"]),
        (["--page-size", "0"], ["--page-size 0", "at least 1"]),
        (["--shutdown-timeout", "nan"], ["--shutdown-timeout nan", "finite"]),
        (["--max-running-requests", "many"], ["--max-running-requests", "many"]),
        (["--chunked-prefill-size", "0"], ["--chunked-prefill-size 0", "-1"]),
        (["--json-model-override-args", "[1]"], ["--json-model-override-args", "object"]),
        (["--json-model-override-args", "{"], ["--json-model-override-args", "not JSON"]),
        (["--no-such-flag", "1"], ["unrecognized", "--no-such-flag"]),
        (["--speculative-d", "1"], ["ambiguous", "--speculative-d"]),
        (["--context-length", "1.5Ki"], ["--context-length", "whole numbers"]),
    ],
)
def test_refusals_name_flag_value_and_remedy(capsys, argv, words):
    message = refusal(capsys, *argv)
    for word in words:
        assert word in message, message


def test_contradicting_widths(capsys):
    draft = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "d"]
    widths = ["--speculative-num-draft-tokens", "8", "--speculative-dflash-block-size", "4"]
    message = refusal(capsys, *draft, *widths)
    assert "--speculative-num-draft-tokens 8" in message
    assert "--speculative-dflash-block-size 4" in message


DSPARK = ["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", "d"]


@pytest.mark.parametrize(
    ("argv", "gamma"),
    [
        ([], None),
        (["--speculative-dspark-block-size", "5"], 5),
        (["--speculative-num-draft-tokens", "6"], 5),
        (["--speculative-num-draft-tokens", "6", "--speculative-dspark-block-size", "5"], 5),
        (["--speculative-num-draft-tokens", "2"], 1),
    ],
)
def test_dspark_block_is_the_verify_width_less_one(argv, gamma):
    args = parse(*DSPARK, *argv)
    assert (args.draft_block_size, args.max_running_requests) == (gamma, 48)
    dflash = parse("--speculative-algorithm", "DFLASH", *DSPARK[2:], "--speculative-num-draft-tokens", "6")
    assert dflash.draft_block_size == 6


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            [*DSPARK, "--speculative-num-draft-tokens", "5", "--speculative-dspark-block-size", "5"],
            ["--speculative-num-draft-tokens 5", "--speculative-dspark-block-size 5", "+ 1"],
        ),
        (
            [*DSPARK, "--speculative-dflash-block-size", "5"],
            ["--speculative-dflash-block-size 5", "belongs to DFLASH", "--speculative-num-draft-tokens"],
        ),
        (
            ["--speculative-algorithm", "DFLASH", *DSPARK[2:], "--speculative-dspark-block-size", "5"],
            ["--speculative-dspark-block-size 5", "belongs to DSPARK"],
        ),
        (
            ["--speculative-dspark-block-size", "5"],
            ["--speculative-dspark-block-size 5", "--speculative-algorithm DSPARK"],
        ),
        ([*DSPARK, "--speculative-dspark-block-size", "0"], ["--speculative-dspark-block-size 0"]),
        ([*DSPARK, "--speculative-num-draft-tokens", "1"], ["--speculative-num-draft-tokens 1"]),
        (
            ["--speculative-algorithm", "DSPARK"],
            ["--speculative-algorithm DSPARK", "--speculative-draft-model-path"],
        ),
    ],
)
def test_dspark_width_refusals(capsys, argv, words):
    message = refusal(capsys, *argv)
    for word in words:
        assert word in message, message


def test_dspark_draft_in_the_models_folder(tmp_path):
    (tmp_path / "dspark").mkdir()
    (tmp_path / "dspark" / "config.json").write_text("{}")
    argv = ["--model-path", str(tmp_path), "--speculative-algorithm", "DSPARK"]
    assert parse_args(argv).speculative_draft_model_path == str(tmp_path / "dspark")
    assert parse_args([*argv, *DSPARK[2:]]).speculative_draft_model_path == "d"


def test_model_path_is_required(capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse_args([])
    assert exit_info.value.code == 2
    assert "--model-path" in capsys.readouterr().err


def test_every_neutral_flag_refuses_another_value():
    for name, spec in flags().items():
        if spec.neutral is None:
            continue
        other = {bool: True, int: 93, float: 0.25}.get(type(spec.neutral[0]), "something")
        with pytest.raises(ArgumentError, match=flag_name(name)):
            ServerArgs(model_path="/m", **{name: other})
        for value in spec.neutral:
            assert getattr(ServerArgs(model_path="/m", **{name: value}), name) == value


def test_flags_without_effect_warn():
    warnings = parse("--schedule-conservativeness", "0.8", "--cuda-graph-max-bs-prefill", "4").warnings()
    assert [line.split()[0] for line in warnings] == [
        "--schedule-conservativeness",
        "--cuda-graph-max-bs-prefill",
    ]
    assert parse().warnings() == []


def test_sizes():
    assert [parse_size(text) for text in ("7", "32k", "32Ki", "0.5M", "1Gi")] == [
        7,
        32000,
        32768,
        500000,
        2**30,
    ]
    for text in ("32K", "32ki", "k", "1.5", "0x10", "1e3", ""):
        with pytest.raises(Exception, match=r"size|whole"):
            parse_size(text)


def test_config_file(tmp_path, capsys):
    file = tmp_path / "server.yaml"
    file.write_text(
        "model-path: /from/file\nport: 31000\ndisable_radix_cache: true\nlog-requests: false\n"
        "cuda-graph-bs: [1, 2]\ncontext-length: 8k\n"
    )
    args = parse_args(["--config", str(file), "--port", "32000"])
    assert (args.model_path, args.port, args.context_length) == ("/from/file", 32000, 8000)
    assert args.disable_radix_cache
    assert not args.log_requests
    assert args.cuda_graph_bs_decode == (1, 2)
    assert parse_args(["--conf", str(file)]).port == 31000  # abbreviated like any other flag
    file.write_text("model-path: m\njson-model-override-args: {rope_theta: 1.5}\nrevision: null\n")
    assert parse_args(["--config", str(file)]).model_overrides == {"rope_theta": 1.5}
    for text, word in (
        *(("unknown-flag: 1", "--unknown-flag"), ("unknown-flag: false", "--unknown-flag")),
        *(("port: false", "--port"), ("- a list", "--config"), ("a: [", "--config")),
    ):
        file.write_text(text)
        assert word in refusal(capsys, "--config", str(file))
    assert "--config" in refusal(capsys, "--config", str(tmp_path / "absent.yaml"))


def test_json_round_trip():
    args = parse("--cuda-graph-bs", "1", "2", "--api-key", "secret")
    again = ServerArgs.from_json(args.to_json())
    assert again == args
    assert ServerArgs.from_dict(args.to_dict()) == args
    assert "secret" not in repr(args)
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.port = 1


def test_verify_mode_from_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    assert parse().ragged_verify_mode == "compact"
    assert parse("--ragged-verify-mode", "static").ragged_verify_mode == "static"
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "Compact")
    message = refusal(capsys)
    for word in ("SGLANG_RAGGED_VERIFY_MODE = Compact", "static, cap-accept, compact"):
        assert word in message
    assert parse("--ragged-verify-mode", "static").ragged_verify_mode == "static"


def test_environment_values(caplog):
    timeout = envs.HEALTH_CHECK_TIMEOUT_S
    assert timeout.get({}) == 20
    assert timeout.get({"SGLANG_HEALTH_CHECK_TIMEOUT": "3"}) == 3
    assert timeout.get({"SGL_HEALTH_CHECK_TIMEOUT": "4"}) == 4
    assert timeout.get({"SGLANG_HEALTH_CHECK_TIMEOUT": "soon"}) == 20
    assert "SGLANG_HEALTH_CHECK_TIMEOUT" in caplog.text
    assert envs.unavailable_settings({}) == []
    name = "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES"
    assert envs.unavailable_settings({name: "0"}) == []
    assert envs.unavailable_settings({name: "1"}) == [name]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"SGLANG_SIMULATE_ACC_LEN": "-1"}, None),
        ({"SGLANG_SIMULATE_ACC_LEN": "0"}, None),
        ({"SGLANG_SIMULATE_ACC_METHOD": "multinomial"}, None),
        ({"SGLANG_SIMULATE_ACC_LEN": "1"}, 1.0),
        ({"SGLANG_SIMULATE_ACC_LEN": "2.5", "SGLANG_SIMULATE_ACC_METHOD": "match-expected"}, 2.5),
    ],
)
def test_simulated_acceptance(environ, expected):
    assert envs.simulated_accept_length(environ) == expected


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"SGLANG_SIMULATE_ACC_LEN": "0.5"}, "at least 1 token"),
        ({"SGLANG_SIMULATE_ACC_LEN": "inf"}, "at most a block"),
        ({"SGLANG_SIMULATE_ACC_LEN": "nan"}, "at least 1 token"),
        ({"SGLANG_SIMULATE_ACC_LEN": "1", "SGLANG_SIMULATE_ACC_METHOD": "multinomial"}, "match-expected"),
    ],
)
def test_other_simulated_acceptance_is_refused(environ, reason):
    with pytest.raises(ValueError, match=reason):
        envs.simulated_accept_length(environ)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ()),
        ({"SGLANG_DSPARK_ENABLE_SPS_RECORD": "1"}, ("core", "step_cpu_time")),
        ({"SGLANG_DSPARK_DEBUG_DUMP": "core"}, ("core",)),
        ({"SGLANG_DSPARK_DEBUG_DUMP": "step_cpu_time,core"}, ("core", "step_cpu_time")),
        ({"SGLANG_DSPARK_DEBUG_DUMP": "reqs"}, ("core", "reqs")),
        (
            {"SGLANG_DSPARK_DEBUG_DUMP": "reqs", "SGLANG_DSPARK_ENABLE_SPS_RECORD": "1"},
            ("core", "step_cpu_time", "reqs"),
        ),
        ({"SGLANG_DSPARK_DEBUG_DUMP": "all"}, ("core", "step_cpu_time", "reqs")),
    ],
)
def test_record_components(environ, expected):
    assert envs.record_components(environ) == expected


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *[(name, "GPU's clock and not available on a CPU") for name in envs.GPU_RECORD_COMPONENTS],
        ("requests", "no such component; there are core, step_cpu_time, reqs and all"),
    ],
)
def test_record_components_that_cannot_be_had_are_refused(name, reason):
    with pytest.raises(ValueError, match=f"SGLANG_DSPARK_DEBUG_DUMP={name}: .*{reason}"):
        envs.record_components({"SGLANG_DSPARK_DEBUG_DUMP": f"core,{name}"})
