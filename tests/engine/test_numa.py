"""NUMA nodes: existing ones, refused ones, and the processors that copy."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from kvplan import CacheDesc, DataType, LlmDataDist, LlmRole
from kvplan.engine.numa import check_node, numa_nodes, transfers_on
from kvplan.execution import default_transfers
from kvplan.status import LLMStatusCode
from tests.support import forked
from tests.support.interrupts import Interrupts
from tests.support.refusals import refused

ROOT = Path(__file__).parents[2]


def machine(root: Path, online: str, cpulists: dict[int, str]) -> Path:
    """Make a file system with these nodes."""
    folder = root / "sys/devices/system/node"
    folder.mkdir(parents=True)
    (folder / "online").write_text(online)
    for node, cpulist in cpulists.items():
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}/cpulist").write_text(cpulist)
    return root


def test_nodes_and_their_processors(tmp_path: Path) -> None:
    root = machine(tmp_path, "0-1,3\n", {0: "0-2,8\n", 1: "3\n", 3: "\n"})
    assert numa_nodes(root) == {0: {0, 1, 2, 8}, 1: {3}, 3: set()}


def test_a_kernel_without_numa_has_none(tmp_path: Path) -> None:
    assert numa_nodes(tmp_path) == {}


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ({0: 1}, r"node=2 is out of range \[0, 0\]: this machine has 1 NUMA node \("),
        ({0: 1, 1: 1}, r"node=2 is out of range \[0, 1\]: this machine has 2 NUMA nodes \("),
        ({3: 1, 4: 1}, r"node=2 is out of range \[3, 4\]: this machine has 2 NUMA nodes \("),
        ({0: 1, 3: 1}, r"\[0, 3\]: this machine has 2 NUMA nodes, of which \[0, 3\] are online"),
        ({}, r"node=2: the kernel of this machine does not list NUMA nodes"),
    ],
)
def test_a_missing_node_is_refused(nodes: dict[int, int], why: str) -> None:
    with refused(LLMStatusCode.LLM_PARAM_INVALID, why):
        check_node("node", 2, {node: frozenset({0}) for node in nodes})


def test_an_engine_refuses_a_missing_node_with_the_range() -> None:
    with LlmDataDist(1, LlmRole.MIX) as engine:
        with refused(LLMStatusCode.LLM_PARAM_INVALID, r"numa_node \(kvplan.numa_node\)=1023"):
            engine.initialize({"kvplan.numa_node": "1023"})
        assert engine._engine is None


def copying_threads() -> dict[int, set[int]]:
    """Return the copying threads of this process, and the processors that each may use."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            if (task / "comm").read_text().startswith("kvn-pool"):
                found[int(task.name)] = os.sched_getaffinity(int(task.name))
    return found


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_copying_threads_run_on_the_processors_of_the_node() -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    nodes = {0: frozenset({first}), 1: frozenset({second})}
    default_transfers()
    before, own = copying_threads(), os.sched_getaffinity(0)
    transfers = transfers_on(1, nodes, None)
    new = {tid: cores for tid, cores in copying_threads().items() if tid not in before}
    assert list(new.values()) == [{second}]
    assert transfers.threads == 1
    assert transfers_on(1, nodes, None) is transfers
    assert os.sched_getaffinity(0) == own


def interrupted() -> int:
    """Interrupt `transfers_on` at each place: this thread still runs on all of its processors."""
    allowed = os.sched_getaffinity(0)
    processors = sorted(allowed)
    nodes = {0: frozenset(processors[:1]), 1: frozenset(processors[1:])}
    transfers_on(0, nodes, None)
    interrupts, goes_on = Interrupts("/kvplan/engine/"), True
    while goes_on:
        goes_on = interrupts.call(lambda: transfers_on(0, nodes, None))
        assert os.sched_getaffinity(0) == allowed, interrupts.place
    return interrupts.place


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_an_interrupted_choice_of_a_node_binds_no_thread_of_the_program() -> None:
    code = "from tests.engine.test_numa import interrupted; print(interrupted())"
    done = forked.python(code, imported=("tests.engine.test_numa",))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_copying_threads_are_spread_over_all_nodes() -> None:
    """The third node has no processors that this process may use; the fourth has none at all."""
    first, second, *_ = sorted(os.sched_getaffinity(0))
    nodes = {
        0: frozenset({first}),
        1: frozenset({second}),
        2: frozenset({1023}),
        3: frozenset(),
    }
    before, own = copying_threads(), os.sched_getaffinity(0)
    transfers = transfers_on("all", nodes, '{"threads": 4}')
    new = [cores for tid, cores in copying_threads().items() if tid not in before]
    assert sorted(map(sorted, new)) == [[first], [first], [second], [second]]
    assert transfers.threads == 4
    assert transfers_on("all", nodes, '{"threads": 4}') is transfers
    assert os.sched_getaffinity(0) == own
    # A single thread is not bound to one of the nodes.
    assert transfers_on("all", nodes, '{"threads": 1}').threads == 1
    new = [cores for tid, cores in copying_threads().items() if tid not in before]
    assert new.count(own) == 1


def test_an_engine_that_copies_on_all_nodes_leaves_its_memory_to_the_system() -> None:
    with LlmDataDist(1, LlmRole.MIX) as engine:
        engine.initialize({"kvplan.numa_node": "all"})
        cache = engine.allocate_cache(CacheDesc(1, (1 << 16,), DataType.DT_UINT8))
        policies = Path("/proc/self/numa_maps").read_text().splitlines()
        (own,) = [row for row in policies if int(row.split()[0], 16) == cache.tensor_addrs[0]]
        assert own.split()[1] == "default"


def test_without_a_choice_of_node_the_process_shares_its_threads() -> None:
    everywhere = frozenset(os.sched_getaffinity(0))
    assert transfers_on(None, {}, None) is default_transfers()
    assert transfers_on(0, {0: everywhere}, None) is default_transfers()
    assert transfers_on(1, {0: everywhere, 1: frozenset()}, None) is default_transfers()
    for nodes in ({}, {0: everywhere}, {0: everywhere, 1: frozenset()}):
        assert transfers_on("all", nodes, None) is default_transfers()


def test_nodes_of_processors_that_no_set_names_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usable = frozenset(os.sched_getaffinity(0)) | {1024, 5000}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: usable)
    nodes = {0: usable - {1024, 5000}, 1: frozenset({1024, 5000})}
    assert transfers_on("all", nodes, None) is default_transfers()
