"""Plant bugs in the C of kvnative, all in one build, and say how many of them the tests see.

A bug is one small change of an expression, or a statement that is missing. All that the seed
chooses are compiled into one library: an environment variable says which of them is there, so none
needs a build of its own. The tests first run without any, file by file, and note which bugs each
file reaches; a bug then needs only these files. Exits with 1 where too few were seen.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TREE = ("kvplan", "kvnative", "include", "tests", "tools", "examples", "benchmarks", "docs")
FILES = ("setup.py", "pyproject.toml", "conftest.py", "pytest_kvplan.py", "README.md", "MANIFEST.in")
SOURCES = Path("kvnative/src")
# Files of tests of each room; the first whose tests fail ends it.
ROOMS = {
    "core": "tests/native/*.py tests/execution/*.py",
    "host": "tests/native/*.py tests/engine/*.py",
    "process": "tests/native/*.py tests/execution/*.py",
    "device": "tests/device/*.py tests/native/*.py tests/cuda/*.py tests/ascend/test_acl*.py",
    "cuda": "tests/cuda/*.py tests/cuda_sim/*.py",
    "hccl": "tests/ascend/test_hccl*.py tests/ascend/test_*.py",
    "ucx": "tests/ucx/*.py",
    "tcp": "tests/tcp/*.py tests/transport/tcp/*.py",
}
NUMBER, REACHED = "KVPLAN_MUTANT", "KVPLAN_MUTANTS_REACHED"
# One process asks once which bug it has; it leaves an empty file for each place that it reaches.
SWITCH = f"""#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#pragma GCC diagnostic ignored "-Wall"
#pragma GCC diagnostic ignored "-Wextra"
#pragma GCC diagnostic ignored "-Wparentheses"
#pragma GCC diagnostic ignored "-Wsign-compare"
#pragma GCC diagnostic ignored "-Wbool-operation"
#pragma GCC diagnostic ignored "-Wint-in-bool-context"
__attribute__((unused)) static int kvn_mutant(int number)
{{
    static int chosen;
    static char reached[4096];
    if (!chosen)
        chosen = getenv("{NUMBER}") ? atoi(getenv("{NUMBER}")) : -1;
    if (chosen < 0 && !reached[number] && getenv("{REACHED}")) {{
        char path[256];
        reached[number] = 1;
        snprintf(path, sizeof path, "%s/%d", getenv("{REACHED}"), number);
        close(open(path, O_CREAT | O_WRONLY, 0644));
    }}
    return chosen == number;
}}
#line 1
"""
TOKEN = re.compile(
    r"""(?P<skip>\s+|/\*.*?\*/|//[^\n]*|(?:(?<=\n)|\A)[ \t]*\#(?:\\\n|[^\n])*)
    |(?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
    |(?P<word>[A-Za-z_]\w*)|(?P<number>\d[\w.]*)
    |(?P<sign>->|\+\+|--|<<=|>>=|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|\.\.\.|.)""",
    re.VERBOSE | re.DOTALL,
)
SIGNS = dict(
    item.split()
    for item in (
        *("< <=", "<= <", "> >=", ">= >", "== !=", "!= ==", "&& ||", "|| &&", "+ -", "- +"),
        *("/ *", "% /", "| &", "& |", "<< >>", ">> <<"),
    )
)
BINARY = {"+", "-", "/", "%", "|", "&"}
WORDS = {"true": "false", "false": "true", "src": "dst", "dst": "src", "first": "last"}
WORDS |= {"last": "first", "min": "max", "max": "min"}
ASSIGN = {"=", "+=", "-=", "|=", "&="}
# A lock that is not taken is seen by ThreadSanitizer, and memory that is not freed by AddressSanitizer.
UNSEEN = re.compile(r"free|pthread_mutex_lock|assert|kvn_\w*(refuse|fault|describe)\w*|snprintf")


class Token(NamedTuple):
    kind: str
    text: str
    start: int
    end: int


class Mutant(NamedTuple):
    """A change of the bytes [start, end) of a file into `text`, which has `{}` for its number."""

    path: Path
    line: int
    start: int
    end: int
    text: str
    said: str


def tokens_of(source: str) -> list[Token]:
    found = []
    for match in TOKEN.finditer(source):
        kind = str(match.lastgroup)
        if kind != "skip":
            found.append(Token(kind, match.group(), match.start(), match.end()))
    return found


class Finder:
    """All mutants of one file."""

    def __init__(self, path: Path, source: str) -> None:
        self.path = path
        self.source = source
        self.tokens = tokens_of(source)
        self.words = {token.text for token in self.tokens if token.kind == "word"}
        self.found: list[Mutant] = []
        depth = 0
        for index, token in enumerate(self.tokens):
            depth += (token.text == "{") - (token.text == "}")
            if depth > 0:
                self._look(index, token)

    def _look(self, index: int, token: Token) -> None:
        tokens = self.tokens
        before = tokens[index - 1].text
        if token.text in ("if", "while"):
            self._expression(index + 2, self._closing(index + 1), is_condition=True)
        elif token.text == "for":
            first = self._end(index + 2)
            if tokens[first].text == ";":
                self._expression(first + 1, self._end(first + 1))
        elif token.text == "return" or token.text in ASSIGN:
            self._expression(index + 1, self._end(index + 1))
        starts = before in (";", "{", "}", ")", "else")
        if starts and (token.kind == "word" or token.text == "*"):
            end = self._end(index)
            texts = [item.text for item in tokens[index:end]]
            is_call = len(texts) > 2 and texts[1] == "(" and texts[-1] == ")"
            is_jump = texts and texts[0] in ("break", "continue", "goto")
            is_change = ASSIGN & set(texts) or "++" in texts or "--" in texts
            if tokens[end].text == ";" and (is_call or is_jump or is_change):
                if texts[0] not in ("if", "while", "for", "return", "do") and not UNSEEN.match(
                    texts[0]
                ):
                    self._statement(index, end)

    def _closing(self, index: int) -> int:
        depth = 0
        for at in range(index, len(self.tokens)):
            depth += self.tokens[at].text in "([{"
            depth -= self.tokens[at].text in ")]}"
            if depth == 0:
                return at
        return len(self.tokens) - 1

    def _end(self, index: int) -> int:
        """Return the index of what ends the expression that begins at `index`."""
        while self.tokens[index].text not in (";", ",", ")", "]", "}"):
            index = self._closing(index) + 1 if self.tokens[index].text in "([{" else index + 1
        return index

    def _text(self, begin: int, end: int) -> str:
        return self.source[self.tokens[begin].start : self.tokens[end - 1].end]

    def _statement(self, begin: int, end: int) -> None:
        text = self._text(begin, end + 1)
        self._add(begin, end + 1, f"{{{{ if (!kvn_mutant({{}})) {_braced(text)} }}}}", f"{text} -> ;")

    def _expression(self, begin: int, end: int, is_condition: bool = False) -> None:
        if begin >= end or self.tokens[begin].text == "{":
            return
        changed = 0
        for at in range(begin, end):
            if (other := self._other(at, begin)) is not None:
                pieces = [item.text for item in self.tokens[begin:end]]
                pieces[at - begin] = other
                self._replace(begin, end, " ".join(pieces))
                changed += 1
        if is_condition and not changed:
            self._replace(begin, end, f"!({_flat(self._text(begin, end))})")

    def _replace(self, begin: int, end: int, other: str) -> None:
        text = self._text(begin, end)
        both = f"(kvn_mutant({{}}) ? ({_braced(other)}) : ({_braced(text)}))"
        self._add(begin, end, both, f"{_flat(text)}  ->  {other}")

    def _add(self, begin: int, end: int, text: str, said: str) -> None:
        start = self.tokens[begin].start
        line = self.source.count("\n", 0, start) + 1
        last = self.tokens[end - 1].end
        self.found.append(Mutant(self.path, line, start, last, text, _flat(said)))

    def _other(self, at: int, begin: int) -> str | None:
        """Return what can stand there in place of a token."""
        token, before = self.tokens[at], self.tokens[at - 1]
        ends_value = at > begin and (before.kind in ("word", "number") or before.text in ")]")
        if token.kind == "number" and token.text.isdigit():
            return str(int(token.text) + 1)
        if token.kind == "word":
            other = "_".join(WORDS.get(word, word) for word in token.text.split("_"))
            is_there = other in self.words or other in ("true", "false")
            return other if other != token.text and is_there else None
        if token.text == "!":
            return ""
        if token.text in BINARY and not ends_value:
            return None
        return SIGNS.get(token.text) if token.kind == "sign" else None


def _braced(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _flat(text: str) -> str:
    return " ".join(text.split())


def planted(source: str, chosen: list[tuple[int, Mutant]]) -> str:
    """Return the source with all of these, each under its number."""
    for number, mutant in sorted(chosen, key=lambda item: -item[1].start):
        new = mutant.text.format(number)
        source = source[: mutant.start] + new + source[mutant.end :]
    return SWITCH + source


def compiles(source: str, path: Path) -> bool:
    flags = ("-x", "c", "-std=c11", "-D_GNU_SOURCE", "-fsyntax-only", "-Wall", "-Wextra", "-Werror")
    embedded = '-DKVN_EMBEDDED_SHA256="x"'
    folders = (f"-I{ROOT / item}" for item in ("include", SOURCES, path.parent))
    command = ["gcc", *flags, embedded, *folders, "-"]
    return subprocess.run(command, input=source.encode(), capture_output=True).returncode == 0


def choose(room: str, sample: int, seed: int) -> list[Mutant]:
    """Return mutants of a room that compile, and that do not overlap, at random."""
    sources = {path.relative_to(ROOT): path.read_text() for path in (ROOT / SOURCES / room).glob("*.c")}
    every = [mutant for path in sorted(sources) for mutant in Finder(path, sources[path]).found]
    random.Random(seed).shuffle(every)
    chosen: list[Mutant] = []
    for mutant in every:
        taken = (it for it in chosen if it.path == mutant.path)
        if any(it.start < mutant.end and mutant.start < it.end for it in taken):
            continue
        if compiles(planted(sources[mutant.path], [(1, mutant)]), mutant.path):
            chosen.append(mutant)
        if len(chosen) == sample:
            break
    print(f"{len(chosen)} of {len(every)} in {room}", flush=True)
    return chosen


class Copy:
    """A copy of the tree, with all mutants in its build."""

    def __init__(self, root: Path, mutants: dict[int, Mutant]) -> None:
        self.root = root
        self._reached = root / "reached"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        for name in (*TREE, *FILES):
            path = ROOT / name
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, root / name)
        for path in {mutant.path for mutant in mutants.values()}:
            chosen = [(number, it) for number, it in mutants.items() if it.path == path]
            (root / path).write_text(planted((ROOT / path).read_text(), chosen))
        self._link({mutant.path for mutant in mutants.values()})

    def _link(self, changed: set[Path]) -> None:
        """Make libkvn.so of changed sources, and of what the build in place has of the others."""
        built = next((ROOT / "build").glob("release*/temp.*"))
        changed_names = {path.with_suffix(".o") for path in changed}
        every = {path.relative_to(built): path for path in (built / SOURCES).rglob("*.o")}
        objects = [str(path) for name, path in every.items() if name not in changed_names]
        ptx = hashlib.sha256(b"".join(p.read_bytes() for p in sorted((ROOT / SOURCES).rglob("*.ptx"))))
        command = ["gcc", "-O1", "-w", "-std=c11", "-fPIC", "-pthread", "-D_GNU_SOURCE", "-DNDEBUG"]
        command += [f"-DKVN_EMBEDDED_SHA256={ptx.hexdigest()}", "-Iinclude", f"-I{SOURCES}", "-shared"]
        command += ["-Wl,-soname,libkvn.so,-Bsymbolic,-z,defs", "-o", "kvnative/lib/libkvn.so"]
        subprocess.run([*command, *map(str, changed), *objects, "-ldl"], cwd=self.root, check=True)

    def test(self, files: list[str], limit_s: float, **env: str) -> bool:
        """Return whether the tests in these files pass, in time."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        process = subprocess.Popen(
            [*command, "-m", "not slow", "--timeout", "60", *files],
            cwd=self.root,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **env},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s) in (0, 5)
        except subprocess.TimeoutExpired:
            return False
        finally:
            try:
                os.killpg(process.pid, 9)
            except ProcessLookupError:
                pass
            process.wait()

    def reach(self, file: str) -> tuple[float, set[int]]:
        """Run a file of tests without a bug; returns its seconds, and the bugs that it reaches."""
        self._reached.mkdir(exist_ok=True)
        began = time.monotonic()
        if not self.test([file], 300, **{REACHED: str(self._reached)}):
            print(f"without any bug {file} fails in {self.root}: left out", flush=True)
            return 0.0, set()
        numbers = {int(path.name) for path in self._reached.iterdir()}
        shutil.rmtree(self._reached)
        return time.monotonic() - began, numbers


