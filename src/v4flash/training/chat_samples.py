"""Conversations made by rule from the corpus, framed as V4.1 chats.

Knows: how questions and answers are read out of documentation pages and Python source, and the V4.1 frame of
a finished conversation. Does not know: tokens (a sample is a list of pieces that are either control tokens
or plain text) or where documents come from.

Four kinds of conversation: what a section is about, what a documented name does, write the function NAME,
and repeat this text exactly. Everything an answer says stands in the corpus.
"""

import ast
import random
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from v4flash.training.corpus import Document
from v4flash.training.tokenizer_pruning import BOS, EOS, SYSTEM

USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, THINK_END = "<think>", "</think>"
# A V4.1 chat in thinking mode opens with a line that names a budget from 1 to 100. The line is data of a
# checkpoint; these are the demonstration model's words and levels.
EFFORT_TEMPLATE = "Reasoning Effort: {budget} (range 1-100)\n\n"
EFFORT_LEVELS = {"low": 25, "high": 50, "xhigh": 75, "max": 100}
DEFAULT_EFFORT = "high"

_SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "Be brief.",
    "Answer in plain English.",
    "You answer questions about Python.",
    "You are a careful programmer. Answer with code when code is asked for.",
    "Answer from the documentation and add nothing of your own.",
)
_SECTION_QUESTIONS = (
    "What is {0}?",
    "Tell me about {0}.",
    "Explain {0}.",
    "What does the documentation say about {0}?",
)
_NAME_QUESTIONS = ("What does {0} do?", "Explain {0}.", "How is {0} used?", "Describe {0}.")
_FUNCTION_QUESTIONS = (
    "Write the Python function {0}.",
    "Write a Python function {0}. {1}",
    "Show me the code of {0}.",
    "Implement {0} in Python. {1}",
)
_COPY_QUESTIONS = (
    "Repeat the following text exactly:\n\n{0}",
    "Copy this text without any change:\n\n{0}",
    "Print this again, word for word:\n\n{0}",
)
_LONGEST_ANSWER = 900  # characters; a conversation then fits well inside one training window
_SHORTEST_ANSWER = 60
_LONGEST_COPY = 600
_TITLE_RULES = set("=-*~^\"#+'")
_DIRECTIVE = re.compile(
    r"^(?P<indent> *)\.\. (?:(?:py|c):)?"
    r"(?P<kind>function|method|class|classmethod|staticmethod|exception|module|data|attribute|decorator|macro|cfunction|"
    r"type|opcode|envvar|option)"
    r"\:\: (?P<name>[^\n]+)\n",
    re.MULTILINE,
)
_ROLE = re.compile(r":[a-zA-Z:]+:`[!~.]*([^`<>]+?)(?:\s*<[^`>]*>)?`")


class Piece(NamedTuple):
    """A stretch of a conversation: one control token by name, or text in which no control token may arise."""

    text: str
    is_control: bool


@dataclass(frozen=True)
class Turn:
    """One question with its answer; ``reasoning`` None means that thinking is off."""

    question: str
    answer: str
    reasoning: str | None = None


def frame(turns: Iterable[Turn], system: str | None = None, effort: int | None = None) -> list[Piece]:
    """Frame a finished conversation in the V4.1 chat encoding, from the sentence mark to the last end mark.

    ``system`` and, in thinking mode, the line with ``effort`` follow the system mark. Only the last turn may
    carry reasoning: the encoding drops that of earlier turns.
    """
    turns = list(turns)
    thinking = turns[-1].reasoning is not None
    pieces = [Piece(BOS, True)]
    opening = EFFORT_TEMPLATE.format(budget=effort) if thinking and effort is not None else ""
    opening += system or ""
    if opening:
        pieces += [Piece(SYSTEM, True), Piece(opening, False)]
    for number, turn in enumerate(turns, 1):
        pieces += [Piece(USER, True), Piece(turn.question, False), Piece(ASSISTANT, True)]
        if number == len(turns) and thinking:
            pieces += [Piece(THINK, True), Piece(turn.reasoning, False)]
        pieces += [Piece(THINK_END, True), Piece(turn.answer, False), Piece(EOS, True)]
    return pieces


def plain_markup(text: str) -> str:
    """Take reStructuredText roles and literal marks out of a paragraph: what is left reads as an answer."""
    text = _ROLE.sub(r"\1", text)
    text = re.sub(r"``(.+?)``", r"`\1`", text)
    text = re.sub(r"`([^`<]+?) <[^`>]+>`_{0,2}", r"\1", text)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    text = re.sub(r"\s*\[#?[\w-]*\]_", "", text)  # footnote references
    text = re.sub(r"\|(\w[^|\n]*)\|", r"\1", text)  # substitutions
    return text.replace("\\ ", " ")


def paragraphs(text: str) -> list[str]:
    """Split at blank lines; paragraphs keep their inner lines and lose common indentation."""
    return [textwrap.dedent(block).strip("\n") for block in re.split(r"\n\s*\n", text) if block.strip()]


def _is_prose(paragraph: str) -> bool:
    first = paragraph.lstrip()[:2]
    return len(paragraph) >= _SHORTEST_ANSWER and first not in (
        "..",
        ">>",
        "* ",
        "- ",
        "==",
        "--",
        "+-",
        ":p",
    )


