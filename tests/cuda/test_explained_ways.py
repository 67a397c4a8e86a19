"""What `explain` says of how a GPU copies a plan is what the driver is called for."""

from __future__ import annotations

import itertools
import json
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvplan
from kvnative._cuda import CopyTuning, builtin_copy_tuning, copy_way, tune_copies
from kvnative._device import COPY_DIRECTIONS
from kvplan import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LlmRole,
    Options,
    Placement,
    Rows,
    Transfer,
)
from kvplan.cli import main
from kvplan.device import cuda_copies
from kvplan.device.cuda import CudaDevice
from kvplan.device.device import Device
from kvplan.inspection.copy_ways import BUILTIN, NO_LIMIT, CopyDirection, CopyTable, stored_tables
from tests.ascend.simulator import Log
from tests.cuda_sim.simulator import CudaControls
from tests.device.engines import engine_on

CALLS = {
    "kernel": "cuLaunchKernel",
    "batch": "cuMemcpyBatchAsync_v2",
    "single": "cuMemcpyAsync",
}
BLOCKS, BLOCK = 96, 1024
ENDS: dict[CopyDirection, tuple[Placement, Placement]] = {
    "host_to_device": (Placement.HOST, Placement.DEVICE),
    "device_to_host": (Placement.DEVICE, Placement.HOST),
    "device_to_device": (Placement.DEVICE, Placement.DEVICE),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where nothing is stored yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvplan"


@pytest.fixture
def datadist(cuda_simulator: CudaControls) -> Iterator[LlmDataDist]:
    with engine_on(cuda_simulator) as made:
        yield made
        del made


def device_of(datadist: LlmDataDist) -> Device:
    device = datadist._running().device
    assert device is not None
    return device


def table_of(datadist: LlmDataDist) -> CopyTable:
    table = device_of(datadist).copies
    assert table is not None
    return table


def paged(datadist: LlmDataDist, placement: Placement, tensors: int, blocks: int = BLOCKS) -> Cache:
    return datadist.allocate_blocks_cache(
        CacheDesc(tensors, (blocks, BLOCK), DataType.DT_UINT8, placement)
    )


def called(log: Log) -> dict[str, int]:
    counts = log.counts(*CALLS.values())
    return {way: counts[call] for way, call in CALLS.items() if counts[call]}


def random_blocks(rng: np.random.Generator) -> dict[int, int]:
    """Blocks of the first half, in pieces that lie together, to the second half in any order."""
    half = BLOCKS // 2
    cuts = sorted(rng.choice(range(1, half), int(rng.integers(0, 24)), replace=False).tolist())
    pieces = [range(*it) for it in itertools.pairwise([0, *cuts, half])]
    order = rng.permutation(len(pieces))[: int(rng.integers(1, len(pieces) + 1))]
    chosen = [block for it in order for block in pieces[it]]
    return dict(zip(chosen, range(half, half + len(chosen)), strict=True))


@pytest.mark.parametrize("direction", COPY_DIRECTIONS)
def test_what_is_explained_is_what_is_called(
    datadist: LlmDataDist, sim_log: Log, direction: CopyDirection
) -> None:
    native = device_of(datadist).native
    rng = np.random.default_rng(COPY_DIRECTIONS.index(direction))
    seen: Counter[str] = Counter()
    for number in range(40):
        tensors = int(rng.integers(1, 6))
        src, dst = (paged(datadist, it, tensors) for it in ENDS[direction])
        limits = [int(it) for it in rng.choice([0, 1, 1024, 1500, 2048, 4000, NO_LIMIT], 2)]
        tune_copies(native, direction, CopyTuning(*limits, 0))
        blocks = random_blocks(rng)
        target = src if direction == "device_to_device" else dst
        transfer = Transfer(Rows(src, list(blocks)), Rows(target, list(blocks.values())))
        plan = datadist.plan(transfer)
        assert plan.num_descriptors <= 128  # of more the kernel has a copy made of where they are
        said = {it.way: it.calls for it in table_of(datadist).moved(plan)}
        sim_log.restart()
        datadist.run(transfer)
        assert called(sim_log) == said, (number, limits, plan.explain())
        seen.update(said.keys())
        for it in (src, dst):
            datadist.deallocate_cache(it)
    assert seen.keys() == {"kernel", "batch", "single"}


def test_more_than_a_call_takes(datadist: LlmDataDist, sim_log: Log) -> None:
    """What is left after each call is looked at again; after single copies, after 64 of them."""
    blocks = 20_000
    src, dst = (
        datadist.allocate_blocks_cache(CacheDesc(1, (blocks, 32), DataType.DT_UINT8, placement))
        for placement in ENDS["host_to_device"]
    )
    last = [
        *range(0, 18_000, 2),
        *range(18_000, blocks),
    ]  # one of 2,000 blocks, behind 9,000 of one
    first = [*range(2_000), *range(2_001, blocks, 2)]  # and before 9,000
    native = device_of(datadist).native
    for some, tuning, expected in (
        (last, CopyTuning(NO_LIMIT, NO_LIMIT, 0), {"kernel": 2}),
        (last, CopyTuning(0, NO_LIMIT, 0), {"batch": 2}),
        (last, CopyTuning(0, 0, 0), {"single": 9001}),
        (last, CopyTuning(33, NO_LIMIT, 0), {"kernel": 1, "batch": 1}),
        (last, CopyTuning(33, 34, 0), {"kernel": 1, "single": 809}),
        (first, CopyTuning(33, 0, 0), {"kernel": 2, "single": 64}),
        (first, CopyTuning(0, 33, 0), {"batch": 2, "single": 64}),
    ):
        tune_copies(native, "host_to_device", tuning)
        transfer = Transfer(Rows(src, some), Rows(dst, some))
        plan = datadist.plan(transfer)
        assert plan.num_descriptors == 9001
        said = {it.way: it.calls for it in table_of(datadist).moved(plan)}
        assert said == expected
        sim_log.restart()
        datadist.run(transfer)
        columns = said.get("kernel", 0)  # a copy before each launch of more than 128
        found = Counter(called(sim_log)) - Counter({"single": columns})
        assert found == said


@pytest.mark.parametrize(
    ("blocks", "nbytes", "expected"),
    [(2, 65 << 20, {"single": 4}), (22, 3 << 20, {"batch": 1, "single": 1})],
)
def test_what_nothing_stops_goes_in_slices(
    datadist: LlmDataDist, sim_log: Log, blocks: int, nbytes: int, expected: dict[str, int]
) -> None:
    src, dst = (
        datadist.allocate_blocks_cache(CacheDesc(1, (2 * blocks, nbytes), DataType.DT_UINT8, it))
        for it in ENDS["host_to_device"]
    )
    every_other = range(0, 2 * blocks, 2)
    transfer = Transfer(Rows(src, every_other), Rows(dst, every_other))
    plan = datadist.plan(transfer)
    moved = table_of(datadist).moved(plan)
    assert {it.way: it.calls for it in moved} == expected
    assert sum(it.descriptors for it in moved) == plan.num_descriptors == blocks
    assert sum(it.nbytes for it in moved) == plan.nbytes
    sim_log.restart()
    datadist.run(transfer)
    assert called(sim_log) == expected


def test_the_same_table_as_in_c(cuda_simulator: CudaControls) -> None:
    assert {it: tuple(limits) for it, limits in BUILTIN.limits.items()} == {
        it: builtin_copy_tuning(it) for it in COPY_DIRECTIONS
    }
    device = CudaDevice(2)
    try:
        assert dict(device.copies.limits) == dict(BUILTIN.limits)
        rng = np.random.default_rng(1)
        for direction in COPY_DIRECTIONS:
            for _ in range(200):
                first, second, mean = (int(it) for it in 2 ** rng.uniform(0, 24, 3))
                count = int(rng.integers(1, 4))
                tune_copies(device.native, direction, CopyTuning(first, second, 0))
                assert device.copies.way(direction, mean, count) == copy_way(
                    device.native, direction, mean, count
                )
    finally:
        for direction in COPY_DIRECTIONS:
            tune_copies(device.native, direction, builtin_copy_tuning(direction))
        device.close()


class TestPlansOfAnEngine:
    """They say by themselves how its GPU copies."""

    def test_inside(self, datadist: LlmDataDist) -> None:
        gpu, host = (paged(datadist, it, 3) for it in ENDS["device_to_host"])
        name = device_of(datadist).name
        plans = (
            datadist.plan(Transfer(Rows(gpu, [0, 1]), Rows(host, [5, 7]))),
            kvplan.plan(Transfer(Rows(gpu, [0]), Rows(gpu, [5]))),
        )
        said = plans[0].explain().splitlines()
        line = (
            f"  on {name}: device to host: kernel, 1 launch (mean 1 KiB: one launch below 128 KiB, "
            "then a batch call below 4 MiB, then a copy each; built in)"
        )
        assert " ".join(it.strip() for it in said[4:6]) == line.strip()
        assert not any(" on " in it for it in plans[1].explain().splitlines())  # not an engine's
        again = type(plans[0]).from_dict(json.loads(json.dumps(plans[0].to_dict())))
        assert again == plans[0]
        assert pickle.loads(pickle.dumps(plans[0])) == plans[0]

    def test_within_host_memory(self, datadist: LlmDataDist) -> None:
        host = paged(datadist, Placement.HOST, 3)
        plan = datadist.plan(Transfer(Rows(host, [0]), Rows(host, [5])))
        assert name_of(datadist) not in plan.explain()

    @pytest.mark.parametrize("accelerator", ["cuda", "none"], ids=["gpu", "no gpu"])
    def test_between_processes(self, datadist: LlmDataDist, sim_log: Log, accelerator: str) -> None:
        """Over local this side's GPU copies, if the peer's memory is where it says."""
        with LlmDataDist(7, LlmRole.PROMPT) as other:
            other.initialize(
                Options(
                    accelerator=accelerator,
                    device_id=4 if accelerator == "cuda" else 0,
                    transport="local",
                    listen_ip_info="127.0.0.1:0",
                )
            )
            desc = CacheDesc(4, (BLOCKS, BLOCK), DataType.DT_UINT8)
            for it in (1, 2):
                other.allocate_blocks_cache(desc, BlocksCacheKey(7, it))
            datadist.link_clusters([ClusterInfo(7, other.listen_address)]).raise_for_status()
            mine = [datadist.allocate_blocks_cache(desc) for _ in range(2)]
            some = range(0, BLOCKS, 2)
            plan = datadist.plan(Transfer(Rows(BlocksCacheKey(7, 1), some), Rows(mine[0], some)))
            groups = {
                str(it): Transfer(Rows(BlocksCacheKey(7, it + 1), some), Rows(mine[it], some))
                for it in (0, 1)
            }
            both = datadist.plan(groups)
            line = f"on {name_of(datadist)}: device to device: kernel, 1 launch"
            assert (
                plan.explain().count(line) == both.explain().count(line) == (accelerator == "cuda")
            )
            sim_log.restart()
            datadist.pull_blocks(BlocksCacheKey(7, 1), mine[0], some, some)
            datadist.run(groups)
            expected = 2 if accelerator == "cuda" else 0
            assert sim_log.counts("cuLaunchKernel")["cuLaunchKernel"] == expected or not expected
            datadist.unlink_clusters([7]).raise_for_status()


def name_of(datadist: LlmDataDist) -> str:
    return device_of(datadist).name


def test_the_command_explains_by_what_was_stored(
    cuda_simulator: CudaControls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu, host = (CacheDesc(2, (8, BLOCK), DataType.DT_UINT8, it) for it in ENDS["device_to_host"])
    plan = kvplan.plan(Transfer(Rows(gpu, [0, 2, 4]), Rows(host, [0, 2, 4])), local="dst")
    path = tmp_path / "plan.json"
    plan.save(path)

    def explained(*more: str) -> Any:
        assert main(["explain", str(path), "-t", "cuda", "--json", *more]) == 0
        return json.loads(capsys.readouterr().out)

    builtin = explained()
    assert builtin["source"].startswith("built in")
    assert builtin["copies"]["ways"] == [
        {"way": "kernel", "calls": 1, "descriptors": 6, "nbytes": 6 * BLOCK}
    ]
    device = CudaDevice(2)
    try:
        cuda_copies.save(device, {it: CopyTuning(0, 0, 0) for it in COPY_DIRECTIONS})
        kind = cuda_copies.key_of(device)
    finally:
        device.close()
    assert [*stored_tables()] == [kind]
    found = explained()
    assert found["copies"]["device"] == kind
    assert [it["way"] for it in found["copies"]["ways"]] == ["single"]
    assert "single, 6 copies (mean 1 KiB: a copy each; measured by kvplan tune" in found["over"]
    assert explained("--builtin") == builtin
    assert main(["estimate", str(path), "-t", "cuda"]) == 2
    assert "no time was measured on a GPU" in capsys.readouterr().err
