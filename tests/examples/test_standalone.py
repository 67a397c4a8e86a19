"""Each example alone, copied to an empty folder, with kvplan installed from its wheel.

The examples run side by side, because most of their time is spent waiting for each other.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.examples.test_examples import FOLDER, NO_TORCH, SHOWN
from tests.examples.test_hixl_two_processes import SAID
from tests.support.installation import users_environment
from tests.support.ports import free_port

pytestmark = pytest.mark.slow  # needs the wheel

AT_ONCE = 3
PATIENCE = 120
HIXL = "hixl_two_processes"
ALONE = [*SHOWN, HIXL, "test_block_tables"]
PAIRS = {"two_hosts", "llm_datadist_prefill", "llm_datadist_decode"}

Done = subprocess.CompletedProcess[str]


def environment() -> dict[str, str]:
    """Return a user's environment, plus the torch of the tests, which is slow to install."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return users_environment()
    return users_environment() | {"PYTHONPATH": str(Path(torch.origin).parents[1])}


def start(python: Path, folder: Path, *words: str) -> Done:
    command = [python, "-W", "error", *words]
    if words[0] == "torch_tensors.py":
        command[1:3] = []  # torch prints warnings
    return subprocess.run(
        command,
        cwd=folder,
        env=environment() if words[0] == "torch_tensors.py" else users_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def words_of(name: str) -> list[str]:
    script = f"{name}.py"
    if name == HIXL:
        return ["-m", "kvplan.run", script]
    if name.startswith("test_"):
        return ["-m", "pytest", "-q", "-p", "no:cacheprovider", script]
    return [script]


@pytest.fixture(scope="module")
def ended(
    python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Done]]]:
    """The results of all examples of one program."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        started = {}
        for name in ALONE:
            folder = tmp_path_factory.mktemp("alone")
            shutil.copy(FOLDER / f"{name}.py", folder)
            started[name] = threads.submit(start, python, folder, *words_of(name))
        yield started


def test_all_examples_are_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {"__init__", *ALONE, *PAIRS}


@pytest.mark.parametrize(
    "name",
    [pytest.param(item, marks=NO_TORCH if item == "torch_tensors" else ()) for item in SHOWN],
)
def test_an_example_prints_the_expected_lines(name: str, ended: dict[str, Future[Done]]) -> None:
    done = ended[name].result()
    assert (done.returncode, done.stderr) == (0, "")
    for text in SHOWN[name]:
        assert text in done.stdout


def test_the_example_of_hixl_prints_the_expected_lines(ended: dict[str, Future[Done]]) -> None:
    done = ended[HIXL].result()
    assert (done.stdout, done.stderr, done.returncode) == (SAID, "", 0)


def test_the_unit_tests_of_block_tables_pass(ended: dict[str, Future[Done]]) -> None:
    done = ended["test_block_tables"].result()
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout


def test_the_torch_example_names_the_missing_package(ended: dict[str, Future[Done]]) -> None:
    if find_spec("torch"):
        pytest.skip("torch is installed")
    done = ended["torch_tensors"].result()
    assert (done.returncode, done.stderr) == (1, "this example needs torch: pip install torch\n")


class TwoHosts:
    """Results of both sides of the script in a folder, over loopback."""

    def __init__(self, python: Path, folder: Path) -> None:
        subprocess.run(
            [python.with_name("kvplan"), "keygen", "cluster.key"], cwd=folder, check=True
        )
        address = f"127.0.0.1:{free_port()}"
        key = ("--key", "cluster.key")
        with subprocess.Popen(
            [python, "-W", "error", "two_hosts.py", *key, "--listen", address],
            cwd=folder,
            env=users_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as listening:
            try:
                assert listening.stdout is not None
                assert listening.stdout.readline() == f"prefill: listening at {address}\n"
                self.decode = start(python, folder, "two_hosts.py", *key, "--connect", address)
                out, errors = listening.communicate(timeout=PATIENCE)
            finally:
                listening.kill()
        self.prefill = Done(listening.args, listening.returncode, out, errors)


def test_two_hosts_work_over_loopback(python: Path, tmp_path: Path) -> None:
    """`tests/across/test_surface.py` runs the same script between two hosts."""
    shutil.copy(FOLDER / "two_hosts.py", tmp_path)
    both = TwoHosts(python, tmp_path)
    assert (both.decode.returncode, both.decode.stderr) == (0, "")
    assert "decode: 16 tensors of 64 blocks, every byte as it should be" in both.decode.stdout
    assert (both.prefill.returncode, both.prefill.stderr) == (0, "")
    assert both.prefill.stdout == (
        "prefill: cluster 2 says: pushed 8 blocks\n"
        "prefill: 16 tensors of 64 blocks, every byte as it should be\n"
    )


@pytest.mark.parametrize(
    ("right", "wrong", "side"),
    [
        ("key, BACK, BACK,", "key, BACK, BACK[::-1],", "prefill"),
        ("cache, AT_PREFILL, AT_DECODE", "cache, AT_DECODE, AT_DECODE", "decode"),
    ],
)
def test_two_hosts_detect_a_wrong_block(
    right: str, wrong: str, side: str, python: Path, tmp_path: Path
) -> None:
    source = (FOLDER / "two_hosts.py").read_text()
    assert source.count(right) == 1
    (tmp_path / "two_hosts.py").write_text(source.replace(right, wrong))
    both = TwoHosts(python, tmp_path)
    done = both.prefill if side == "prefill" else both.decode
    assert f"FAILED: {side}: tensor 0 is wrong in blocks" in done.stderr
    assert both.prefill.returncode == done.returncode == 1


def test_two_hosts_report_a_missing_key_in_one_line(python: Path, tmp_path: Path) -> None:
    shutil.copy(FOLDER / "two_hosts.py", tmp_path)
    done = start(python, tmp_path, "two_hosts.py", "--listen=127.0.0.1:0", "--key=none.key")
    assert done.returncode == 1
    assert done.stderr.startswith("FAILED: cluster key none.key: No such file")
    assert done.stderr.count("\n") == 1


def test_a_wrong_block_table_fails_its_unit_tests(python: Path, tmp_path: Path) -> None:
    source = (FOLDER / "test_block_tables.py").read_text()
    right = "Rows(desc, mine, first_token=num_cached)"
    assert source.count(right) == 1
    (tmp_path / "test_block_tables.py").write_text(source.replace(right, "Rows(desc, mine)"))
    done = start(python, tmp_path, *words_of("test_block_tables"))
    assert done.returncode == 1
    assert "4 failed, 2 passed" in done.stdout
