"""Programs under the launcher: they run as with python itself, with kvplan's llm_datadist."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from dataclasses import dataclass

import pytest

from kvplan.run import __main__ as launcher
from tests.run.programs import ROOT, STUBS, Folder

LOOK = f"""
import sys
print(sys.argv, __name__, globals().get("__file__"), __package__, __spec__ and __spec__.name)
print([it for it in sys.path if it != {str(STUBS)!r}], sys.flags, sys.warnoptions, sys._xoptions)
"""

HEEDS_INTERRUPTS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
"""A shell that starts the tests in the background makes them ignore these signals."""


@dataclass(frozen=True)
class Case:
    """Options of python, and the program (in program.py, inside package/, or by stdin)."""

    name: str
    arguments: tuple[str, ...]
    program: str = LOOK
    flags: tuple[str, ...] = ()
    stdin: str = ""


SAME = [
    Case("script", ("program.py",)),
    Case("script_with_arguments", ("program.py", "a", "-b", "--several-engines", "-h", "-m", "")),
    Case("relative_path", ("./package/../program.py",)),
    Case("script_in_a_folder", ("package/deeper.py",)),
    Case("module", ("-m", "package.deeper", "-x")),
    Case("module_in_one_word", ("-mpackage.deeper", "-m", "y")),
    Case("package", ("-m", "package", "-x")),
    Case("folder", ("package",)),
    Case("archive", ("archive.zip", "a")),
    Case("command", ("-c", LOOK, "-x", "y")),
    Case("stdin_program", ("-", "a"), stdin=LOOK),
    Case("reads_stdin", ("program.py",), "print(input(), input())", stdin="1\n2\n"),
    Case("exit_0", ("program.py",), "raise SystemExit"),
    Case("exit_7", ("program.py",), "import sys; sys.exit(7)"),
    Case("exit_text", ("program.py",), "import sys; sys.exit('why')"),
    Case("exit_at_once", ("program.py",), "import os; os._exit(9)"),
    Case("exception", ("program.py",), "def f(): 1 / 0\nprint('begins')\nf()"),
    Case("exception_in_a_module", ("-m", "package.failing")),
    Case(
        "chained_exception",
        ("program.py",),
        "try:\n    {}[1]\nexcept KeyError as error:\n    raise ValueError('then') from error",
    ),
    Case(
        "own_excepthook",
        ("program.py",),
        "import sys, traceback\n"
        "sys.excepthook = lambda *it: print('hook', traceback.format_exception(*it))\n1 / 0",
    ),
    Case("atexit_after_exception", ("program.py",), "import atexit; atexit.register(print, 1); x"),
    Case("interrupted", ("program.py",), "import signal; signal.raise_signal(signal.SIGINT)"),
    Case("interrupt_raised", ("program.py",), "raise KeyboardInterrupt"),
    Case("killed", ("program.py",), "import signal; signal.raise_signal(signal.SIGTERM)"),
    Case("syntax_error", ("program.py",), "1 +"),
    Case("no_such_script", ("missing.py",)),
    Case("no_such_module", ("-m", "package.missing")),
    Case("stack", ("program.py",), "import traceback; traceback.print_stack()"),
    Case("warning", ("program.py",), "import warnings; warnings.warn('w')", ("-W", "error")),
    Case("safe_path", ("program.py", "a"), flags=("-P",)),
    Case("safe_path_module", ("-m", "json.tool", "-h"), flags=("-P",)),
    Case("many_flags", ("program.py",), flags=("-Xdev", "-O", "-B", "-W", "ignore", "-u")),
    Case("verbose_word", ("program.py",), flags=("-OO", "-X", "utf8=0")),
    Case("interactive", ("program.py",), flags=("-i", "-q"), stdin="print('more')\n"),
    Case("no_site", ("program.py",), flags=("-S",)),
]


QUICK = {
    "script_with_arguments",
    "module",
    "package",
    "command",
    "stdin_program",
    "exit_7",
    "exception",
    "interrupted",
    "killed",
    "syntax_error",
    "no_such_module",
    "safe_path",
    "interactive",
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(item, id=item.name, marks=() if item.name in QUICK else pytest.mark.slow)
        for item in SAME
    ],
)
def test_a_program_runs_as_with_python(case: Case, folder: Folder) -> None:
    folder.write("program.py", case.program)
    folder.write("package/__init__.py", "")
    folder.write("package/__main__.py", LOOK)
    folder.write("package/deeper.py", LOOK)
    folder.write("package/failing.py", "def f(): raise OSError(2, 'text')\nf()")
    with zipfile.ZipFile(folder.path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", LOOK)
    extra = folder.path / "extra"
    plain = folder.python(*case.arguments, flags=case.flags, stdin=case.stdin, path=[extra])
    # With -S the launcher lacks the packages that kvplan needs, so they come by path.
    needed = (
        [item for item in sys.path if item.endswith("site-packages")] if "-S" in case.flags else []
    )
    launched = folder.launch(
        *case.arguments, flags=case.flags, stdin=case.stdin, path=[extra, *needed]
    )
    if needed:
        assert (
            launched.stdout.replace("".join(f", {item!r}" for item in needed), "") == plain.stdout
        )
    else:
        assert launched == plain


def test_a_signal_is_the_cause_of_death_also_for_the_waiting_parent(folder: Folder) -> None:
    folder.write("program.py", f"{HEEDS_INTERRUPTS}; signal.raise_signal(signal.SIGINT)")
    assert folder.launch("program.py").code == -signal.SIGINT


def test_an_interrupt_reaches_the_program(folder: Folder) -> None:
    """The started process is the program, so signals that are sent to the process reach it."""
    folder.write(
        "program.py",
        f"""
        {HEEDS_INTERRUPTS}
        try:
            print("waits", flush=True)
            signal.pause()
        except KeyboardInterrupt:
            print("interrupted")
        """,
    )
    command = [sys.executable, "-m", "kvplan.run", str(folder.path / "program.py")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "interrupted\n"
    assert process.returncode == 0


def test_a_search_for_the_official_package_installs_nothing(folder: Folder) -> None:
    said = folder.run(
        """
        import sys
        from kvplan.llm_datadist import installation
        print(installation.official_path(), installation.finder in sys.meta_path)
        """
    )
    assert said == "None False\n"


def test_llm_datadist_is_kvplans(folder: Folder) -> None:
    said = folder.run(
        """
        import llm_datadist, kvplan.llm_datadist
        import llm_datadist.v2.llm_types as t
        from llm_datadist import CacheDesc, LLMDataDist
        print(llm_datadist is kvplan.llm_datadist)
        print(t is kvplan.llm_datadist.v2.llm_types, CacheDesc is t.CacheDesc, LLMDataDist.__name__)
        """
    )
    assert said == "True\nTrue True LLMDataDist\n"


def test_a_program_in_another_folder_finds_a_kvplan_that_runs_from_its_tree(folder: Folder) -> None:
    """Only the launcher's working folder shows where kvplan is."""
    program = folder.write("program.py", "import llm_datadist; print(llm_datadist.__file__)")
    done = subprocess.run(
        [sys.executable, "-S", "-m", "kvplan.run", str(program)],
        cwd=ROOT,
        env={"PYTHONPATH": next(item for item in sys.path if item.endswith("site-packages"))},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == (f"{ROOT / 'kvplan/llm_datadist/__init__.py'}\n", "")


@pytest.mark.parametrize("where", ["installed", "beside the program", "in the current folder"])
def test_an_official_package_is_not_used_and_named(where: str, folder: Folder) -> None:
    name = "site" if where == "installed" else "."
    official = folder.official(name) / "llm_datadist" / "__init__.py"
    folder.write("program.py", "import llm_datadist, llm_datadist.v2 as v; print(v.__name__)")
    program = ["-m", "program"] if where == "in the current folder" else ["program.py"]
    done = folder.launch(*program, path=[folder.path / name] if where == "installed" else [])
    assert done.stdout == "kvplan.llm_datadist.v2\n"
    (line,) = done.stderr.splitlines()
    assert str(official.resolve()) in line
    assert str(ROOT / "kvplan" / "llm_datadist") in line


def test_a_folder_with_the_name_is_not_taken_for_a_package(folder: Folder) -> None:
    folder.write("llm_datadist/notes.txt", "")
    assert folder.run("import llm_datadist; print(llm_datadist.__name__)") == (
        "kvplan.llm_datadist\n"
    )


@pytest.mark.parametrize(
    ("arguments", "launch"),
    [
        (("a.py", "-x", "--"), launcher.Launch(False, ("a.py", "-x", "--"))),
        (("-",), launcher.Launch(False, ("-",))),
        (("-m", "json.tool"), launcher.Launch(False, ("-m", "json.tool"))),
        (("-cpass", "b"), launcher.Launch(False, ("-cpass", "b"))),
        (("--", "a.py", "-h"), launcher.Launch(False, ("a.py", "-h"))),
        (("--several-engines", "--", "-c", ""), launcher.Launch(True, ("-c", ""))),
        (("--observe", "nixl, hixl=/a", "b"), launcher.Launch(False, ("b",), "nixl, hixl=/a")),
        (
            ("--as", "nixl", "--as", "mooncake", "--", "b"),
            launcher.Launch(False, ("b",), "", ("nixl", "mooncake")),
        ),
    ],
)
def test_the_program_begins_after_the_options(
    arguments: tuple[str, ...], launch: launcher.Launch
) -> None:
    assert launcher.parse(arguments) == launch


def test_an_option_replaces_its_variable_and_leaves_others_as_they_are() -> None:
    inherited = {
        "PYTHONPATH": str(STUBS),
        "KVPLAN_SEVERAL_ENGINES": "0",
        "KVPLAN_OBSERVE": "hixl",
        "KVPLAN_AS": "nixl",
    }
    pid = str(os.getpid())
    for arguments, changed in (
        ((), {}),
        (("--several-engines",), {"KVPLAN_SEVERAL_ENGINES": "1"}),
        (("--observe", "nixl=/a"), {"KVPLAN_OBSERVE": "nixl=/a", "KVPLAN_OBSERVE_PID": pid}),
        (("--as", "nixl", "--as", "mooncake"), {"KVPLAN_AS": "nixl,mooncake"}),
    ):
        launch = launcher.parse([*arguments, "program.py"])
        assert launch is not None
        assert launcher.environment(inherited, launch) == inherited | changed


def test_the_options_come_before_the_program(folder: Folder) -> None:
    show = "import os; print(os.environ.get('KVPLAN_SEVERAL_ENGINES'))"
    assert folder.launch("-c", show).stdout == "None\n"
    assert folder.launch("--several-engines", "-c", show).stdout == "1\n"


def test_pythonpath_keeps_what_it_held(folder: Folder) -> None:
    show = "import os; print(os.environ['PYTHONPATH'])"
    assert folder.launch("-c", show).stdout == f"{STUBS}:{ROOT}\n"
    twice = folder.launch("-m", "kvplan.run", "-c", show, path=["a", "b"])
    assert twice.stdout == f"{STUBS}:a:b:{ROOT}\n"


def test_help(folder: Folder) -> None:
    for option in ("-h", "--help"):
        asked = folder.launch(option)
        assert (asked.stdout, asked.stderr, asked.code) == (launcher.USAGE, "", 0)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "no program"),
        (("--several-engines",), "no program"),
        (("-m",), "-m needs an argument"),
        (("-c",), "-c needs an argument"),
        (("--",), "no option --"),
        (("--several", "program.py"), "no option --several"),
        (("-u", "program.py"), "no option -u; options of python go before -m kvplan.run"),
    ],
)
def test_an_invalid_command_line_exits_with_2(
    arguments: tuple[str, ...], why: str, folder: Folder
) -> None:
    misused = folder.launch(*arguments)
    assert (misused.code, misused.stdout) == (2, "")
    assert misused.stderr.startswith(f"kvplan.run: {why}")
    assert misused.stderr.endswith(launcher.USAGE)


