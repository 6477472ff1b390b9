"""scripts/check_readme.py: how it reads a README. And our README: what it names exists, its links lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from flashspark.api.app import ROUTES
from flashspark.api.generation import Choice, Generation, Prompt, spec_details, usage
from flashspark.api.protocol import SpeculationOptions
from flashspark.args.command_line import build_parser
from flashspark.args.server_args import ServerArgs
from flashspark.ipc import SamplingParams, SpeculativeStats

ROOT = Path(__file__).parents[2]


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[name] = script
    spec.loader.exec_module(script)
    return script


check_readme = load_script("check_readme")

PAGE = """# Title
```bash
echo one
```
<!-- check: run --exit -->
```bash
bash demo.sh
```
```json
{"not": "run"}
```
<!-- check: server -->
```bash
serve
```
<!-- check: skip -->
```python
print("needs a GPU")
```
"""


def test_blocks_and_their_comments() -> None:
    blocks = [(b.line, b.kind, b.language, b.code) for b in check_readme.parse_blocks(PAGE)]
    assert blocks == [
        (2, "run", "bash", "echo one"),
        (6, "run", "bash", "bash demo.sh --exit"),
        (13, "server", "bash", "serve"),
        (17, "skip", "python", 'print("needs a GPU")'),
    ]


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(check_readme.CheckError, match=r"README.md:2: unknown kind 'later'"):
        check_readme.parse_blocks("<!-- check: later -->\n```bash\nls\n```\n")


def test_blocks_run_in_order_and_the_first_failure_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHSPARK_VENV", sys.prefix)
    page = (
        "```bash\ntouch a\n```\n```python\nopen('b', 'w')\n```\n```bash\nfalse\n```\n```bash\ntouch c\n```\n"
    )
    with pytest.raises(check_readme.CheckError, match=r"README.md:7: exit code 1"):
        check_readme.run_blocks(check_readme.parse_blocks(page), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_our_readme_starts_with_the_two_commands() -> None:
    blocks = check_readme.parse_blocks((ROOT / "README.md").read_text())
    assert [block.code for block in blocks[:2]] == ["bash scripts/demo.sh --exit", "bash scripts/test.sh"]
    assert [block.code for block in blocks if block.kind == "tests"] == ["bash scripts/test.sh"]


README = (ROOT / "README.md").read_text()
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
SCRIPTS = "".join(path.read_text() for path in (ROOT / "scripts").glob("*.*"))


def table_rows(header: str) -> list[list[str]]:
    """Cells of the README's table under `header`."""
    table = README.split(f"| {header} |", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def flag_rows() -> list[list[str]]:
    names = ("flag", "verification flag")
    return [row for name in names for row in table_rows(f"{name} | default | meaning")]


def test_every_flag_it_names_exists() -> None:
    server_flags = set(build_parser()._option_string_actions)
    for flag in set(re.findall(r"(?<![\w-])--[a-z][\w-]+", README)):
        # curl's and pip's own words, in their commands
        known = flag in server_flags or f'"{flag}"' in SCRIPTS or flag in SCRIPTS
        assert known or flag in {"--silent", "--fail", "--quiet", "--extra-index-url"}, flag
    for flags, _, _ in flag_rows():
        for flag in re.findall(r"--[\w-]+", flags):
            assert flag in server_flags, flag


def test_the_defaults_it_names_are_the_defaults() -> None:
    from flashspark.scheduler.build import CPU_CHUNKED_PREFILL_SIZE

    args = ServerArgs(model_path="demo")
    num_checked = 0
    for flags, defaults, _ in flag_rows():
        if flags.count("--") != len(re.findall(r"`[^`]+`", defaults)):
            continue  # told in words
        for flag, default in zip(
            re.findall(r"--([\w-]+)", flags), re.findall(r"`([^`]+)`", defaults), strict=True
        ):
            value = getattr(args, flag.replace("-", "_"))
            if flag == "chunked-prefill-size":
                value = CPU_CHUNKED_PREFILL_SIZE
            assert default in (str(value), f"{value:g}" if isinstance(value, float) else ""), flag
            num_checked += 1
    assert num_checked >= 9
    draft = ServerArgs(model_path="demo", speculative_algorithm="DFLASH", speculative_draft_model_path="x")
    assert f"`{draft.max_running_requests}` with a draft, else `{args.max_running_requests}`" in README


def test_every_route_it_names_exists() -> None:
    routes = {(method, path) for path, methods, _ in ROUTES for method in methods}
    named = [
        pair for row in table_rows("route | what") for pair in re.findall(r"`([A-Z]+) (/[\w/]+)`", row[0])
    ]
    assert len(named) >= 10
    assert set(named) <= routes


def test_the_statistics_it_names_are_those_of_an_answer() -> None:
    class NoText:
        def detokenizer(self, skip_special_tokens: bool) -> None:
            return None

    prompt = Prompt("id", [1], SamplingParams(max_new_tokens=4))
    generation = Generation([prompt], NoText(), "static")  # type: ignore[arg-type]
    choice: Choice = generation.choices[0]
    choice.token_ids = [1, 2, 3]
    choice.speculative = SpeculativeStats(1, 7, 7, 2, [0, 0, 1])
    native, capped, uncapped, openai, _ = (
        re.findall(r"`([\w.]+)`", row[1]) for row in table_rows("where | names")
    )
    assert set(native) <= set(spec_details(choice))
    of_static = spec_details(choice)
    choice.speculative = SpeculativeStats(1, 7, 7, 2, [0, 0, 1], [0] * 8 + [1])
    of_ragged = spec_details(choice)
    assert set(capped) == set(of_ragged) - set(of_static)
    choice.speculative = msgspec.structs.replace(choice.speculative, num_uncapped_tokens=4)
    assert set(uncapped) == set(spec_details(choice)) - set(of_ragged)
    assert set(openai) == set(usage([choice], [prompt], False, True)["speculative"])
    modes = SpeculationOptions.model_json_schema()["properties"]["mode"]["enum"]
    assert set(modes) == {"off", "static", "adaptive"}
    told = [row[0] for row in table_rows("`speculation` | what")]
    assert told[:3] == [f'`{{"mode": "{mode}"}}`' for mode in modes]
    assert all(f'"{name}"' in told[3] for name in SpeculationOptions.model_fields)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    file = ROOT / page
    for target in re.findall(r"\]\(([^)]+)\)", file.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        other = (file.parent / path).resolve() if path else file
        assert other.exists(), f"{page}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", other.read_text(), re.M)
            anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{page}: {target}"


def test_the_worked_example_is_what_the_functions_say() -> None:
    script = load_script("plot_worked_example")
    example = script.compute()
    page = (ROOT / "docs" / "adaptive-verification.md").read_text()
    assert script.survival_table(example) in page
    assert script.budget_table(example) in page
    gain = round(100 * (example.theta[example.best] / example.theta[-1] - 1))
    assert f"{gain} % more tokens per second" in " ".join(page.split())


def test_the_pad_up_figures_are_the_recorded_ones() -> None:
    """The table of docs/adaptive-verification.md against benchmark/results/pad_up_cpu.json."""
    page = (ROOT / "docs" / "adaptive-verification.md").read_text()
    recorded = json.loads((ROOT / "benchmark" / "results" / "pad_up_cpu.json").read_text())
    table = page.split("| probes of the table |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    for line, kind in zip(table, ("tiers", "doubling", "diagonal"), strict=True):
        for shown, tiers in zip(line.strip("|").split("|")[1:], ("fine", "blocks"), strict=True):
            cells = [c for c in recorded["cells"] if (c["tiers"], c["table"]) == (tiers, kind)]
            ratios = [c["pad-up over floor"][0] for c in cells]
            mean = recorded["summary"][f"{tiers} tiers, {kind} table: pad-up over floor"]
            assert shown.strip() == f"{mean:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def test_the_estimators_figures_are_the_recorded_ones() -> None:
    """The table of docs/adaptive-verification.md against benchmark/results/estimator_quality.json."""
    page = (ROOT / "docs" / "adaptive-verification.md").read_text()
    recorded = json.loads((ROOT / "benchmark" / "results" / "estimator_quality.json").read_text())
    table = page.split("| | temperature 0 | temperature 1 |", 1)[1].split("\n\n", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in table.splitlines()[2:]]
    for column, name in enumerate(("temperature 0", "temperature 1")):
        of = recorded[name]

        def ratio(judged: dict[str, Any], name: str = name) -> str:
            return f"{judged[name]['calibration']['expected_over_observed']:.2f}"

        trimming = sorted(ratio(judged) for judged in of["online, trimming by itself"])
        assert [row[column] for row in rows] == [
            f"{of['online'][name]['auc']:.2f}",
            f"{of['offline_fits']['position alone']['auc']:.2f}",
            f"{of['offline_fits']['all of these']['auc']:.2f}",
            ratio(of["online"]),
            f"{trimming[0]} to {trimming[-1]}",
            ratio(recorded["mixed traffic, per class coefficients"]),
            ratio(recorded["mixed traffic, shared coefficients"]),
        ]
        assert f"{of['blocks']:,}" in page
