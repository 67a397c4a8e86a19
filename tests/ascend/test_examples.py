"""The examples on the simulated device print the same lines, and use ACL and HCCL."""

from __future__ import annotations

import pytest

from tests.ascend.simulator import Controls, Log
from tests.examples.test_examples import SHOWN, run
from tests.examples.test_llm_datadist_pair import FOLDER, Pair

ON_HOST = {"asyncio_service", "lmcache_chunks", "sglang_pair", "torch_tensors", "why_is_it_wrong"}
ON_DEVICES = [name for name in SHOWN if name not in ON_HOST]

MOVES = {
    "copy_and_swap": {"aclrtMemcpyAsync", "aclrtMemcpyBatchAsync"},
    "push": {"HcclBatchPut"},
    "llm_datadist": {"HcclBatchPut", "HcclBatchGet"},
}
PULL = {"HcclBatchGet"}
KINDS = "streams events contexts device_bytes pinned registered regions comms"


def assert_no_leaks(log: Log, processes: int) -> None:
    """Check that each process that used a device has ended without leaks."""
    leaks = [call.fields for call in log.calls("leaks")]
    assert len({leak["pid"] for leak in leaks}) == processes
    assert [(kind, leak[kind]) for leak in leaks for kind in KINDS.split() if leak[kind]] == []
    assert log.calls("violation") == []


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(on_device, marks=() if on_device == "pull" else pytest.mark.slow)
        for on_device in ON_DEVICES
    ],
)
def test_an_example_prints_the_same_lines_on_devices(
    simulator: Controls, sim_log: Log, name: str
) -> None:
    done = run(FOLDER / f"{name}.py")
    assert (done.returncode, done.stderr) == (0, "")
    for text in SHOWN[name]:
        assert text in done.stdout
    counted = sim_log.counts()
    assert MOVES.get(name, PULL) <= {name for name, count in counted.items() if count}
    assert_no_leaks(
        sim_log, {"copy_and_swap": 1, "several_peers": 4, "gather_leases": 3}.get(name, 2)
    )


@pytest.mark.slow
def test_the_pair_for_the_official_package_works_on_devices(
    simulator: Controls, sim_log: Log
) -> None:
    pair = Pair(FOLDER)
    assert pair.status == (0, 0), pair.prefill + pair.decode
    assert pair.decode[0].count("all in their places") == 4
    assert MOVES["llm_datadist"] <= set(sim_log.counts())
    assert_no_leaks(sim_log, 2)
