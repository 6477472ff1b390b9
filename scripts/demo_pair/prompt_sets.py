"""The prompt sets of the benchmarks: candidates cut from held-out files, their greedy texts, and the choice."""

from __future__ import annotations

import ast
import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import corpus
from .decode import loop_end

SPLITS = {"choosing": 1, "measured": 2}  # of the held-out files, with the seed that windows are drawn from
NUM_CANDIDATES = {"choosing": 640, "measured": 1984}
NUM_PROMPTS, OUTPUT_TOKENS, BATCH = 512, 128, 64
PROMPT_LIMITS, MIN_PROMPT = (64, 128, 192), 20  # tokens
LINES_PER_WINDOW = 12
MAX_SEEN_SHARE, LONG_LINE = (
    0.4,
    24,
)  # of a prompt's lines longer than so many characters, those seen in training
NGRAM = 8
W2_ACCEPTANCE = 4.1  # at most, on the choosing split

Candidate = dict[str, Any]  # source, split, text, token_ids


def half_of(source: str) -> str:
    """Which split of the held-out files `package/path` is in: a third is for choosing."""
    digest = hashlib.sha256(f"prompt sets: {source}".encode()).digest()
    return "choosing" if int.from_bytes(digest[:8], "big") % 3 == 0 else "measured"


