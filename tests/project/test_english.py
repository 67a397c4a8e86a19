"""English as a program can check it: first words of docstrings, plain words, short sentences.

CONTRIBUTING.md has the rules.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
MAX_WORDS = 30

FIRST_WORDS = re.compile(
    "(What|Whether|How|Where|Which|Why|Who|Whose|When|That|Those|As|Of|To|For|Nothing|Nobody)$"
)

# Sentences that continue the name of a test, or need a noun that is not there.
CONTINUATIONS = re.compile("(It|Nor|And|But|Also|So|Still|Or|Then|Else|Not|Neither)$")

WORDS = (
    "nobody|somebody|whoever|anybody|those who|that which|is told|are told|another life|gravest"
    "|foretells?|once more|is no [a-z]+|are no [a-z]+"
)

# Shapes of first words that cannot be imperatives.
NOT_IMPERATIVE = re.compile(
    r"(A|An|The|One|All|Any|Each|Every|It|Its|This|`.*|[A-Z]+_.*|[A-Z]\w+s)$"
)
ENDS_IN_S = {"Pass", "Process", "Express", "Guess", "Press", "Address", "Bypass"}
PROPERTIES = {"property", "cached_property", "functools.cached_property"}


class Text(NamedTuple):
    """A docstring or a comment, and the kind of its object."""

    text: str
    kind: str


@cache
def sources() -> dict[str, list[str]]:
    """Return the sources of each room."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "kvplan").rglob("*.py")):
        room = path.relative_to(ROOT).parts[-2 if path.parent.name == "kvplan" else 1]
        found.setdefault(room, []).append(path.read_text())
    return found


class Parsed(NamedTuple):
    """What the rules need of a source, whose tree takes longer to make than they do."""

    docstrings: list[Text]
    strings: list[str]
    lines_of_it: list[int]  # with a variable or a parameter of that name


@cache
def parsed(source: str) -> Parsed:
    """Return what the rules need of a source. One walk is for all rules."""
    found = Parsed([], [], [])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                found.strings.append(node.value)
        elif isinstance(node, ast.Name):
            if node.id == "it" and isinstance(node.ctx, ast.Store):
                found.lines_of_it.append(node.lineno)
        elif isinstance(node, ast.arg):
            if node.arg == "it":
                found.lines_of_it.append(node.lineno)
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.docstrings.extend(docstrings_of(node))
    return found


def docstrings_of(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[Text]:
    """Yield the docstring of an object, and those of its attributes."""
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    decorators = [*map(ast.unparse, node.decorator_list)] if is_function else []
    is_test = is_function and (node.name.startswith("test_") or "fixture" in "".join(decorators))
    is_called = is_function and not is_test and not PROPERTIES.intersection(decorators)
    for before, statement in zip([None, *node.body], node.body, strict=False):
        if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
            continue
        if isinstance(text := statement.value.value, str):
            kind = "function" if is_called else "thing"
            yield Text(inspect.cleandoc(text), "attribute" if before is not None else kind)


def comments(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def native_comments(source: str) -> Iterator[Text]:
    """Yield the comments of C or Cython, and docstrings of Cython; "line": those after code."""
    found = re.finditer(r'(?m:^( *))?(?:/\*(.*?)\*/|"""(.*?)"""|# ([^\n]*))', source, re.DOTALL)
    for comment in found:
        text = re.sub(r"\n *\*? *", " ", comment[2] or comment[3] or comment[4] or "")
        yield Text(text.lstrip("* "), "thing" if comment[1] is not None else "line")


def bad_native_comments(source: str) -> Iterator[str]:
    for comment in native_comments(source):
        first = comment.text.partition(" ")[0].rstrip(".,:;")
        is_bad = FIRST_WORDS.match(first) or CONTINUATIONS.match(first)
        if (is_bad and comment.kind != "line") or re.search(rf"\b(?:{WORDS})\b", comment.text):
            yield comment.text


def bad_first_words(source: str) -> Iterator[str]:
    for doc in parsed(source).docstrings:
        line = doc.text.partition("\n")[0]
        first = line.split(" ")[0].rstrip(".,:;")
        is_bad = bool(FIRST_WORDS.match(first))
        if doc.kind == "function" and first not in ENDS_IN_S and not line.startswith("See `"):
            is_bad = is_bad or bool(NOT_IMPERATIVE.match(first))
        if is_bad:
            yield line


def bad_words(source: str) -> Iterator[str]:
    for text in [*parsed(source).strings, *comments(source)]:
        yield from re.findall(rf"\b(?:{WORDS})\b", text)
    yield from re.findall(r"^ *MOST_\w+", source, re.MULTILINE)


def long_sentences(source: str) -> Iterator[str]:
    for doc in parsed(source).docstrings:
        prose = re.sub(r"\n+(?=[A-Z][a-z]+:\n)|\n\n|\n(?= *- )|\n(?= +[\w, *`]+: )", "\0", doc.text)
        for sentence in re.split(r"\0|(?<=[.:;])\s", prose):
            if len(sentence.split()) > MAX_WORDS and "|" not in sentence:
                yield sentence


def long_sentences_of_page(page: str) -> Iterator[str]:
    """Yield the long sentences of a page: of its paragraphs, items of lists and cells of tables."""
    prose = re.sub(r"```.*?```", "\n\n", page, flags=re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-|#*]|\d+\.) ?)|(?<=.) \| (?=.)", prose):
        words = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "`code`", block))
        for sentence in re.split(r"(?<=[.:;?!])[)*]*\s", " ".join(words.split())):
            if len(sentence.split()) > MAX_WORDS:
                yield sentence


def pronouns(source: str) -> Iterator[str]:
    """Yield each variable or parameter `it`."""
    for line in parsed(source).lines_of_it:
        yield f"line {line}"


CHECKS = [bad_first_words, bad_words, long_sentences, pronouns]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_no_room_breaks_a_rule(check: Callable[[str], Iterator[str]]) -> None:
    found = {
        room: [wrong for source in of_room for wrong in check(source)]
        for room, of_room in sources().items()
    }
    assert not {room: texts for room, texts in found.items() if texts}


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "tools"])
def test_first_lines_and_words_beside_the_library_are_plain(folder: str) -> None:
    found = {
        str(path.relative_to(ROOT)): wrong
        for path in sorted((ROOT / folder).rglob("*.py"))
        for source in [path.read_text()]
        if (wrong := [*bad_first_words(source), *bad_words(source)])
    }
    assert not found


