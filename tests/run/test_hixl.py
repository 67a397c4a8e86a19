"""`import hixl` under the launcher: kvplan's, unless another one is installed."""

from __future__ import annotations

from textwrap import dedent

from tests.run.programs import ROOT, Folder

WHO = "import hixl; print(hixl.__file__, hasattr(hixl.Hixl, 'transfer_sync'))"


def test_hixl_is_kvplans(folder: Folder) -> None:
    assert folder.run(WHO) == f"{ROOT / 'kvplan/hixl/__init__.py'} True\n"
    same = "import hixl, kvplan.hixl; print(hixl is kvplan.hixl, hixl.__name__)"
    assert folder.run(same) == "True kvplan.hixl\n"


def test_the_extension_module_has_the_same_names(folder: Folder) -> None:
    program = (
        "from hixl.hixl import MEM_HOST, OPTION_AUTO_CONNECT, Hixl\n"
        "import hixl, hixl.hixl, kvplan.hixl\n"
        "print(Hixl is hixl.Hixl is kvplan.hixl.Hixl is hixl.hixl.Hixl, MEM_HOST)"
    )
    assert folder.run(program) == "True MemType.MEM_HOST\n"


def test_hixl_is_kvplans_in_child_processes(folder: Folder) -> None:
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WHO!r}], check=True)"
    assert folder.run(program) == f"{ROOT / 'kvplan/hixl/__init__.py'} True\n"


def test_an_installed_hixl_is_used(folder: Folder) -> None:
    official = folder.write("site/hixl.py", "class Hixl: transfer_sync = 1\nWHO = 'official'\n")
    folder.write("site/program.py", "")
    said = folder.run(f"{WHO}; print(hixl.WHO)", path=[official.parent])
    assert said == f"{official} True\nofficial\n"


def test_a_folder_of_that_name_is_not_a_package(folder: Folder) -> None:
    folder.write("site/hixl/readme.txt", "")
    said = folder.run(WHO, path=[folder.path / "site"])
    assert said == f"{ROOT / 'kvplan/hixl/__init__.py'} True\n"


def test_reasons_of_failures_are_printed_unless_logging_is_configured(folder: Folder) -> None:
    """A program does not know kvplan's loggers, and a status has no reason."""
    call = "; import hixl; e = hixl.Hixl(); e.initialize('127.0.0.1'); e.connect('127.0.0.1:1')"
    silent = folder.launch("-c", f"import logging{call}")
    assert (silent.stdout, silent.code) == ("", 0)
    (line,) = silent.stderr.splitlines()
    assert line.startswith("connect")
    assert "127.0.0.1:1: connect: Connection refused" in line
    of_program = "import logging, sys; logging.basicConfig(stream=sys.stdout, format='%(message)s')"
    told = folder.launch("-c", f"{of_program}{call}")
    assert (told.stderr, told.code) == ("", 0)
    assert told.stdout.splitlines().count(line) == 1


def test_reasons_are_printed_once_and_only_if_logging_has_a_last_resort(folder: Folder) -> None:
    """The hook runs twice in an observed program: to observe the library, and to import it."""
    call = "import hixl; e = hixl.Hixl(); e.initialize('127.0.0.1'); e.connect('127.0.0.1:1')"
    observed = folder.launch("--observe", f"hixl={folder.path}", "-c", call)
    assert (observed.stdout, observed.code) == ("", 0)
    reasons = [line for line in observed.stderr.splitlines() if "Connection refused" in line]
    (line,) = reasons
    assert line.startswith("connect 127.0.0.1:1: FAILED")
    silenced = folder.launch("-c", f"import logging; logging.lastResort = None; {call}")
    assert (silenced.stdout, silenced.stderr, silenced.code) == ("", "", 0)


def test_the_logging_of_a_program_stays_as_it_is(folder: Folder) -> None:
    program = """
        import logging, sys
        import hixl
        ours = logging.getLogger("kvplan")
        handler = logging.StreamHandler(sys.stdout)
        ours.addHandler(handler)
        ours.warning("once")
        ours.removeHandler(handler)
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        other = logging.getLogger("other")  # its warnings go to the last resort
        other.propagate = False
        other.warning("another library")
        """
    said = folder.launch("-c", dedent(program))
    assert (said.stdout, said.stderr, said.code) == ("once\n", "another library\n", 0)
