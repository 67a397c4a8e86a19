"""Tests of pushes while the prompt is computed: each chunk sends the blocks that it completes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from examples.disaggregated import generation
from examples.disaggregated.by_layer import pushed_by_layer
from examples.disaggregated.messages import DECODE_CLUSTER, PREFILL_CLUSTER, PushTarget
from examples.disaggregated.prefill import cache_desc
from kvplan import Cache, ClusterInfo, LlmDataDist, LlmRole
from tests.demo.tiny_llama import BLOCK_SIZE, CONFIG, VOCABULARY, TinyLlama

PROMPT = np.random.default_rng(7).integers(0, VOCABULARY, 22).tolist()
HERE, THERE = np.array([9, 2, 3, 11, 0, 7]), [5, 19, 1, 2, 8, 4]


@pytest.fixture
def engines() -> Iterator[tuple[LlmDataDist, LlmDataDist]]:
    prefill = LlmDataDist(PREFILL_CLUSTER, LlmRole.PROMPT)
    decode = LlmDataDist(DECODE_CLUSTER, LlmRole.DECODER)
    with prefill, decode:
        prefill.initialize()
        decode.initialize({"llm.ListenIpInfo": "127.0.0.1:0"})
        prefill.link_clusters([ClusterInfo(DECODE_CLUSTER, decode.listen_address)])
        yield prefill, decode


def paged_cache(datadist: LlmDataDist, num_blocks: int) -> Cache:
    cache = datadist.allocate_blocks_cache(cache_desc(CONFIG, num_blocks, BLOCK_SIZE))
    for tensor in datadist.arrays(cache):
        tensor.fill(np.nan)
    return cache


@pytest.mark.parametrize(
    ("chunk", "blocks_of_chunks"),
    [(8, [2, 2, 2]), (6, [1, 2, 1, 2]), (3, [1, 1, 1, 1, 1, 1]), (64, [6])],
)
def test_every_block_is_pushed_once_it_is_complete(
    engines: tuple[LlmDataDist, LlmDataDist],
    chunk: int,
    blocks_of_chunks: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefill, decode = engines
    monkeypatch.setattr(generation, "CHUNK", chunk)
    source, target = paged_cache(prefill, 12), paged_cache(decode, 20)
    order = []
    prefill.on_plan(lambda event: order.append(event.plan))

    moved = pushed_by_layer(
        prefill,
        source,
        HERE,
        PushTarget(target.cache_id, THERE, by_layer=True),
        TinyLlama(seed=3).model,
        PROMPT,
        progress=order.append,
    )
    assert len(moved.plans) == len(blocks_of_chunks)
    for plan, blocks in zip(moved.plans, blocks_of_chunks, strict=True):
        assert f"L0-{CONFIG.layers - 1} x {blocks} block" in plan
    assert repr(order[-2]) == moved.plans[-1], "the last task began before the last chunk was done"
    assert order[-1] == f"prompt: {len(PROMPT)} of {len(PROMPT)} tokens"

    for ours, theirs in zip(prefill.arrays(source), decode.arrays(target), strict=True):
        np.testing.assert_array_equal(theirs[THERE], ours[HERE])
        assert np.isfinite(ours[HERE].reshape(-1, *ours.shape[2:])[: len(PROMPT)]).all()
        assert np.isnan(np.delete(theirs, THERE, axis=0)).all()
