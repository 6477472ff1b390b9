"""Mine documented functions: chat examples for training, held-out completion prompts for evaluation."""

from __future__ import annotations

import ast
import hashlib
import random
import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .corpus import Document

_REQUESTS = (
    "Write a Python function `{signature}`. {summary}",
    "Implement `{signature}` in Python.\n\n{summary}",
    "{summary}\n\nPut this into a Python function called `{name}`.",
    "Please write the function `{name}` in Python: {summary}",
    "Complete this Python function.\n\n```python\n{head}```",
    "Finish the function below:\n\n{head}",
    "Here is the start of a function. Write the whole function.\n```python\n{head}\n```",
)


@dataclass(frozen=True)
class Function:
    """A documented top-level function of one document."""

    document: Document
    name: str
    signature: str
    summary: str
    imports: str
    head: str
    code: str
    num_lines: int


def functions_of(document: Document) -> Iterator[Function]:
    """Top-level, undecorated functions with a docstring and a body, in order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(document.text)
    lines = document.text.split("\n")
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.decorator_list or node.name.startswith("__"):
            continue
        docstring = ast.get_docstring(node)
        if not docstring or len(node.body) < 2 or node.end_lineno is None or node.body[0].end_lineno is None:
            continue
        if node.body[1].lineno <= node.body[0].end_lineno:
            continue
        summary = re.sub(r"\s+", " ", re.split(r"\n\s*\n", docstring)[0]).strip()
        yield Function(
            document=document,
            name=node.name,
            signature=f"{node.name}({', '.join(a.arg for a in node.args.args)})",
            summary=summary,
            imports=_imports_used(tree, node, lines),
            head="\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]) + "\n",
            code="\n".join(lines[node.lineno - 1 : node.end_lineno]) + "\n",
            num_lines=node.end_lineno - node.lineno + 1,
        )


def _imports_used(tree: ast.Module, function: ast.FunctionDef, lines: list[str]) -> str:
    """The module's import statements that bind a name the function uses."""
    used = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
    picked = []
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bound = {(a.asname or a.name).split(".")[0] for a in node.names}
            if bound & used:
                picked.append("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    return "\n".join(picked) + "\n" if picked else ""


def chat_text(request: str, answer: str) -> str:
    """One exchange in the pair's chat format; the answer is a fenced block of Python."""
    return f"<|im_start|>user\n{request}<|im_end|>\n<|im_start|>assistant\n```python\n{answer}```<|im_end|>\n"


def mine_chats(documents: Iterable[Document], max_bytes: int, seed: int = 7) -> list[str]:
    """Exchanges asking for a documented function, at most `max_bytes` of them, each function name at most 4 times."""
    rng = random.Random(seed)
    shuffled = list(documents)
    rng.shuffle(shuffled)
    seen: Counter[str] = Counter()
    chats: list[str] = []
    size = 0
    for document in shuffled:
        for function in functions_of(document):
            fits = 4 <= function.num_lines <= 45 and len(function.code) <= 1600 and len(function.head) <= 700
            if not fits or not 20 <= len(function.summary) <= 400 or seen[function.name] >= 4:
                continue
            seen[function.name] += 1
            request = rng.choice(_REQUESTS).format(
                signature=function.signature, summary=function.summary, name=function.name, head=function.head
            )
            answer = _short_docstring(function) if rng.random() < 0.5 else function.code
            chats.append(chat_text(request, answer))
            size += len(chats[-1])
        if size > max_bytes:
            break
    return chats


def _short_docstring(function: Function) -> str:
    """The function with its docstring cut to the summary."""
    node = ast.parse(textwrap.dedent(function.code)).body[0]
    assert isinstance(node, ast.FunctionDef) and node.body[0].end_lineno is not None
    first = node.body[0]
    lines = function.code.split("\n")
    quoted = function.summary[:200].replace("\\", "").replace('"""', "")
    docstring = " " * first.col_offset + f'"""{quoted}"""'
    return "\n".join([*lines[: first.lineno - 1], docstring, *lines[first.end_lineno :]])


@dataclass(frozen=True)
class Prompt:
    """A held-out completion prompt with its origin."""

    text: str
    source: str


def mine_prompts(
    documents: Iterable[Document], max_per_package: int = 4, max_per_file: int = 2
) -> Iterator[Prompt]:
    """Completion prompts (imports, signature, docstring) in an order fixed by a hash.

    The caller filters them by length in tokens and stops when it has enough.
    """
    candidates = []
    for document in documents:
        for function in functions_of(document):
            fits = 6 <= function.num_lines <= 60 and len(function.summary) >= 20 and function.document.text
            body_lines = function.code.count("\n") - function.head.count("\n")
            if fits and body_lines >= 4:
                imports = function.imports + "\n\n" if function.imports else ""
                source = f"{document.package}/{document.path}:{function.name}"
                candidates.append((document, Prompt(imports + function.head, source)))
    candidates.sort(key=lambda c: hashlib.sha256(c[1].source.encode()).digest())
    per_package: Counter[str] = Counter()
    per_file: Counter[str] = Counter()
    for document, prompt in candidates:
        key = f"{document.package}/{document.path}"
        if per_file[key] >= max_per_file or per_package[document.package] >= max_per_package:
            continue
        per_file[key] += 1
        per_package[document.package] += 1
        yield prompt


def occurs_in(prompt: Prompt, haystack: str) -> bool:
    """Whether the docstring's first sentence or the signature-and-docstring opening is found in `haystack`.

    Both sides are compared with all white space squeezed; `haystack` must come from `squeeze`.
    """
    text = squeeze(prompt.text)
    docstring = re.search(r"(\"\"\"|''')(.*)", text)
    opening = docstring.group(2)[:60] if docstring else text[-60:]
    definition = text[max(0, text.rfind("def ")) :][:120]
    return opening in haystack or definition in haystack


def squeeze(text: str) -> str:
    """Collapse every run of white space into one blank."""
    return re.sub(r"\s+", " ", text)
