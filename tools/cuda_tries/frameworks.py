"""Tries with tensors of frameworks, where those are installed: torch and CuPy."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from kvplan import CacheDesc, Shard
from tools.cuda_tries.between import linked, tables
from tools.cuda_tries.inside import engine
from tools.cuda_tries.notes import Notes, SkippedError
from tools.cuda_tries.peer import key_of

EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF"
LAYERS = 4


def torch_on_gpu() -> Any:
    """Import torch, and return the module.

    Raises:
        SkippedError: it is not there, or has no GPU.
    """
    try:
        import torch
    except ImportError as error:
        raise SkippedError(f"torch is not installed: {error}") from error
    if not torch.cuda.is_available():
        raise SkippedError("torch finds no GPU")
    return torch


# As docs/how-to/layouts.md has them: what a framework allocates for a layer, and its axes.
BLOCKS, TOKENS, HEADS, DIM = 32, 16, 8, 128
LAYOUTS = {
    "block kv token head dim": (BLOCKS, 2, TOKENS, HEADS, DIM),
    "kv block token head dim": (2, BLOCKS, TOKENS, HEADS, DIM),
    "block head token dim": (BLOCKS, HEADS, TOKENS, 2 * DIM),
}


def try_torch(notes: Notes) -> None:
    """Register tensors in the layouts of vLLM and others, and pull between them."""
    torch = torch_on_gpu()
    notes.add("torch", "says", torch.__version__)
    model = Shard(num_layers=LAYERS, num_heads=HEADS)
    with engine() as datadist:
        for layout, shape in LAYOUTS.items():
            for dtype in (torch.float16, torch.bfloat16):
                tensors = [torch.randn(shape, device="cuda").to(dtype) for _ in range(LAYERS)]
                desc = CacheDesc.from_tensors(tensors, layout, shard=model)
                cache = datadist.register_blocks_cache(desc, tensors)
                before = [tensor.clone() for tensor in tensors]
                torch.cuda.synchronize()
                datadist.copy_blocks(cache, {0: [5], 7: [6]})
                axis = layout.split().index("block")
                good = all(
                    torch.equal(now.select(axis, to), then.select(axis, at))
                    for now, then in zip(tensors, before, strict=True)
                    for at, to in ((0, 5), (7, 6), (0, 0), (31, 31))
                )
                notes.expect(f"{layout}, {dtype}", good)
                datadist.unregister_cache(cache.cache_id)
    pull_into_torch(notes, torch)


def pull_into_torch(notes: Notes, torch: Any) -> None:
    """Pull into registered tensors of torch, which are offered to peers."""
    with linked(notes, "local") as (datadist, other):
        tensors = [
            torch.zeros(other.shape, dtype=torch.uint8, device="cuda") for _ in range(other.tensors)
        ]
        torch.cuda.synchronize()
        other.do("make", 1, "DEVICE", 1)
        cache = datadist.register_blocks_cache(CacheDesc.from_tensors(tensors, None), tensors)
        src, dst = tables(other.shape[0])
        datadist.pull_blocks(key_of("1"), cache, src, dst, timeout_ms=60_000)
        found = np.stack([tensor.cpu().numpy() for tensor in tensors])
        expected = np.zeros_like(found)
        expected[:, dst] = other.content(1)[:, src]
        notes.same("a peer's blocks in tensors of torch", found, expected)


def try_expandable_segments(notes: Notes) -> None:
    """Use expandable segments of torch in one process, and between processes as kvplan says."""
    os.environ[EXPANDABLE] = "expandable_segments:True"  # before torch allocates
    torch = torch_on_gpu()
    with engine() as datadist:
        tensors = [torch.ones((64, 32 << 10), dtype=torch.uint8, device="cuda") for _ in range(4)]
        torch.cuda.synchronize()
        desc = CacheDesc.from_tensors(tensors, None)
        cache = datadist.register_blocks_cache(desc, tensors)
        datadist.write_cache(cache, [np.full(desc.shape, index, np.uint8) for index in range(4)])
        good = all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))
        notes.expect("used inside the process", good)
    pull_into_torch(notes, torch)


def try_cupy(notes: Notes) -> None:
    """Register and pull arrays of CuPy, by DLPack."""
    try:
        import cupy
    except ImportError as error:
        raise SkippedError(f"cupy is not installed: {error}") from error
    with engine() as datadist:
        arrays = [cupy.zeros((64, 4096), cupy.float16) for _ in range(2)]
        cupy.cuda.Device().synchronize()
        desc = CacheDesc.from_tensors(arrays, None)
        cache = datadist.register_blocks_cache(desc, arrays)
        given = [
            np.random.default_rng(number).random((64, 4096)).astype(np.float16) for number in (1, 2)
        ]
        datadist.write_cache(cache, given)
        good = all(np.array_equal(a.get(), b) for a, b in zip(arrays, given, strict=True))
        notes.expect("registered and written", good)
