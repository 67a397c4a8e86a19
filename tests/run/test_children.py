"""Processes that a launched program starts: they have kvplan's llm_datadist, too."""

from __future__ import annotations

import pytest

from tests.run.programs import Folder

METHODS = ["fork", "spawn", "forkserver"]

WORKER = """
import llm_datadist
from llm_datadist import CacheDesc, CacheKey, DataType, Placement
from llm_datadist.v2.llm_types import CacheKeyByIdAndIndex

def values():
    return [
        CacheKey(1, 2, prefix_id=3), CacheKeyByIdAndIndex(1, 2, 3), DataType.DT_BF16,
        CacheDesc(2, [4, 8], DataType.DT_FLOAT16, Placement.HOST),
    ]

def look(theirs):
    ours = values()
    assert [type(it) for it in theirs] == [type(it) for it in ours]
    assert [repr(it) for it in theirs] == [repr(it) for it in ours]
    return llm_datadist.__name__, theirs
"""

CHECKED = "name, [repr(it) for it in back] == [repr(it) for it in values()]"
AS_EXPECTED = "kvplan.llm_datadist True\n"


@pytest.mark.parametrize("method", METHODS)
def test_multiprocessing(method: str, folder: Folder) -> None:
    folder.write("worker.py", WORKER)
    said = folder.run(
        f"""
        import multiprocessing
        from worker import look, values

        if __name__ == "__main__":
            with multiprocessing.get_context("{method}").Pool(1) as pool:
                name, back = pool.apply(look, [values()])
            print({CHECKED})
        """
    )
    assert said == AS_EXPECTED


@pytest.mark.parametrize("method", METHODS)
def test_pools_of_concurrent_futures_with_functions_of_main(method: str, folder: Folder) -> None:
    said = folder.run(
        f"{WORKER}\n"
        f"import multiprocessing\n"
        f"from concurrent.futures import ProcessPoolExecutor\n"
        f"if __name__ == '__main__':\n"
        f"    context = multiprocessing.get_context('{method}')\n"
        f"    with ProcessPoolExecutor(1, context) as pool:\n"
        f"        name, back = pool.submit(look, values()).result()\n"
        f"    print({CHECKED})\n"
    )
    assert said == AS_EXPECTED


@pytest.mark.parametrize("method", METHODS)
def test_a_program_run_as_a_module_of_a_package(method: str, folder: Folder) -> None:
    folder.write("package/__init__.py", "")
    folder.write("package/worker.py", WORKER)
    folder.write(
        "package/__main__.py",
        f"""
        import multiprocessing
        from package.worker import look, values

        if __name__ == "__main__":
            with multiprocessing.get_context("{method}").Pool(1) as pool:
                name, back = pool.apply(look, [values()])
            print({CHECKED})
        """,
    )
    done = folder.launch("-m", "package")
    assert (done.stdout, done.stderr, done.code) == (AS_EXPECTED, "", 0)


@pytest.mark.parametrize("flag", [[], ["-P"], ["-S"]], ids=["plain", "safe path", "no site"])
def test_subprocesses_and_their_subprocesses(flag: list[str], folder: Folder) -> None:
    folder.write("elsewhere/child.py", "import llm_datadist.configs as it; print(it.__name__)")
    said = folder.run(
        f"""
        import subprocess, sys
        show = "import llm_datadist as it; print(it.__name__)"
        code = "import subprocess, sys; "
        for program in (["elsewhere/child.py"], ["-c", show]):
            code += f"subprocess.run([sys.executable, *{flag}, *{{program}}], check=True); "
        subprocess.run([sys.executable, "-c", code], check=True)
        """,
        path=[]
        if "-S" not in flag
        else [item for item in __import__("sys").path if "site-pack" in item],
    )
    assert said == "kvplan.llm_datadist.configs\nkvplan.llm_datadist\n"


def test_children_behind_a_shell(folder: Folder) -> None:
    said = folder.run(
        """
        import os, sys
        command = f"cd / && {sys.executable} -c 'import llm_datadist as it; print(it.__name__)'"
        sys.exit(os.waitstatus_to_exitcode(os.system(command)))
        """
    )
    assert said == "kvplan.llm_datadist\n"


@pytest.mark.parametrize("where", ["site", "."], ids=["installed", "beside the program"])
@pytest.mark.slow
def test_an_official_package_is_not_used_by_children(where: str, folder: Folder) -> None:
    official = folder.official(where)
    folder.write("child.py", "import llm_datadist.v2 as it; print(it.__name__)")
    folder.write(
        "program.py",
        """
        import multiprocessing, subprocess, sys

        def name():
            import llm_datadist.v2
            return llm_datadist.v2.__name__

        if __name__ == "__main__":
            subprocess.run([sys.executable, "child.py"], check=True)
            subprocess.run([sys.executable, "-m", "child"], check=True)
            for method in multiprocessing.get_all_start_methods():
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(pool.apply(name), flush=True)
        """,
    )
    done = folder.launch("program.py", path=[official])
    assert done.stdout.splitlines() == ["kvplan.llm_datadist.v2"] * 5
    assert done.stderr.count("llm_datadist is kvplan's") == len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_spawned_children_of_a_process_that_ignores_the_environment(folder: Folder) -> None:
    """Their path is that of their parent, in spite of the environment."""
    folder.write("worker.py", WORKER)
    said = folder.run(
        f"""
        import multiprocessing, multiprocessing.util, sys
        from worker import look, values

        if __name__ == "__main__":
            multiprocessing.util._args_from_interpreter_flags = lambda: ["-I"]
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                name, back = pool.apply(look, [values()])
            print({CHECKED})
        """
    )
    assert said == AS_EXPECTED


def test_an_existing_sitecustomize_still_runs(folder: Folder) -> None:
    folder.write("site/sitecustomize.py", "import sys; sys.customized = __name__, __file__")
    show = "import sys, sitecustomize; print(*sys.customized, sitecustomize.__file__)"
    theirs = folder.path / "site" / "sitecustomize.py"
    done = folder.launch("-c", show, path=[folder.path / "site"])
    assert done.stdout == f"sitecustomize {theirs} {theirs}\n"


def test_a_child_without_the_import_loads_nothing_of_kvplan(folder: Folder) -> None:
    said = folder.run(
        """
        import subprocess, sys
        show = "import sys; print(*sys.modules)"
        subprocess.run([sys.executable, "-c", show], check=True)
        """
    ).split()
    assert "kvplan_hook" in said
    assert not {"kvplan", "llm_datadist", "numpy"} & set(said)