@pytest.mark.parametrize("flag", ["-E", "-I"])
def test_an_interpreter_that_ignores_pythonpath_is_refused(flag: str, folder: Folder) -> None:
    command = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import runpy; "
    run = "sys.argv = ['x', 'program.py']; runpy.run_module('kvplan.run', run_name='__main__')"
    refused = folder.python("-c", command + run, flags=[flag])
    assert refused.code == 2
    assert "install()" in refused.stderr


@pytest.mark.parametrize("own", [(), ("-u",), ("-Xdev", "-OOB"), ("-W", "ignore", "-uq")])
@pytest.mark.parametrize("arguments", [("program.py",), ("-m", "kvplan.run", "-u")])
def test_pythons_own_options_are_kept_however_the_launcher_is_named(
    own: tuple[str, ...], arguments: tuple[str, ...]
) -> None:
    """`-m kvplan.run`, `-mkvplan.run`, and both behind the letters of the option before."""
    spellings = [[*own, "-m", launcher.MODULE], [*own, f"-m{launcher.MODULE}"]]
    if own:
        *before, last = own
        spellings += [
            [*before, f"{last}m", launcher.MODULE],
            [*before, f"{last}m{launcher.MODULE}"],
        ]
    for spelled in spellings:
        command = [sys.executable, *spelled, *arguments]
        assert launcher.interpreter_flags(command, len(arguments)) == [*own], spelled


def test_started_by_another_program_it_keeps_what_the_interpreter_knows(folder: Folder) -> None:
    program = "sys.argv[1:] = ['-c', 'import sys; print(sys.flags.optimize)']"
    run = f"import runpy, sys; {program}; runpy.run_module('kvplan.run', run_name='__main__')"
    done = folder.python("-c", run, flags=["-O"])
    assert (done.stdout, done.code) == ("1\n", 0)


def test_a_tool_that_was_to_run_the_launcher_runs_the_program(folder: Folder) -> None:
    """A profiler or a debugger would otherwise miss the program."""
    folder.write("program.py", "import llm_datadist\ndef f(): print(llm_datadist.__name__)\nf()")
    profiled = folder.launch("program.py", flags=["-m", "cProfile"])
    assert profiled.code == 0
    assert profiled.stdout.startswith("kvplan.llm_datadist\n")
    assert "program.py:2(f)" in profiled.stdout
