"""A prefilling worker in another process, a decoding one here, on caches as vLLM has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support import peer
from tests.support.refusals import refused
from tests.vllm.worker import BLOCKS, CpuTensor, VllmWorker

PROMPT = list(range(1000, 1070))  # 70 tokens: blocks of 32, 32 and 6


class Peer(peer.Peer):
    """What it runs can use its `worker`, the prefilling one."""

    module = "tests.vllm.peer_process"


@pytest.fixture
def prefill() -> Iterator[Peer]:
    it = Peer()
    yield it
    it.close()


@pytest.fixture
def decode() -> Iterator[VllmWorker]:
    worker = VllmWorker("decode", produces=False)
    yield worker
    worker.worker.close()


def start(prefill: Peer, blocks: list[int], **options: Any) -> dict[str, Any]:
    """Let it compute a prompt: each block has content of its own, anywhere else is 0."""
    return dict(
        prefill.run(
            """
            worker = VllmWorker("prefill", **options)
            for layer in (9, 10):
                for at, block in enumerate(blocks):
                    of_one = worker.packed(layer)[block]
                    of_one[:] = 1000 * layer + 100 * at + 10 * np.arange(2)[:, None, None]
                    of_one += np.arange(2)[None, :, None]
            result = worker.finish("p1", prompt, blocks)
            """,
            blocks=blocks,
            prompt=PROMPT,
            options=options,
        )
    )


def content(layer: int, position: int) -> list[list[int]]:
    """Of keys and values, of each head."""
    base = 1000 * layer + 100 * position
    return [[base, base + 1], [base + 10, base + 11]]


def test_blocks_arrive_whole(prefill: Peer, decode: VllmWorker) -> None:
    params = start(prefill, [6, 1, 3])
    decode.fetch(decode.request("d1", PROMPT, params), [2, 4, 0])
    assert decode.results() == (set(), {"d1"}, set())
    for layer in (9, 10):
        packed = decode.packed(layer)
        for at, block in enumerate((2, 4, 0)):
            assert packed[block].min(axis=-1).tolist() == content(layer, at)
            assert packed[block].max(axis=-1).tolist() == content(layer, at)
        assert not packed[[1, 3, 5, 6, 7]].any()
    assert prefill.run("result = worker.results()") == ({"p1"}, set(), set())


def test_what_the_prefix_cache_has_is_not_touched(prefill: Peer, decode: VllmWorker) -> None:
    params = start(prefill, [6, 1, 3])
    decode.packed(9)[2] = 5
    decode.fetch(decode.request("d1", PROMPT, params), [2, 4, 0], computed=32)
    assert decode.results() == (set(), {"d1"}, set())
    assert np.all(decode.packed(9)[2] == 5)
    assert decode.packed(9)[4, 0, 0, 0] == content(9, 1)[0][0]


def test_the_blocks_of_a_request_that_fails_are_named(prefill: Peer, decode: VllmWorker) -> None:
    params = start(prefill, [6, 1, 3])
    decode.fetch(decode.request("d1", PROMPT, params), [2, 4, 0])
    assert decode.results() == (set(), {"d1"}, set())
    decode.fetch(decode.request("d2", PROMPT, params), [2, 5, 7], computed=32)
    assert decode.results() == (set(), {"d2"}, {5, 7})


def test_both_sides_count(prefill: Peer, decode: VllmWorker) -> None:
    params = start(prefill, [6, 1, 3])
    decode.fetch(decode.request("d1", PROMPT, params), [2, 4, 0], computed=32)
    decode.results()
    decode.fetch(decode.request("d2", PROMPT, params), [2, 5, 7])
    decode.results()
    data = decode.worker.take_figures().data
    assert (data["tokens"], data["failed"]) == ([38], {"kv_cache_not_exist": 1})
    assert data["nbytes"] == [2 * 2 * 2 * 2 * 32 * 4 * 4]  # blocks, layers, heads, keys and values
    assert decode.worker.take_figures().is_empty
    prefill.run("result = worker.results()")
    data = prefill.run("result = worker.worker.take_figures().data")
    assert (data["offered"], data["freed"], data["expired"]) == (1, 1, 0)


def test_an_idle_step_waits_for_what_is_fetched(prefill: Peer, decode: VllmWorker) -> None:
    params = start(prefill, [6, 1, 3])
    decode.fetch(decode.request("d1", PROMPT, params), [2, 4, 0])
    while not (results := decode.worker.results(idle=True)).received:
        pass
    assert (results.received, results.failed_blocks) == ({"d1"}, set())
    assert not decode.worker.exchange.is_fetching
    assert not decode.worker.results(idle=True).received


def test_an_offer_does_not_wait_for_the_computation_of_its_step(
    prefill: Peer, decode: VllmWorker
) -> None:
    params = prefill.run(
        """
        worker = VllmWorker("prefill")
        request = worker.request("p1", prompt, {"do_remote_decode": True})
        _, result = worker.scheduler.finished(request, [6, 1, 3])
        worker.worker.prepare(worker.scheduler.take_step())
        """,
        prompt=PROMPT,
    )
    decode.fetch(decode.request("d1", PROMPT, params), [2, 4, 0])
    assert decode.results() == (set(), {"d1"}, set())


def test_a_request_of_other_tokens_fails(prefill: Peer, decode: VllmWorker) -> None:
    params = start(prefill, [6, 1, 3])
    decode.fetch(decode.request("d1", PROMPT[::-1], params), [2, 4, 0])
    assert decode.results() == (set(), {"d1"}, {2, 4, 0})
    assert not decode.packed(9).any()


def test_blocks_of_another_size_are_in_another_order(prefill: Peer, decode: VllmWorker) -> None:
    params = start(prefill, [6, 1], block_tokens=64)
    decode.fetch(decode.request("d1", PROMPT, params), [2, 4, 0])
    assert decode.results() == (set(), {"d1"}, {2, 4, 0})
    assert not decode.packed(9).any()


def test_a_cache_of_other_blocks_than_the_scheduler_has_is_refused() -> None:
    it = VllmWorker("decode", produces=False)
    layers = {"layers.0": CpuTensor(np.zeros((BLOCKS + 1, 2, 32, 8), np.float32))}
    with refused("LLM_PARAM_INVALID", "9 blocks of 32 tokens; the scheduler has 8 of 32"):
        it.worker.register(layers)
    it.worker.close()


def test_a_cache_of_no_such_tensors_is_refused(decode: VllmWorker) -> None:
    with refused("LLM_PARAM_INVALID", "must have tensors of 4 dimensions"):
        decode.worker.register({"layers.0": CpuTensor(np.zeros((8, 64), np.float32))})
