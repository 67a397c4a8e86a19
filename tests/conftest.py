"""Hypothesis profiles: `ci` (default) repeats the same examples, and `explore` tries new ones.

The profile `sanitized` tries the first examples of `ci`, because each takes several times as long
there. `soak`, of `make soak`, tries as many examples as `ci`, selected by `--hypothesis-seed`.
`many`, of `make explore`, tries 20,000 new ones.

No test finds an accelerator by itself, even if the machine has one, or an earlier test has loaded
the simulated libraries: tests that need one use the fixture `simulator`. Likewise, tests that need
UCX use the fixture `ucx`. Copies use the built-in tuning: no test measures the machine because an
earlier one has moved many bytes.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings

from kvplan import LlmDataDist
from kvplan.transport.ucx.library import Found
from tests.support import installation
from tests.support.peer import be_patient
from tests.support.ucx_library import found, hide

settings.register_profile(
    "ci",
    deadline=None,  # CI machines stall
    derandomize=True,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("sanitized", settings.get_profile("ci"), max_examples=20)
settings.register_profile("soak", settings.get_profile("sanitized"), derandomize=False)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.register_profile(
    "many",
    deadline=None,
    database=None,
    max_examples=20_000,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

os.environ["KVPLAN_ASCEND_LIBRARY"] = ""
os.environ["KVPLAN_CUDA_LIBRARY"] = ""
os.environ["KVPLAN_TUNING"] = "builtin"
hide()
be_patient(LlmDataDist)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background commands with SIGINT ignored. Children that tests interrupt would
    # inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

TEARDOWN_S = 150
BUILD_S = 1200  # a minute on a quiet machine


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for sockets, whose paths have at most 107 bytes; `tmp_path` may need 80 of them."""
    with TemporaryDirectory(prefix="kv", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session", autouse=True)
def _simulated_devices_meet(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A folder for the simulated libraries, which read the variable once; see `sim_folder`."""
    folder = tmp_path_factory.getbasetemp() / "kvsim"
    folder.mkdir(exist_ok=True)
    os.environ["KVSIM_DIR"] = str(folder)


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the first test with a wheel take as long as a busy machine builds the wheel."""
    for item in items:
        if {"dist", "python"}.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.timeout(BUILD_S))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exclude all collected objects from later garbage collections: they belong to no test.

    Garbage is excluded, too: finding it takes a second of each process, and returns no memory.
    """
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _without_what_other_files_left() -> None:
    """A garbage collection that later ones skip, for objects that earlier files loaded and kept.

    Thousands of tests collect garbage to find leaks. Late in a run, each of those collections took
    most of a second.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Watch the teardown of a test that failed, since its failure ended all other watches.

    pytest cancels its own timeout and pytest-timeout's, for debugging. A teardown that hangs
    now ends its process, and pytest-xdist names the test.
    """
    if isinstance(node, pytest.Item) and not node.config.getoption("usepdb"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(TEARDOWN_S)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    """Let an interrupt that a test does not expect fail this test, with its traceback.

    Under pytest-xdist, an interrupt in one process would end all of them, without a traceback.
    """
    try:
        return (yield)
    except KeyboardInterrupt as error:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            raise
        raise AssertionError("interrupted by a signal that this test did not expect") from error


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    signal.alarm(0)


@pytest.fixture
def ucx() -> Iterator[Found]:
    """The UCX library, which this process and those that it starts find."""
    with found() as library:
        yield library


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel; all processes of a run share it."""
    return installation.built(tmp_path_factory)


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel; all processes of a run share it."""
    return installation.installed(tmp_path_factory)