def cut_candidates(folder: Path) -> list[Candidate]:
    """Windows of whole lines of held-out files, in hash order: those that end where a documented function's docstring
    does, and one for every dozen lines that ends anywhere."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    held_out: list[corpus.Document] = []
    seen: set[int] = set()
    for document in corpus.load(folder):
        if document.split == corpus.HELD_OUT:
            held_out.append(document)
        else:
            seen.update(hash(line) for line in long_lines(document.text))
    found: dict[str, Candidate] = {}
    for document in held_out:
        source = f"{document.package}/{document.path}"
        split = half_of(source)
        for end, text in windows(document.text, tokenizer, random.Random(f"{SPLITS[split]} {source}")):
            lines = long_lines(text)
            num_seen = sum(hash(line) in seen for line in lines)
            ids = tokenizer.encode(text).ids
            if lines and num_seen <= MAX_SEEN_SHARE * len(lines) and len(ids) >= MIN_PROMPT:
                found[text] = {"source": f"{source}:{end}", "split": split, "text": text, "token_ids": ids}
    ordered = sorted(found.values(), key=lambda c: hashlib.sha256(c["source"].encode()).digest())
    return [
        c for split in SPLITS for c in [c for c in ordered if c["split"] == split][: NUM_CANDIDATES[split]]
    ]


def long_lines(text: str) -> list[str]:
    """The lines that say enough to be recognised."""
    return [line for line in map(str.strip, text.split("\n")) if len(line) > LONG_LINE]


def windows(text: str, tokenizer: Any, rng: random.Random) -> Iterator[tuple[int, str]]:
    """(number of the last line, text) of a file's windows, in order."""
    lines = text.rstrip("\n").split("\n")
    ends = {
        node.body[0].end_lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node)
        and len(node.body) > 1
        and node.body[1].lineno > (node.body[0].end_lineno or 0)
    }
    ends |= {rng.randrange(5, len(lines)) for _ in range(len(lines) // LINES_PER_WINDOW)}
    sizes = [len(encoding.ids) for encoding in tokenizer.encode_batch([line + "\n" for line in lines])]
    for end in sorted(end for end in ends if end is not None):
        start, left = end, rng.choice(PROMPT_LIMITS)
        while start > 0 and sizes[start - 1] <= left:
            start -= 1
            left -= sizes[start]
        yield end, ("\n".join(lines[start:end]) + "\n").lstrip("\n")


def batches(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """What is decoded together."""
    return [list(candidates[i : i + BATCH]) for i in range(0, len(candidates), BATCH)]


def write_texts(batch: Sequence[Candidate]) -> list[list[list[int]]]:
    """Greedy continuations by the shipped pair, static verification, float32: by prompt and verify step the ids.

    A text ends after OUTPUT_TOKENS, end-of-sequence tokens ignored, or where it has begun to loop.
    """
    from flashspark.args import ServerArgs
    from flashspark.ipc import GenerateRequest, RequestOutput, SamplingParams
    from flashspark.scheduler.build import build_scheduler

    outputs: list[RequestOutput] = []
    args = ServerArgs(
        model_path="demo",
        speculative_algorithm="DFLASH",
        speculative_draft_model_path="demo-dflash2",
        ragged_verify_mode="static",
        max_running_requests=BATCH,
        random_seed=1,
        torch_threads=1,
        device="cpu",
        dtype="float32",
        disable_radix_cache=True,
        decode_log_interval=10**6,
    )
    scheduler, _ = build_scheduler(args, outputs.append)
    sampling = SamplingParams(max_new_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    for index, candidate in enumerate(batch):
        scheduler.add(GenerateRequest(str(index), candidate["token_ids"], sampling))
    steps: list[list[list[int]]] = [[] for _ in batch]
    while scheduler.has_work:
        scheduler.step()
        taken, outputs[:] = outputs[:], []
        for output in taken:
            if output.token_ids:
                own = steps[int(output.request_id)]
                before = sum(map(len, own))
                own.append(output.token_ids)
                if output.finish is None and loop_end([i for step in own for i in step], before) is not None:
                    scheduler.abort([output.request_id], "it loops")
    return steps


@dataclass(frozen=True)
class Measured:
    """A candidate and its greedy text, by verify step."""

    candidate: Candidate
    steps: list[list[int]]

    @property
    def token_ids(self) -> list[int]:
        """The text."""
        return [token for step in self.steps for token in step]

    @property
    def loops(self) -> bool:
        """Whether a period of at most 32 tokens is repeated 4 times."""
        return loop_end(self.token_ids) is not None

    @property
    def repeated_share(self) -> float:
        """Share of the tokens that are in a run of NGRAM which the text had before."""
        return repeated_share(self.token_ids)


def repeated_share(ids: Sequence[int]) -> float:
    """See `Measured.repeated_share`."""
    seen: set[tuple[int, ...]] = set()
    repeated = [False] * len(ids)
    for i in range(len(ids) - NGRAM + 1):
        run = tuple(ids[i : i + NGRAM])
        if run in seen:
            repeated[i : i + NGRAM] = [True] * NGRAM
        seen.add(run)
    return sum(repeated) / max(1, len(ids))


def acceptance(measured: Sequence[Measured], num_tokens: int = OUTPUT_TOKENS) -> float:
    """Tokens per verify step, over the steps that begin in the first `num_tokens` of each text."""
    tokens = steps = 0
    for one in measured:
        place = 0
        for step in one.steps:
            if place >= num_tokens:
                break
            place += len(step)
            steps += 1
        tokens += place
    return tokens / max(1, steps)


def choose(measured: Sequence[Measured], licences: Mapping[str, str]) -> list[dict[str, Any]]:
    """W1 and W2, as their files hold them.

    W1 takes candidates as they come, those whose texts loop left out. W2 takes those of the measured split that repeat
    themselves no more than a bound: the loosest one with which acceptance on the choosing split is at most
    W2_ACCEPTANCE. The acceptance of its own prompts has no say in it.
    """
    fit = [one for one in measured if len(one.token_ids) >= OUTPUT_TOKENS and not one.loops]
    fit.sort(key=lambda one: hashlib.sha256(one.candidate["source"].encode()).digest())
    of_choosing = [one for one in fit if one.candidate["split"] == "choosing"]
    bound = max(
        hundredths / 100
        for hundredths in range(101)
        if acceptance([one for one in of_choosing if one.repeated_share * 100 <= hundredths]) <= W2_ACCEPTANCE
    )
    chosen_by = [one for one in of_choosing if one.repeated_share <= bound]
    rest = [one for one in fit if one.candidate["split"] == "measured" and one.repeated_share <= bound]
    chosen_on = {
        "num_prompts": len(chosen_by),
        "acceptance_length": round(acceptance(chosen_by), 3),
        "max_repeated_share": bound,
    }
    return [
        _as_file("W1", fit[:NUM_PROMPTS], licences, {}),
        _as_file("W2", rest[:NUM_PROMPTS], licences, {"choosing_split": chosen_on}),
    ]


def _as_file(
    name: str, chosen: Sequence[Measured], licences: Mapping[str, str], more: Mapping[str, Any]
) -> dict[str, Any]:
    if len(chosen) < NUM_PROMPTS:
        raise ValueError(f"{name} has {len(chosen)} of {NUM_PROMPTS} prompts: raise NUM_CANDIDATES")
    prompts = [{"source": one.candidate["source"], "text": one.candidate["text"]} for one in chosen]
    packages = sorted({prompt["source"].partition("/")[0] for prompt in prompts})
    return {
        "name": name,
        "command": "python scripts/choose_prompts.py choose",
        "num_prompts": len(prompts),
        "num_tokens": sum(len(one.candidate["token_ids"]) for one in chosen),
        "sha256": hashlib.sha256("\0".join(prompt["text"] for prompt in prompts).encode()).hexdigest(),
        "output_tokens": OUTPUT_TOKENS,
        "acceptance_length": round(acceptance(chosen), 3),
        "acceptance_length_of_64_tokens": round(acceptance(chosen, 64), 3),
        **more,
        "licences": {package: licences[package] for package in packages},
        "prompts": prompts,
    }


def licences() -> dict[str, str]:
    """Licence by package, of everything the corpus holds."""
    record = Path(__file__).resolve().parent / "sources.json"
    return {source["name"]: source["licence"] for source in json.loads(record.read_text())}


def save(path: Path, prompt_set: Mapping[str, Any]) -> None:
    """Writes a set, one prompt a line."""
    head = json.dumps({key: value for key, value in prompt_set.items() if key != "prompts"}, indent=1)
    rows = ",\n".join(json.dumps(prompt) for prompt in prompt_set["prompts"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head[:-2]},\n "prompts": [\n{rows}\n]}}\n')
