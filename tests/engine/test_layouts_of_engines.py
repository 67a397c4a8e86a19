"""Caches of vLLM, SGLang and LMCache, registered in place: any two of one model can be planned.

docs/how-to/layouts.md has the same table, with the versions of the engines. The oracle indexes the
tensors as their engine does, by NumPy, which also handles strides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvplan
from kvplan import CacheDesc, CacheLayout, DataType, Rows, Shard, Transfer
from kvplan.engine.memory import memory_of_tensors
from tests.support.refusals import refused

LAYERS, HEADS, DIM, LATENT, STATE, GROUPS = 2, 4, 8, 36, 21, 3
TOKENS = 9
"""Number of tokens of the request, not a multiple of any block size."""

Tensors = list[np.ndarray]


@dataclass(frozen=True)
class Kept:
    """The layout of an engine's cache.

    Attributes:
        make: Makes its tensors, full of zeros.
        layout: The axes of each tensor, as the engine indexes them.
        seen: Returns (row, token, head, dim) of one layer's keys (0) or values (1).
        block: Tokens of a row; 0 means that a row is the state of a request.
    """

    make: Callable[[], Tensors]
    layout: str
    seen: Callable[[Tensors, int, int], np.ndarray]
    block: int
    parts: int = 1
    data_type: DataType | None = None

    def described(self, tensors: Tensors) -> CacheDesc:
        return CacheDesc.from_tensors(
            tensors, self.layout, data_type=self.data_type, shard=Shard(num_layers=LAYERS)
        )


def each(*shape: int, count: int = LAYERS, dtype: Any = np.float16) -> Callable[[], Tensors]:
    return lambda: [np.zeros(shape, dtype) for _ in range(count)]


def turned(make: Callable[[], Tensors], *order: int) -> Callable[[], Tensors]:
    """Permute the tensors, as vLLM does for its layout HND."""
    return lambda: [item.transpose(order) for item in make()]


def reshaped(make: Callable[[], Tensors], *shape: int) -> Callable[[], Tensors]:
    return lambda: [item.reshape(shape) for item in make()]


GQA = {
    "vLLM FlashInfer": Kept(
        each(6, 2, 4, HEADS, DIM),
        "block kv token head dim",
        lambda t, layer, kv: t[layer][:, kv],
        4,
    ),
    "vLLM FlashInfer, HND": Kept(
        turned(each(6, 2, HEADS, 4, DIM), 0, 1, 3, 2, 4),
        "block kv token head dim",
        lambda t, layer, kv: t[layer][:, kv],
        4,
    ),
    "vLLM FlashAttention": Kept(
        each(2, 6, 2, HEADS, DIM),
        "kv block token head dim",
        lambda t, layer, kv: t[layer][kv],
        2,
    ),
    "vLLM FlashAttention, HND": Kept(
        turned(each(2, 6, HEADS, 2, DIM), 0, 1, 3, 2, 4),
        "kv block token head dim",
        lambda t, layer, kv: t[layer][kv],
        2,
    ),
    "vLLM Ascend": Kept(
        each(6, 4, HEADS, DIM, count=2 * LAYERS),
        "block token head dim",
        lambda t, layer, kv: t[2 * layer + kv],
        4,
    ),
    "vLLM cross-layer blocks": Kept(
        each(6, LAYERS, 2, 4, HEADS, DIM, count=1),
        "block layer kv token head dim",
        lambda t, layer, kv: t[0][:, layer, kv],
        4,
    ),
    "vLLM cross-layer blocks, HND": Kept(
        each(6, 2, HEADS, LAYERS, 4, DIM, count=1),
        "block kv head layer token dim",
        lambda t, layer, kv: t[0][:, kv, :, layer].swapaxes(1, 2),
        4,
    ),
    "SGLang": Kept(
        reshaped(each(16, HEADS, DIM, count=2 * LAYERS), -1, 1, HEADS, DIM),
        "block token head dim",
        lambda t, layer, kv: t[2 * layer + kv],
        1,
    ),
    "SGLang, pages": Kept(
        reshaped(each(16, HEADS, DIM, count=2 * LAYERS), -1, 4, HEADS, DIM),
        "block token head dim",
        lambda t, layer, kv: t[2 * layer + kv],
        4,
    ),
    "LMCache KV_2LTD": Kept(
        reshaped(each(3, 2, LAYERS, 8, HEADS * DIM, count=1), 3, 2, LAYERS, 8, HEADS, DIM),
        "block kv layer token head dim",
        lambda t, layer, kv: t[0][:, kv, layer],
        8,
    ),
    "LMCache KV_T2D": Kept(
        reshaped(each(3, 8, 2, HEADS * DIM), 3, 8, 2, HEADS, DIM),
        "block token kv head dim",
        lambda t, layer, kv: t[layer][:, :, kv],
        8,
    ),
}
GQA = {name: replace(kept, parts=2) for name, kept in GQA.items()}

FP8 = {
    f"{name}, fp8": replace(
        GQA[name],
        make=lambda make=GQA[name].make: [item.astype(np.uint8) for item in make()],
        data_type=DataType.DT_FLOAT8_E4M3FN,
    )
    for name in ("vLLM FlashInfer, HND", "SGLang")
}

MLA = {
    "vLLM MLA": Kept(
        each(6, 4, LATENT), "block token dim", lambda t, layer, _: t[layer][:, :, None], 4
    ),
    "vLLM MLA, cross-layer blocks": Kept(
        each(6, LAYERS, 4, LATENT, count=1),
        "block layer token dim",
        lambda t, layer, _: t[0][:, layer, :, None],
        4,
    ),
    "SGLang MLA": Kept(
        each(16, 1, LATENT), "block token dim", lambda t, layer, _: t[layer][:, :, None], 1
    ),
    "LMCache MLA": Kept(
        reshaped(each(3, 1, LAYERS, 8, LATENT, count=1), 3, LAYERS, 8, LATENT),
        "block layer token dim",
        lambda t, layer, _: t[0][:, layer, :, None],
        8,
    ),
}

SCALES = {
    "scales of heads, paged": Kept(
        each(6, 4, HEADS, dtype=np.float32),
        "block token head",
        lambda t, layer, _: t[layer][..., None],
        4,
    ),
    "scales of heads, by token": Kept(
        reshaped(each(16, HEADS, 1, dtype=np.float32), -1, 1, HEADS),
        "block token head",
        lambda t, layer, _: t[layer][..., None],
        1,
    ),
}

GROUP_SCALES = {
    f"scales of groups, blocks of {block}": Kept(
        each(16 // block, block, GROUPS, dtype=np.float32),
        "block token group",
        lambda t, layer, _: t[layer][:, :, None],
        block,
    )
    for block in (2, 4)
}

INDEXER = {
    "vLLM indexer": Kept(
        reshaped(each(6, 4, 132, dtype=np.uint8), 6, -1),
        "block state",
        lambda t, layer, _: t[layer][:, None, None],
        0,
    ),
}

MAMBA = {
    "vLLM Mamba": Kept(
        reshaped(each(6, 3, 7), 6, -1),
        "block state",
        lambda t, layer, _: t[layer][:, None, None],
        0,
    ),
    "SGLang Mamba": Kept(
        reshaped(each(LAYERS, 6, 3, 7, count=1), LAYERS, 6, -1),
        "layer block state",
        lambda t, layer, _: t[0][layer][:, None, None],
        0,
    ),
}

MODELS = [GQA, FP8, MLA, SCALES, GROUP_SCALES, INDEXER, MAMBA]
PAIRS = [
    pytest.param(model[src], model[dst], id=f"{src} to {dst}")
    for model in MODELS
    for src, dst in product(model, model)
]


def filled(kept: Kept, seed: int) -> Tensors:
    tensors = kept.make()
    random = np.random.default_rng(seed)
    for tensor in tensors:
        tensor[...] = random.integers(0, 127, tensor.shape)
    return tensors


def rows(kept: Kept, tensors: Tensors, seed: int) -> list[int]:
    """Return the blocks of the request, in an unusual order."""
    count = kept.seen(tensors, 0, 0).shape[0]
    needed = -(-TOKENS // kept.block) if kept.block else 3
    return np.random.default_rng(seed).permutation(count)[:needed].tolist()


def places(kept: Kept, blocks: list[int]) -> tuple[Any, Any]:
    """Return the row of each token of the request, and the token's number in the row."""
    if not kept.block:
        return blocks, 0
    token = np.arange(TOKENS)
    return [blocks[item // kept.block] for item in token], [item % kept.block for item in token]


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_caches_of_one_model_move_between_any_two_layouts(src: Kept, dst: Kept) -> None:
    source, target = filled(src, 1), filled(dst, 2)
    src_blocks, dst_blocks = rows(src, source, 3), rows(dst, target, 4)
    wanted = [item.copy(order="K") for item in target]
    for layer, kv in product(range(LAYERS), range(src.parts)):
        read = src.seen(source, layer, kv)[places(src, src_blocks)]
        dst.seen(wanted, layer, kv)[places(dst, dst_blocks)] = read
    src_desc, dst_desc = src.described(source), dst.described(target)
    plan = kvplan.plan(
        Transfer(
            Rows(src_desc, src_blocks),
            Rows(dst_desc, dst_blocks),
            num_tokens=TOKENS if src.block else None,
        ),
        local="dst",
    )
    kvplan.execute(
        plan,
        memory_of_tensors(src_desc, source, writable=None),
        memory_of_tensors(dst_desc, target, writable=None),
    )
    for found, expected in zip(target, wanted, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kept", [item for model in MODELS for item in model.values()])
def test_a_cache_is_registered_in_place(kept: Kept) -> None:
    tensors = kept.make()
    desc = kept.described(tensors)
    memory = memory_of_tensors(desc, tensors, writable=None)
    assert memory.addresses.tolist() == [tensor.ctypes.data for tensor in tensors]
    assert desc.nbytes == sum(tensor.nbytes for tensor in tensors)
    assert {*desc.layout.axes} == {*CacheLayout(kept.layout).axes}


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        (GQA["vLLM FlashInfer"], FP8["SGLang, fp8"], "differ in data type: .*DT_FLOAT16 .*E4M3FN"),
        (MLA["vLLM MLA"], GQA["SGLang"], "differ in axis (kv|head|dim)"),
        (MAMBA["vLLM Mamba"], MLA["vLLM MLA"], "differ in axis (dim|state)"),
        (
            INDEXER["vLLM indexer"],
            Kept(each(6, 8 * 132, dtype=np.uint8), "block state", lambda *_: np.zeros(0), 0),
            "differ in axis state",
        ),
        (
            MAMBA["vLLM Mamba"],
            Kept(each(6, 10), "block state", lambda *_: np.zeros(0), 0),
            "differ in axis state",
        ),
        (
            MLA["vLLM MLA"],
            Kept(each(6, 4, 32), "block token dim", lambda *_: np.zeros(0), 4),
            "differ in axis dim",
        ),
        (
            GROUP_SCALES["scales of groups, blocks of 4"],
            Kept(each(6, 4, 5, dtype=np.float32), "block token group", lambda *_: np.zeros(0), 4),
            "differ in axis group",
        ),
    ],
)
def test_a_mismatch_is_named(src: Kept, dst: Kept, message: str) -> None:
    source, target = src.described(src.make()), dst.described(dst.make())
    with refused("LLM_PARAM_INVALID", message):
        kvplan.plan(
            Transfer(Rows(source, [0]), Rows(target, [0]), num_tokens=1 if src.block else None),
            local="dst",
        )


def test_the_cookbook_has_every_layout() -> None:
    text = (Path(__file__).parents[2] / "docs/how-to/layouts.md").read_text()
    missing = {name for model in MODELS for name in model if f"| {name} |" not in text}
    assert missing == {
        f"scales of groups, blocks of {number}" for number in (2, 4)
    }  # one row in the table