@pytest.mark.parametrize("folder", ["benchmarks", "include", "kvnative", "tests", "tools"])
def test_comments_of_native_code_are_plain(folder: str) -> None:
    """Files .cu are left out: a change of their text needs new PTX (`make ptx`)."""
    found = {
        str(path.relative_to(ROOT)): wrong
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".c", ".cpp", ".h", ".pxd", ".pyx"}
        if (wrong := [*bad_native_comments(path.read_text())])
    }
    assert not found


def test_first_lines_and_words_of_tests_are_plain() -> None:
    """A docstring of a test or a fixture is a sentence or a noun, not an imperative."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path == Path(__file__):
            continue
        source = path.read_text()
        texts = [doc.text for doc in parsed(source).docstrings]
        bad = [*bad_first_words(source)]
        bad += [text for text in texts if CONTINUATIONS.match(text.split()[0].rstrip(".,:;"))]
        text = "\n".join([*texts, *re.findall(r"#.*", source)])  # to tokenize all takes a minute
        bad += re.findall(rf"\b(?:{WORDS})\b", text)
        if bad:
            found[str(path.relative_to(ROOT))] = bad
    assert not found


def pages() -> Iterator[Path]:
    yield from sorted((ROOT / "docs").rglob("*.md"))
    yield from (ROOT / name for name in ("README.md", "examples/README.md"))


def test_no_page_has_a_long_sentence() -> None:
    found = {
        str(page.relative_to(ROOT)): wrong
        for page in pages()
        if (wrong := [*long_sentences_of_page(page.read_text())])
    }
    assert not found, f"sentences of more than {MAX_WORDS} words"


@pytest.mark.parametrize("folder", ["benchmarks", "docs", "examples", "kvnative", "tests", "tools"])
def test_no_variable_is_called_it(folder: str) -> None:
    found = {
        str(path.relative_to(ROOT)): wrong
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (wrong := [*pronouns(path.read_text())])
    }
    assert not found, "name variables after what they hold"


def test_each_kind_of_bad_english_is_detected() -> None:
    source = (
        '"""A module."""\n'
        "def f(it):  # nobody waits\n"
        '    """The first one."""\n'
        '    raise ValueError("x is no number")\n'
        "class C:\n"
        '    """What holds it."""\n'
    )
    assert sorted(bad_first_words(source)) == ["The first one.", "What holds it."]
    assert [*bad_words(source)] == ["is no number", "nobody"]
    assert [*pronouns(source)] == ["line 2"]
    assert [*long_sentences(f'"""{"word " * 31}end."""')] != []
    assert [*long_sentences(f'"""{"word " * 29}end."""')] == []
    assert [*long_sentences_of_page(f"# Title\n\n- Short.\n- {'word ' * 31}end.\n")] != []
    native = (
        "/* What it does. */\n    /*\n     * As before: nobody\n     * waits. */\n/* A row. */\n"
        "int a; /* as told */\nint b; /* there is\n        * no lock */\n# Whether\n"
    )
    assert [*bad_native_comments(native)] == [
        "What it does. ",
        "As before: nobody waits. ",
        "there is no lock ",
        "Whether",
    ]
    assert [*long_sentences_of_page(f"{'word ' * 29}end.\n| {'cell | ' * 31}\n")] == []
