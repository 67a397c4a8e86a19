"""`python -m kvplan.run`: run a program with kvplan's `llm_datadist`.

The launcher replaces itself with the plain interpreter (exec), with the folder `path/` first in
PYTHONPATH. From there the program and its Python processes import our `llm_datadist`. Arguments,
exit status, tracebacks and signals are those of the interpreter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import _args_from_interpreter_flags  # type: ignore[attr-defined]
from typing import Final, NamedTuple, NoReturn

from kvplan.llm_datadist.installation import OURS, SEVERAL_ENGINES, STUBS, official_path
from kvplan.run.aliases import AS, INTERFACES, OBSERVABLE, OBSERVE, OBSERVE_PID, installed

MODULE: Final = "kvplan.run"

USAGE: Final = """\
usage: python [OPTION OF PYTHON]... -m kvplan.run [OPTION]... PROGRAM [ARGUMENT]...

Run an unchanged Python program with kvplan's llm_datadist: `import llm_datadist` and its submodules
are kvplan's, also in the Python processes that the program starts. So is `import hixl` if no other
hixl is installed.

PROGRAM is as for python: a script, a folder or archive with a __main__.py, -m MODULE, -c COMMAND,
or - for standard input.

  --as NAME          let `import nixl` (and nixl_cu12, nixl_cu13, nixl_rocm) or
                     `import mooncake.engine` give kvplan's, too: nixl, mooncake
  --several-engines  let a process have several LLMDataDist objects initialized at once
  --observe WHAT     record the transfers of nixl, mooncake or hixl, or several (nixl,hixl), also
                     in processes that the program starts; nixl=FOLDER: to files there;
                     nixl,sums: with sums of blocks
  --                 PROGRAM begins here
  -h, --help         print this text
"""


class Misuse(Exception):  # noqa: N818 - the command line's, not an error of the program
    """An invalid command line."""


class Launch(NamedTuple):
    """Options of the launcher, and the arguments for the interpreter."""

    several_engines: bool
    program: tuple[str, ...]
    observe: str = ""
    interfaces: tuple[str, ...] = ()


def main() -> NoReturn:
    """Become the program. Exit with 0 after --help, and with 2 for an invalid command line."""
    try:
        launch = parse(sys.argv[1:])
        flags = interpreter_flags(sys.orig_argv, len(sys.argv) - 1)
    except Misuse as misuse:
        sys.stderr.write(f"{MODULE}: {misuse}\n\n{USAGE}")
        sys.exit(2)
    if launch is None:
        sys.stdout.write(USAGE)
        sys.exit(0)
    if (official := official_path(search_path(launch.program))) is not None:
        ours = Path(STUBS).parents[1] / "llm_datadist"
        sys.stderr.write(f"{MODULE}: llm_datadist is kvplan's, {ours}; {official} is not used\n")
    for name in launch.interfaces:
        for unused in installed(name, search_path(launch.program)):
            sys.stderr.write(f"{MODULE}: {name} is kvplan's; {unused} is not used\n")
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, *flags, *launch.program]
    os.execve(sys.executable, command, environment(os.environ, launch))


def parse(arguments: Sequence[str]) -> Launch | None:
    """Parse the arguments; return None for --help."""
    several_engines, observe, position = False, "", 0
    interfaces: list[str] = []
    while position < len(arguments):
        argument = arguments[position]
        if argument in ("-h", "--help"):
            return None
        if argument == "--several-engines":
            several_engines = True
        elif argument == "--as":
            position += 1
            name = "".join(arguments[position : position + 1])
            if name not in INTERFACES:
                raise Misuse(f"--as {name!r} must be one of {', '.join(INTERFACES)}")
            interfaces.append(name)
        elif argument == "--observe":
            position += 1
            if not (observe := "".join(arguments[position : position + 1])):
                raise Misuse("--observe needs what to observe, such as nixl")
            names = [name.strip() for name in observe.partition("=")[0].split(",")]
            if unknown := [name for name in names if name not in OBSERVABLE]:
                raise Misuse(f"--observe {unknown[0]!r} must be one of {', '.join(OBSERVABLE)}")
            if {*names} == {"sums"}:
                raise Misuse("--observe 'sums' needs a library as well, such as nixl,sums")
        elif argument == "--" and position + 1 < len(arguments):
            return Launch(
                several_engines, tuple(arguments[position + 1 :]), observe, tuple(interfaces)
            )
        elif argument in ("-m", "-c") and position + 1 == len(arguments):
            raise Misuse(f"{argument} needs an argument")
        elif argument.startswith("-") and argument[:2] not in ("-m", "-c") and argument != "-":
            raise Misuse(f"no option {argument}; options of python go before -m {MODULE}")
        else:
            return Launch(several_engines, tuple(arguments[position:]), observe, tuple(interfaces))
        position += 1
    raise Misuse("no program to run")


def interpreter_flags(command: Sequence[str], num_arguments: int) -> list[str]:
    """Return python's own options in the command that started the launcher.

    For `python -m cProfile -m kvplan.run` they include `-m cProfile`.
    """
    if sys.flags.ignore_environment:
        raise Misuse(
            f"python -I and -E ignore PYTHONPATH, which the launcher needs; call "
            f"{OURS}.install() inside the program instead"
        )
    own = list(command[1 : len(command) - num_arguments])
    text = "\0".join(own)
    for ending in (f"m\0{MODULE}", f"m{MODULE}"):
        if text.endswith(ending):
            # -m may be the last of several letters: -um
            *before, last = text.removesuffix(ending).split("\0")
            return before if last == "-" else [*before, last]
    # Started in another way, for example by runpy: use the options that the interpreter reports.
    flags: list[str] = _args_from_interpreter_flags()
    return flags


def environment(inherited: Mapping[str, str], launch: Launch) -> dict[str, str]:
    """Return the program's environment: our folder in PYTHONPATH, and the launcher's options."""
    path = [entry for entry in inherited.get("PYTHONPATH", "").split(os.pathsep) if entry != STUBS]
    changed = {"PYTHONPATH": os.pathsep.join([STUBS, *path] if any(path) else [STUBS])}
    if launch.several_engines:
        changed[SEVERAL_ENGINES] = "1"
    if launch.observe:
        names, _, folder = launch.observe.partition("=")
        changed[OBSERVE] = f"{names}={Path(folder).absolute()}"  # programs may change theirs
        changed[OBSERVE_PID] = str(os.getpid())  # exec keeps the number
    if launch.interfaces:
        changed[AS] = ",".join(launch.interfaces)
    return {**inherited, **changed}


def search_path(program: Sequence[str]) -> list[str]:
    """Return the program's search path for modules, as far as it can be known before the start."""
    if sys.flags.safe_path:
        return sys.path
    first = program[0]
    if first[:2] in ("-", "-c", "-m"):
        return [str(Path.cwd()), *sys.path[1:]]
    script = Path(first).resolve()
    return [str(script.parent if script.is_file() else script), *sys.path[1:]]


if __name__ == "__main__":
    main()
