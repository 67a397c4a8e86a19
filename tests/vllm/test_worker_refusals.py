"""Caches and options that a worker refuses, and caches that do not fit a producer's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.refusals import refused
from tests.vllm.test_worker import PROMPT
from tests.vllm.worker import BLOCKS, CpuTensor, VllmWorker


def test_a_cache_with_other_blocks_than_the_schedulers_is_refused() -> None:
    worker = VllmWorker("decode", produces=False)
    layers = {
        name: CpuTensor(np.zeros((BLOCKS + 1, 2, 32, 8), np.float32)) for name in worker.layers
    }
    with refused("LLM_PARAM_INVALID", "9 blocks of 32 tokens; the scheduler has 8 of 32"):
        worker.worker.register(layers)
    worker.worker.close()


def test_a_layer_without_a_tensor_is_refused() -> None:
    worker = VllmWorker("decode", produces=False)
    layers = {name: CpuTensor(array) for name, array in worker.layers.items()}
    absent, _ = layers.popitem()
    with refused("LLM_PARAM_INVALID", f"layer {absent} has no tensor"):
        worker.worker.register(layers)
    worker.worker.close()


def test_a_producer_that_listens_everywhere_needs_an_address() -> None:
    with refused("LLM_PARAM_INVALID", 'listen="0.0.0.0:0" stands for all addresses.*advertise'):
        VllmWorker("prefill", listen="0.0.0.0:0")
    engine = {"llm.ListenIpInfo": "127.0.0.1:0"}
    worker = VllmWorker("prefill", advertise="10.0.0.1:36000", engine=engine)
    assert worker.worker.address is not None
    assert worker.worker.address.address == "10.0.0.1:36000"
    worker.worker.close()


def test_push_needs_host_memory() -> None:
    worker = VllmWorker("prefill", mode="push")
    layer = CpuTensor(np.zeros((BLOCKS, 2, 32, 8), np.float32))
    layer.device = SimpleNamespace(type="cuda")
    with refused("LLM_PARAM_INVALID", "needs a cache in host memory.*on cuda"):
        worker.worker.register(dict.fromkeys(worker.layers, layer))
    worker.worker.close()


@pytest.mark.parametrize(
    ("mine", "theirs", "reason"),
    [
        ({"dim": 8}, {}, "head_bytes is '32' here and '16' there"),
        ({"latent": True}, {}, "kv_heads is '1' here and '2' there"),
        ({"layers": 4}, {}, "layers is '4' here and '2' there"),
        ({"model": "other"}, {}, "model is 'other' here and 'tiny' there"),
        ({"block_tokens": 64}, {}, "packing is 'vec, 64 tokens' here and 'vec, 32 tokens' there"),
        (
            {"latent": True, "windows": (32,), "block_tokens": 16},
            {"latent": True, "windows": (32,)},
            "attention is 'window of 32 tokens, blocks of 16' here and .*, blocks of 32' there",
        ),
        (  # equal windows and numbers of layers, but not the same layers
            {"windows": (32, 0), "first_layer": 10},
            {"windows": (32, 0)},
            "group 0 is 'layers 10.11, .*' here and 'layers 9.10, .*' there",
        ),
    ],
)
def test_a_cache_of_another_kind_does_not_fit(
    mine: dict[str, Any], theirs: dict[str, Any], reason: str
) -> None:
    prefill, decode = VllmWorker("prefill", **theirs), VllmWorker("decode", produces=False, **mine)
    tables = [[4, 2, 5], [6, 1, 3]][: len(mine.get("windows", (0,)))]
    params = prefill.finish("p1", PROMPT, *tables)
    decode.fetch(decode.request("d1", PROMPT, params), *tables)
    assert decode.worker.exchange.wait(60_000)
    (result,) = decode.worker.exchange.take_results()
    with refused("LLM_PARAM_INVALID", reason):
        raise result.error or AssertionError
    for worker in (decode, prefill):
        worker.worker.close()


@pytest.mark.parametrize("windows", [(32,), (32, 0)])
def test_windows_are_not_pushed_to(windows: tuple[int, ...]) -> None:
    with refused("LLM_PARAM_INVALID", 'mode="push" does not support layers with a sliding window'):
        VllmWorker("prefill", mode="push", windows=windows)
