"""`import hixl` under the launcher: kvplan's, unless another one is installed."""

from __future__ import annotations

from tests.run.programs import ROOT, Folder

WHO = "import hixl; print(hixl.__file__, hasattr(hixl.Hixl, 'transfer_sync'))"


def test_it_is_kvplans(folder: Folder) -> None:
    assert folder.run(WHO) == f"{ROOT / 'kvplan/hixl/__init__.py'} True\n"
    same = "import hixl, kvplan.hixl; print(hixl is kvplan.hixl, hixl.__name__)"
    assert folder.run(same) == "True kvplan.hixl\n"


def test_its_extension_module_has_the_same_names(folder: Folder) -> None:
    program = (
        "from hixl.hixl import MEM_HOST, OPTION_AUTO_CONNECT, Hixl\n"
        "import hixl, hixl.hixl, kvplan.hixl\n"
        "print(Hixl is hixl.Hixl is kvplan.hixl.Hixl is hixl.hixl.Hixl, MEM_HOST)"
    )
    assert folder.run(program) == "True MemType.MEM_HOST\n"


def test_also_in_processes_that_the_program_starts(folder: Folder) -> None:
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WHO!r}], check=True)"
    assert folder.run(program) == f"{ROOT / 'kvplan/hixl/__init__.py'} True\n"


def test_an_installed_one_is_used(folder: Folder) -> None:
    official = folder.write("site/hixl.py", "class Hixl: transfer_sync = 1\nWHO = 'official'\n")
    folder.write("site/program.py", "")
    said = folder.run(f"{WHO}; print(hixl.WHO)", path=[official.parent])
    assert said == f"{official} True\nofficial\n"


def test_a_folder_of_that_name_is_none(folder: Folder) -> None:
    folder.write("site/hixl/readme.txt", "")
    said = folder.run(WHO, path=[folder.path / "site"])
    assert said == f"{ROOT / 'kvplan/hixl/__init__.py'} True\n"
