"""A prefilling worker in another process and a decoding one here, with caches as in vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvplan.serving import Place
from tests.support import peer
from tests.support.held import QUEUE, Held
from tests.support.refusals import refused
from tests.vllm.worker import BLOCKS, CpuTensor, VllmWorker

PROMPT = list(range(1000, 1070))  # 70 tokens: blocks of 32, 32 and 6


class Peer(peer.Peer):
    """A process whose snippets can use its `worker`, the prefilling one."""

    module = "tests.vllm.peer_process"


@pytest.fixture
def prefill() -> Iterator[Peer]:
    item = Peer()
    yield item
    item.close()


@pytest.fixture
def decode() -> Iterator[VllmWorker]:
    worker = VllmWorker("decode", produces=False)
    yield worker
    worker.worker.close()


def start(prefill: Peer, blocks: list[int], **options: Any) -> dict[str, Any]:
    """Let the peer compute a prompt: each of its blocks has different content, all others are 0."""
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
    """Return the content of keys and values, for each head."""
    base = 1000 * layer + 100 * position
    return [[base, base + 1], [base + 10, base + 11]]


def test_blocks_arrive_whole(prefill: Peer, decode: VllmWorker) -> None:
    params = start(prefill, [6, 1, 3])
    decode.fetch(decode.request("d1", PROMPT, params), [2, 4, 0])
    assert decode.results() == (set(), {"d1"}, set())
    for layer in (9, 10):
        packed = decode.packed(layer)
        for number, block in enumerate((2, 4, 0)):
            assert packed[block].min(axis=-1).tolist() == content(layer, number)
            assert packed[block].max(axis=-1).tolist() == content(layer, number)
        assert not packed[[1, 3, 5, 6, 7]].any()
    assert prefill.run("result = worker.results()") == ({"p1"}, set(), set())


def test_blocks_of_the_prefix_cache_are_not_touched(prefill: Peer, decode: VllmWorker) -> None:
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
    assert prefill.run("result = worker.results()") == ({"p1"}, set(), set())  # its blocks are free
    decode.fetch(decode.request("d2", PROMPT, params), [2, 5, 7], computed=32)
    assert decode.results() == (set(), {"d2"}, {5, 7})
    decode.fetch(decode.request("d3", PROMPT, params), [2, 5, 7], computed=40)
    assert decode.results() == (set(), {"d3"}, {5, 7})  # only a part of block 5 was missing


@pytest.mark.parametrize("expected", [True, False])
def test_the_next_request_of_a_name_is_fetched(
    prefill: Peer, decode: VllmWorker, expected: bool
) -> None:
    """The first request of the name is aborted before it has blocks, in the step of the second."""
    first = decode.request("d1", PROMPT, start(prefill, [6, 1, 3]))
    offered = prefill.run("result = worker.finish('p2', prompt, [2, 4, 5])", prompt=PROMPT)
    again = decode.request("d1", PROMPT, offered)
    decode.scheduler.arrived(first)
    if expected:
        decode.step()
    decode.scheduler.finished(first, ([],))
    decode.scheduler.arrived(again)
    decode.step()
    assert prefill.run("result = worker.results()") == ({"p1"}, set(), set())
    decode.scheduler.allocated(again, ([2, 4, 0],), len(PROMPT))
    decode.step()
    assert decode.results() == (set(), {"d1"}, set())
    assert prefill.run("result = worker.results()") == ({"p2"}, set(), set())


def test_a_request_that_arrives_and_is_aborted_in_one_step_is_only_dropped(
    prefill: Peer, decode: VllmWorker
) -> None:
    aborted = decode.request("d1", PROMPT, start(prefill, [6, 1, 3]))
    decode.scheduler.arrived(aborted)
    decode.scheduler.finished(aborted, ([],))
    decode.step()
    assert prefill.run("result = worker.results()") == ({"p1"}, set(), set())
    assert not decode.worker.exchange.is_fetching


def test_both_sides_count(prefill: Peer, decode: VllmWorker) -> None:
    params = start(prefill, [6, 1, 3])
    decode.fetch(decode.request("d1", PROMPT, params), [2, 4, 0], computed=32)
    decode.results()
    prefill.run("result = worker.results()")  # the blocks are free
    decode.fetch(decode.request("d2", PROMPT, params), [2, 5, 7])
    decode.results()
    data = decode.worker.take_figures().data
    assert (data["tokens"], data["failed"]) == ([38], {"kv_cache_not_exist": 1})
    assert data["nbytes"] == [2 * 2 * 2 * 2 * 32 * 4 * 4]  # blocks, layers, heads, keys and values
    assert decode.worker.take_figures().is_empty
    data = prefill.run("result = worker.worker.take_figures().data")
    assert (data["offered"], data["freed"], data["expired"]) == (1, 1, 0)


def test_a_request_that_expires_is_counted_once(decode: VllmWorker) -> None:
    counted = []
    for expired in (2, 2, 3, 3):
        decode.worker.exchange.book.expired = expired
        decode.worker.results()
        counted.append(decode.worker.take_figures().data["expired"])
    assert counted == [2, 0, 1, 0]


def test_an_idle_step_waits_for_fetched_requests(prefill: Peer, decode: VllmWorker) -> None:
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
        _, result = worker.scheduler.finished(request, ([6, 1, 3],))
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


def test_a_worker_that_is_closed_has_no_cache_and_no_address() -> None:
    worker = VllmWorker("prefill")
    exchange = worker.worker.exchange
    for _ in range(2):
        worker.worker.close()
    assert worker.worker.address is None
    assert not exchange._thread.is_alive()
    with refused("LLM_FAILED", "the connector has no cache"):
        _ = worker.worker.exchange


def test_a_cache_that_the_engine_refuses_leaves_no_engine() -> None:
    """The engine has the cache of the first group by then, and listens. The error is kept."""
    worker = VllmWorker("prefill", windows=(0, 64))
    worker.worker.close()  # first, for objects that this process keeps in any case
    layers = {name: CpuTensor(array) for name, array in worker.layers.items()}
    layers["model.layers.11.attn"] = layers["model.layers.12.attn"]
    before = Held.now()
    with refused("LLM_PARAM_INVALID", "shares memory with") as error:
        worker.worker.register(layers)
    assert {what for _, what in before.new().descriptors} <= QUEUE
    before.check_new_threads(set())
    assert error.value.__traceback__ is not None
    assert worker.worker.address is None


def test_a_worker_names_the_layers_of_its_stage() -> None:
    worker = VllmWorker("prefill", place=Place(0, 1, 1, ((0, 2), (2, 4))))
    assert worker.worker.address is not None
    assert worker.worker.address.layers == (2, 4)
    worker.worker.close()
    with refused("LLM_PARAM_INVALID", "the cache has 2 layers; stage 0 has 3"):
        VllmWorker("prefill", place=Place(stages=((0, 3), (3, 4))))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_is_fetched_from_a_worker_of_all_layers(prefill: Peer, stage: int) -> None:
    """A consumer has four layers in two stages; the producer has them in one."""
    decode = VllmWorker("decode", produces=False, place=Place(0, 1, stage, ((0, 2), (2, 4))))
    params = prefill.run(
        """
        whole = VllmWorker("prefill", layers=4)
        for layer in range(9, 13):
            whole.packed(layer)[:] = layer
        result = whole.finish("p1", prompt, [6, 1, 3])
        """,
        prompt=PROMPT,
    )
    decode.fetch(decode.request("d1", PROMPT, params), [2, 4, 0])
    assert decode.results() == (set(), {"d1"}, set())
    for layer in (9, 10):
        assert np.all(decode.packed(layer)[[2, 4, 0]] == layer + 2 * stage)
    decode.worker.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_mla_is_fetched_whole_by_each_worker(prefill: Peer, rank: int) -> None:
    """Tokens of MLA are contiguous, so block sizes may differ.

    Each of two workers reads one source.
    """
    decode = VllmWorker(
        "decode", produces=False, latent=True, block_tokens=16, place=Place(rank, 2)
    )
    params = prefill.run(
        """
        from kvplan.serving import Place
        workers = [VllmWorker("prefill", latent=True, place=Place(rank, 2)) for rank in (0, 1)]
        for rank, worker in enumerate(workers):
            for layer, array in enumerate(worker.layers.values()):
                array[[6, 1, 3]] = np.arange(384).reshape(3, 32, 4) + 1000 * layer + 10_000 * rank
        addresses = {(0, rank): worker.worker.address for rank, worker in enumerate(workers)}
        workers[0].scheduler.set_workers(addresses)
        request = workers[0].request("p1", prompt, {"do_remote_decode": True})
        _, result = workers[0].scheduler.finished(request, ([6, 1, 3],))
        step = workers[0].scheduler.take_step()
        for worker in workers:
            worker.worker.prepare(step)
        """,
        prompt=PROMPT,
    )
    decode.fetch(decode.request("d1", PROMPT, params), [2, 4, 0, 5, 7])
    assert decode.results() == (set(), {"d1"}, set())
    for layer, array in enumerate(decode.layers.values()):
        found = array[[2, 4, 0, 5, 7]].reshape(80, 4)[:70]
        assert np.all(found == np.arange(280).reshape(70, 4) + 1000 * layer + 10_000 * rank)
    decode.worker.close()


def test_a_cache_of_other_tensors_is_refused(decode: VllmWorker) -> None:
    with refused("LLM_PARAM_INVALID", "must have tensors of 4 or 3 dimensions"):
        decode.worker.register(
            {name: CpuTensor(np.zeros((8, 64), np.float32)) for name in decode.layers}
        )


def pushing(prefill: Peer, decode: VllmWorker, computed: int = 0) -> Any:
    """Let the decoding worker wait for a prompt that is being computed, and return its request."""
    by_number = start(prefill, [6, 1, 3], mode="push")["kvplan"]
    theirs = {key: by_number[key] for key in ("protocol", "instance", "sources")}
    params = {"do_remote_prefill": True, "kvplan": theirs | {"transfer": "cmpl-2"}}
    arrived = decode.request("d1", PROMPT, params)
    decode.fetch(arrived, [2, 4, 0], computed=computed)
    prefill.run(
        """
        import select
        while not worker.worker.exchange._asks.waiting:
            select.select([], [], [], 0.001)
        params = {"do_remote_decode": True, "kvplan": {"transfer": "cmpl-2"}}
        request = worker.request("p2", prompt, params)
        request.num_computed_tokens = 0
        worker.scheduler.arrived(request)

        def step(tokens, layers):
            worker.scheduler.computing({"p2": tokens}, {"p2": [5, 0, 7]}.get)
            worker.worker.prepare(worker.scheduler.take_step())
            for layer in layers:
                worker.packed(layer)[[5, 0, 7]] = layer
                worker.worker.layer_ready(f"model.layers.{layer}.attn")
                worker.worker.layer_ready("model.layers.11.attn")  # it shares those of another

        def finish():
            worker.worker.computed()
            request.num_computed_tokens = 70
            worker.scheduler.finished(request, ([5, 0, 7],))
            worker.worker.prepare(worker.scheduler.take_step())
        """,
        prompt=PROMPT,
    )
    return arrived


@pytest.mark.parametrize("reported", ["9, 10", "9", ""])
def test_with_push_each_layer_moves_when_it_is_computed(prefill: Peer, reported: str) -> None:
    """Each layer moves with its step at the latest: vLLM need not report each layer."""
    decode = VllmWorker("decode", produces=False, mode="push")
    pushing(prefill, decode)
    prefill.run("for layer in (9, 10): worker.packed(layer)[[5, 0, 7]] = layer")
    prefill.run(f"step(70, [{reported}]); finish()")
    assert decode.worker.exchange.wait(60_000)
    (result,) = decode.worker.exchange.take_results()
    assert (result.error, result.pushed) == (None, 70)
    for layer in (9, 10):
        assert np.all(decode.packed(layer)[[2, 4, 0]] == layer)
        assert not decode.packed(layer)[[1, 3, 5, 6, 7]].any()
    decode.worker.close()


def test_a_request_that_its_producer_aborts_is_not_waited_for(prefill: Peer) -> None:
    decode = VllmWorker("decode", produces=False, mode="push")
    pushing(prefill, decode)
    prefill.run(
        """
        request.status.name = "FINISHED_ABORTED"
        worker.scheduler.finished(request, ([5, 0, 7],))
        worker.worker.prepare(worker.scheduler.take_step())
        """
    )
    assert decode.worker.exchange.wait(60_000)
    (result,) = decode.worker.exchange.take_results()
    assert "cmpl-2 was not finished by its producer" in str(result.error)
    decode.worker.close()


def test_blocks_of_a_preempted_request_are_not_read_any_more(prefill: Peer) -> None:
    """The next step computes nothing else; the push still waits for a layer."""
    decode = VllmWorker("decode", produces=False, mode="push")
    pushing(prefill, decode)
    ended = prefill.run(
        """
        step(70, [9])
        tasks = list(worker.worker.exchange._pusher._step)
        worker.scheduler.preempted(["p2"])
        worker.worker.prepare(worker.scheduler.take_step())
        result = [task.done for task in tasks]
        """
    )
    assert ended == [True]
    prefill.run("step(70, [9, 10]); finish()")
    assert decode.results() == (set(), {"d1"}, set())
    for layer in (9, 10):
        assert np.all(decode.packed(layer)[[2, 4, 0]] == layer)
    decode.worker.close()


@pytest.mark.parametrize(
    ("code", "failed"), [("step(70, [9])", {4, 0}), ("step(64, [9, 10])", {0})]
)
def test_a_producer_that_dies_in_the_middle_costs_one_computation(
    prefill: Peer, code: str, failed: set[int]
) -> None:
    """Between two layers, or before the rest is pulled, missing blocks are named exactly once."""
    decode = VllmWorker("decode", produces=False, mode="push")
    assert decode.worker._engine is not None
    finished = Event()
    decode.worker._engine.on_plan(lambda _: finished.wait(60) and prefill.kill())
    decode.packed(9)[2] = 5  # of the prefix cache
    arrived = pushing(prefill, decode, computed=32)
    prefill.run(code)
    if failed == {0}:
        prefill.run("finish()")
        finished.set()
    else:
        prefill.kill()
    assert decode.results() == (set(), {"d1"}, failed)  # long before prefill_timeout_ms
    assert np.all(decode.packed(9)[2] == 5)
    assert decode.scheduler.missing_tokens(arrived, 32) == 0  # this engine computes it
    assert decode.worker.exchange._engine.leases() == []
    decode.worker.close()


def test_the_engine_has_the_device_of_the_cache() -> None:
    worker = VllmWorker("prefill", engine={"kvplan.accelerator": "none", "llm.DeviceId": "1"})
    layers = {name: CpuTensor(np.zeros((BLOCKS, 2, 32, 8), np.float32)) for name in worker.layers}
    for layer in layers.values():
        layer.device = SimpleNamespace(type="cuda", index=5)
    worker.worker.register(layers)
    assert worker.worker._engine is not None
    assert worker.worker._engine._running().options.device_id == 5
    worker.worker.close()


def test_the_tokens_of_a_window_are_fetched(prefill: Peer) -> None:
    """The first 32 of 70 tokens have left the window, and vLLM has taken back their block."""
    decode = VllmWorker("decode", produces=False, windows=(32, 0))
    params = prefill.run(
        """
        worker = VllmWorker("prefill", windows=(32, 0))
        for layer in (9, 10):
            for block in range(8):
                worker.packed(layer)[block] = 10 * block + layer
        result = worker.finish("p1", prompt, [0, 4, 2], [6, 1, 3])
        """,
        prompt=PROMPT,
    )
    for layer in (9, 10):
        decode.packed(layer)[7] = 5  # of the prefix cache, in the second group
    decode.fetch(decode.request("d1", PROMPT, params), [0, 3, 1], [7, 4, 2], computed=32)
    assert decode.results() == (set(), {"d1"}, set())
    for layer in (9, 10):
        packed = decode.packed(layer)
        for mine, theirs in {3: 4, 1: 2, 4: 1, 2: 3}.items():
            assert np.all(packed[mine] == 10 * theirs + layer)
        assert np.all(packed[7] == 5)
        assert not packed[[0, 5, 6]].any()
    assert prefill.run("result = worker.results()") == ({"p1"}, set(), set())
    decode.fetch(decode.request("d2", PROMPT, params), [0, 3, 1], [5, 4, 2])
    # vLLM cannot find a request by its blocks here
    assert decode.results() == (set(), {"d2"}, {"d2"})
    decode.worker.close()


@pytest.mark.parametrize(
    ("theirs", "mine"), [((32, 0), (64, 0)), ((32, 0), (0,)), ((0,), (32,)), ((0, 32), (32, 0))]
)
def test_other_windows_do_not_fit(
    prefill: Peer, theirs: tuple[int, ...], mine: tuple[int, ...]
) -> None:
    decode = VllmWorker("decode", produces=False, windows=mine)
    params = prefill.run(
        """
        worker = VllmWorker("prefill", windows=windows)
        result = worker.finish("p1", prompt, *tables)
        """,
        prompt=PROMPT,
        windows=theirs,
        tables=[[4, 2, 5], [6, 1, 3]][: len(theirs)],
    )
    decode.fetch(decode.request("d1", PROMPT, params), *[[3, 1, 5], [7, 4, 2]][: len(mine)])
    _, received, failed = decode.results()
    assert received == {"d1"}
    assert failed
    assert not decode.packed(9).any()
    decode.worker.close()
