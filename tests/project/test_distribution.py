"""The sdist and the wheel: complete, and working without the rest of the project."""

import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.installation import ROOT, one, run

PAGE = {f"kvplan/inspection/page.{kind}" for kind in ("html", "js")}
PAGE |= {"kvplan/planning/plan.schema.json"}

pytestmark = pytest.mark.slow  # builds the wheel


def tree(pattern: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)}


def test_the_wheel_is_one_for_all_python_versions_and_complete(dist: Path) -> None:
    wheel = one(dist, "*.whl")
    assert "-cp311-abi3-linux" in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"kvnative/{name}" for name in tree("include/kvnative/*.h")}
    expected |= {"kvplan/py.typed", "kvnative/py.typed"}
    expected |= tree("kvplan/**/*.py") | tree("kvnative/*.py[id]") | tree("kvnative/*.pxd")
    expected |= tree("kvnative/src/**/*.h") | PAGE
    expected |= {f"kvnative/{path.stem}.abi3.so" for path in ROOT.glob("kvnative/*.pyx")}
    expected |= {"kvnative/lib/libkvn.so"}
    assert expected - names == set()
    packages = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert packages == {"kvplan", "kvnative", "pytest_kvplan.py"}
    assert [
        name for name in names if name.endswith((".c", ".cu", ".pyx")) or "wrappers" in name
    ] == []


def test_the_sdist_has_every_source_and_nothing_built(dist: Path) -> None:
    with tarfile.open(one(dist, "*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {"LICENSE", "Makefile", "README.md", "setup.py", "conftest.py", ".ci/run"}
    sources |= {"tools/sanitize", "tools/tsan.supp", "requirements/constraints.txt"} | tree(
        "tools/*.py"
    )
    sources |= (
        tree("benchmarks/**/*.py")
        | tree("benchmarks/*.c")
        | tree("examples/**/*.py")
        | tree("docs/**/*.md")
    )
    sources |= tree("kvnative/*.pyx") | tree("kvnative/src/**/*.[ch]") | tree("tests/**/*.py")
    sources |= tree("kvnative/src/**/*.cu") | tree("kvnative/src/**/*.ptx")
    sources |= tree("tests/support/*.pyx") | tree("tests/support/native/*.[ch]")
    assert (sources | PAGE) - names == set()
    assert [name for name in names if name.startswith("build/") or name.endswith(".so")] == []


def test_the_clean_installation_plans_and_transfers(python: Path, tmp_path: Path) -> None:
    """`make wheels` tries each wheel with the same program."""
    program = shutil.copy(ROOT / "tools" / "try_wheel.py", tmp_path)
    output = run([python, "-W", "error", program], cwd=tmp_path)
    modules = [*ROOT.glob("kvnative/*.pyx"), *ROOT.glob("kvnative/[a-z]*.py")]
    assert f"{len(modules)} modules imported from {python.parents[1]}" in output
    assert "<Plan pull_blocks B2B" in output
    assert output.count("all bytes as expected") == 2
    assert "$ kvplan info" in output


def test_the_clean_installation_runs_programs_of_llm_datadist(python: Path, tmp_path: Path) -> None:
    child = "import llm_datadist.v2.llm_types as it; print(it.__file__)"
    program = tmp_path / "program.py"
    program.write_text(
        "import subprocess, sys\n"
        f"for flags in ([], ['-P']): subprocess.run([sys.executable, *flags, '-c', {child!r}])\n"
        "from llm_datadist import *\n"
        "print(CacheDesc.__module__, LLMDataDist(LLMRole.PROMPT, 1).cluster_id)\n"
    )
    output = run([python, "-W", "error", "-m", "kvplan.run", program], cwd=tmp_path).splitlines()
    assert output[2:] == ["kvplan.llm_datadist.v2.caches 1"]
    assert len(output) == 3
    assert all(Path(text).is_relative_to(python.parents[1]) for text in output[:2])


def test_a_backend_can_be_written_against_the_installed_headers(
    python: Path, tmp_path: Path
) -> None:
    include = run([python, "-c", "import kvnative; print(kvnative.get_include())"], cwd=tmp_path)
    source = tmp_path / "backend.c"
    source.write_text(
        '#include "kvnative/backend.h"\n'
        'static const kvn_backend_vtable vtable = {.name = "mine"};\n'
        "kvn_backend backend = {&vtable};\n"
    )
    strict = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    includes = f"-I{include.strip()}"
    run(["gcc", *strict, "-Wno-missing-field-initializers", includes, "-c", source], cwd=tmp_path)
