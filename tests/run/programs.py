"""Runs of programs with python itself and with the launcher, each in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]
STUBS = ROOT / "kvplan" / "run" / "path"
TIMEOUT_S = 120


@dataclass(frozen=True)
class Outcome:
    stdout: str
    stderr: str
    code: int


@dataclass(frozen=True)
class Folder:
    """The folder of a program, from which it is started, and its environment."""

    path: Path

    def write(self, name: str, text: str) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
        return path

    def official(self, name: str = "site") -> Path:
        """Make a stand-in for an installed official package, and return its folder."""
        for module in ("llm_datadist", "llm_datadist/v2", "llm_datadist_v1"):
            self.write(f"{name}/{module}/__init__.py", f"WHO = 'official {module}'\n")
        return self.path / name

    def python(
        self,
        *arguments: str,
        flags: Sequence[str] = (),
        stdin: str = "",
        path: Sequence[str | Path] = (),
        env: Mapping[str, str] | None = None,
    ) -> Outcome:
        """Run the interpreter; `path` is the content of PYTHONPATH besides this source tree."""
        environment = {item: os.environ[item] for item in os.environ if item != "PYTHONPATH"}
        environment["PYTHONPATH"] = os.pathsep.join(map(str, [*path, ROOT]))
        done = subprocess.run(
            [sys.executable, *flags, *arguments],
            cwd=self.path,
            env={**environment, **(env or {})},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        return Outcome(done.stdout, done.stderr, done.returncode)

    def launch(
        self,
        *arguments: str,
        flags: Sequence[str] = (),
        stdin: str = "",
        path: Sequence[str | Path] = (),
        env: Mapping[str, str] | None = None,
    ) -> Outcome:
        """Run the launcher with these arguments."""
        with_launcher = [*flags, "-m", "kvplan.run"]
        return self.python(*arguments, flags=with_launcher, stdin=stdin, path=path, env=env)

    def run(self, program: str, *arguments: str, path: Sequence[str | Path] = ()) -> str:
        """Launch a program that must succeed and be silent on stderr, and return its output."""
        self.write("program.py", program)
        done = self.launch("program.py", *arguments, path=path)
        assert (done.stderr, done.code) == ("", 0)
        return done.stdout
