"""Tests of the demo's caches on the simulated device: the model computes as with host memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from examples.disaggregated.device import SIMULATED, DeviceCache, runs, tensors_of
from kvplan import CacheDesc, DataType, LlmDataDist, LlmRole
from tests.ascend.simulator import Controls, Log
from tests.demo.test_demo import run
from tests.demo.tiny_llama import BLOCK_SIZE, CONFIG, empty_cache

PROMPT = "In which year did the clockmaker Ada Brandt of Uppsala finish her third clock, 1784?"
SHORT = ("--max-tokens=6", "--break-token=40")
NUM_BLOCKS = 8
DESC = CacheDesc(
    2 * CONFIG.layers,
    (NUM_BLOCKS, BLOCK_SIZE, CONFIG.kv_heads, CONFIG.head_size),
    DataType.DT_FLOAT16,
)


@pytest.mark.parametrize(
    ("table", "start", "end", "expected"),
    [
        ([0, 1, 2], 0, 12, [(0, 12, 0)]),
        ([0, 1, 2], 5, 6, [(0, 1, 5)]),
        ([6, 7, 2], 1, 11, [(0, 7, 25), (7, 10, 8)]),
        ([3, 2, 1], 3, 9, [(0, 1, 15), (1, 5, 8), (5, 6, 4)]),
    ],
)
def test_adjacent_tokens_are_one_run(
    table: list[int], start: int, end: int, expected: list[tuple[int, int, int]]
) -> None:
    found = [(run.first, run.last, run.row) for run in runs(np.array(table), 4, start, end)]
    assert found == expected


@pytest.fixture
def cache(simulator: Controls) -> Iterator[DeviceCache]:
    with LlmDataDist(1, LlmRole.MIX) as datadist:
        datadist.initialize({"kvplan.accelerator": "ascend"})
        cache = tensors_of(datadist, datadist.allocate_blocks_cache(DESC))
        assert isinstance(cache, DeviceCache)
        yield cache


def test_a_device_cache_gathers_the_same_rows_as_a_host_cache(cache: DeviceCache) -> None:
    here, table = empty_cache(NUM_BLOCKS, np.float16), np.array([6, 7, 1, 5])
    rng = np.random.default_rng(0)
    cache.fill(np.nan)
    for tensor in (0, 3):
        for start, end in ((0, 3), (3, 10), (10, 11)):
            rows = rng.normal(size=(end - start, CONFIG.kv_heads, CONFIG.head_size))
            for item in (here, cache):
                item.write(tensor, table, start, rows.astype(np.float32))
    for tensor in range(DESC.num_tensors):
        for length in (1, 4, 9, 11, 16):
            np.testing.assert_array_equal(
                cache.gather(tensor, table, length), here.gather(tensor, table, length)
            )


@pytest.mark.usefixtures("tiny_model")
def test_the_demo_between_two_devices(simulator: Controls, sim_log: Log, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(PROMPT)
    done = run("--device=simulated", f"--prompt={prompt}", *SHORT)
    assert (done.returncode, done.stderr) == (0, "")
    printed = re.findall(r"(prefill|decode): KV cache in memory of (device \d), (.*)", done.stdout)
    assert [item[:2] for item in sorted(printed)] == [
        ("decode", "device 1"),
        ("prefill", "device 0"),
    ]
    assert all("SIMULATED" in item[2] for item in printed)
    assert f"== {SIMULATED} ==" in done.stdout
    for how in ("pulled", "pushed", "pushed layer by layer", "gathered"):
        assert re.search(rf"IDENTICAL: all \d+ token ids .* was {how} ", done.stdout)
    assert done.stdout.count("CHANGED: from token") == 2
    counted = sim_log.counts("aclrtMemcpy", "HcclBatchPut", "HcclBatchGet")
    assert all(counted.values()), counted