def section_turns(page: str) -> Iterator[tuple[str, str]]:
    """Yield (title, first prose paragraph or two) of every section of a reStructuredText page."""
    lines = page.split("\n")
    starts = [
        number
        for number in range(len(lines) - 1)
        if lines[number].strip()
        and not lines[number].startswith((" ", ".."))
        and len(lines[number + 1]) >= len(lines[number].rstrip())
        and set(lines[number + 1].strip()) <= _TITLE_RULES
        and len(set(lines[number + 1].strip())) == 1
    ]
    for start, end in pairwise([*starts, len(lines)]):
        # A module page is titled "name --- purpose": people ask for the name.
        title = plain_markup(lines[start].strip()).replace("`", "").split(" --- ")[0].strip()
        blocks = re.split(r"\n\s*\n", "\n".join(lines[start + 2 : end]).strip("\n"))
        # Indented blocks belong to a directive or an example.
        body = [block for block in blocks if not block.startswith(" ") and _is_prose(block)]
        answer = _bounded([plain_markup(p) for p in body[:2]])
        if answer and len(title) > 2:
            yield title, answer


def described_names(page: str) -> Iterator[tuple[str, str]]:
    """Yield (signature, first paragraphs) of every function, class, option ... that a page describes."""
    for match in _DIRECTIVE.finditer(page):
        indent = len(match["indent"])
        rest = page[match.end() : match.end() + 3 * _LONGEST_ANSWER]
        body = []
        for line in rest.split("\n")[:-1]:
            if line.strip() and len(line) - len(line.lstrip()) <= indent:
                break
            body.append(line)
        prose = [
            plain_markup(p)
            for p in paragraphs(textwrap.dedent("\n".join(body)))
            if _is_prose(p) and not p.startswith((" ", ":"))
        ]
        name = match["name"].replace("\\", "").strip()
        answer = _bounded(prose[:2])
        if answer and len(name) < 100 and not name.endswith(","):
            yield name, answer


def function_turns(source: str) -> Iterator[tuple[str, str, str]]:
    """Yield (name, first line of the docstring, source code) of the functions of a module that have a
    docstring.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        docstring = ast.get_docstring(node)
        code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if docstring and _SHORTEST_ANSWER <= len(code) <= _LONGEST_ANSWER:
            yield node.name, docstring.split("\n")[0].strip(), code


def _bounded(parts: list[str]) -> str:
    """Join paragraphs while the whole stays short enough; empty when not even the first fits."""
    answer = ""
    for part in parts:
        if len(answer) + len(part) + 2 > _LONGEST_ANSWER:
            break
        answer = f"{answer}\n\n{part}" if answer else part
    return answer


def _copy_passage(document: Document, chooser: random.Random) -> str:
    """A run of whole lines from a random place of a document."""
    lines = document.text.split("\n")
    start = chooser.randrange(len(lines))
    passage, size = [], chooser.randrange(_SHORTEST_ANSWER, _LONGEST_COPY)
    for line in lines[start:]:
        if sum(map(len, passage)) + len(line) > size:
            break
        passage.append(line)
    return textwrap.dedent("\n".join(passage)).strip("\n")


def turns_of(document: Document, chooser: random.Random) -> list[Turn]:
    """All conversations' single turns that can be made of one document, reasoning off."""
    turns = []
    if document.kind == "docs":
        for title, answer in section_turns(document.text):
            turns.append(Turn(chooser.choice(_SECTION_QUESTIONS).format(title), answer))
        for name, answer in described_names(document.text):
            turns.append(Turn(chooser.choice(_NAME_QUESTIONS).format(name), answer))
    elif document.kind == "code":
        for name, purpose, code in function_turns(document.text):
            question = chooser.choice(_FUNCTION_QUESTIONS).format(name, purpose)
            turns.append(Turn(question, f"```python\n{code}\n```"))
    for _ in range(1 + len(document.text) // 40_000):
        passage = _copy_passage(document, chooser)
        if len(passage) >= _SHORTEST_ANSWER:
            turns.append(Turn(chooser.choice(_COPY_QUESTIONS).format(passage), passage))
    return turns


def _with_reasoning(turn: Turn, effort: int) -> Turn:
    """Put a short, true line of thought before an answer: one sentence for little effort, more for more."""
    subject = turn.question.split("\n")[0].rstrip(":.?")
    if turn.answer.startswith("```"):
        thoughts = (f"The user wants code: {subject}.", "One function is enough.", "It gets a docstring.")
    elif turn.answer in turn.question:
        lines = turn.answer.count("\n") + 1
        thoughts = ("The user asks for a copy.", f"The text has {lines} lines.", "I change nothing.")
    else:
        thoughts = (
            f"The question is: {subject}.",
            "I recall the documentation.",
            f"Its answer begins with the word {turn.answer.split()[0]}.",
        )
    return Turn(turn.question, turn.answer, " ".join(thoughts[: 1 + effort // 30]))


def conversations(documents: Iterable[Document], characters: int, seed: int) -> list[list[Piece]]:
    """Make framed conversations of about ``characters`` characters, the same for the same input and seed.

    A quarter carry a system message, a fifth think first, one in ten has two turns.
    """
    chooser = random.Random(seed)
    pool = [turn for document in documents for turn in turns_of(document, chooser)]
    chooser.shuffle(pool)
    made, size = [], 0
    while pool and size < characters:
        turns = [pool.pop() for _ in range(min(len(pool), 2 if chooser.random() < 0.1 else 1))]
        effort = None
        if chooser.random() < 0.2:
            effort = chooser.choice(sorted(EFFORT_LEVELS.values()))
            turns[-1] = _with_reasoning(turns[-1], effort)
        system = chooser.choice(_SYSTEM_TEXTS) if chooser.random() < 0.25 else None
        made.append(frame(turns, system, effort))
        size += sum(len(piece.text) for piece in made[-1])
    return made


def chat_encoding() -> dict:
    """The content of the checkpoint's chat_encoding.json: the encoding and the effort line trained here."""
    effort = {"template": EFFORT_TEMPLATE, "levels": EFFORT_LEVELS, "default": DEFAULT_EFFORT}
    return {"format": 1, "encoding": "v4.1", "effort": effort}