def files_of(room: str) -> Iterator[str]:
    for pattern in ROOMS[room].split():
        for path in sorted(ROOT.glob(pattern)):
            if path.name.startswith("test_"):
                yield str(path.relative_to(ROOT))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rooms", nargs="*", help=f"of {', '.join(ROOMS)}")
    parser.add_argument("--sample", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--copy", type=Path, default=ROOT / "build/native-mutants")
    given = parser.parse_args()
    rooms = {room: choose(room, given.sample, given.seed) for room in given.rooms}
    every = [(room, mutant) for room, mutants in rooms.items() for mutant in mutants]
    mutants = {number: mutant for number, (_, mutant) in enumerate(every, 1)}
    copy = Copy(given.copy, mutants)
    measured: dict[str, tuple[float, set[int]]] = {}
    for room in rooms:
        mine = [number for number, (other, _) in enumerate(every, 1) if other == room]
        files = list(dict.fromkeys(files_of(room)))
        for file in files:
            if file not in measured:
                measured[file] = copy.reach(file)
        seen = 0
        for number in mine:
            reach = sorted(measured[it][0] for it in files if number in measured[it][1])
            those = sorted((measured[it][0], it) for it in files if number in measured[it][1])
            is_seen = bool(those) and not copy.test(
                [it for _, it in those], 60 + 3 * sum(reach), **{NUMBER: str(number)}
            )
            seen += is_seen
            word = "seen     " if is_seen else "SURVIVED " if those else "UNREACHED"
            mutant = mutants[number]
            print(f"{word} {number} {mutant.path}:{mutant.line}: {mutant.said}", flush=True)
        print(f"{room}: {len(mine)} planted, {seen} seen", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
