"""Manifests of weights for tests, written by hand as Mooncake's `weight_placement_to_json` does."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

SPLIT = {
    "embed.weight": ((64, 8), 0),
    "layers.0.qkv.weight": ((48, 8), 0),
    "layers.0.out.weight": ((8, 32), 1),
    "layers.0.norm.weight": ((8,), None),
    "layers.1.qkv.weight": ((48, 8), 0),
    "layers.1.out.weight": ((8, 32), 1),
    "layers.1.experts.weight": ((4, 16, 8), 1),
}
"""A model of two layers: shapes, and the dimension that tensor parallelism splits."""


def rank(tp: int = 0, pp: int = 0, dp: int = 0) -> dict[str, int]:
    return {"dp": dp, "tp": tp, "pp": pp, "ep": 0}


def name_of(tp: int, pp: int, dp: int) -> str:
    return f"d{dp}-p{pp}-t{tp}"


def tensor(name: str, shape: tuple[int, ...], dim: int | None) -> dict[str, Any]:
    axis = {"semantics": "replicated", "kind": "tp"}
    return {
        "tensor_id": name,
        "global_shape": [*shape],
        "dtype": "float32",
        "itemsize": 4,
        "shard_dims": [] if dim is None else [dim],
        "layout_fingerprint": "contiguous",
        "parallel_axes": [
            axis if dim is None else {"semantics": "split", "kind": "tp", "dim": dim},
            {"semantics": "ownership", "kind": "pp"},
        ],
        "layer_id": int(name.split(".")[1]) if name.startswith("layers") else None,
        "expert_id": None,
    }


def fragment(
    name: str, offset: tuple[int, ...], shape: tuple[int, ...], its_rank: dict[str, int]
) -> dict[str, Any]:
    return {
        "placement_fragment_id": f"{name}@{offset}{its_rank}",
        "tensor_id": name,
        "global_offset": [*offset],
        "local_shape": [*shape],
        "nbytes": prod(shape) * 4,
        "rank": its_rank,
        "aliases": [],
    }


def manifest(
    tp: int,
    pp: int = 1,
    dp: int = 1,
    split: dict[str, tuple[tuple[int, ...], int | None]] = SPLIT,
) -> dict[str, Any]:
    """Return a placement of `split` on tp x pp x dp ranks; stage i has every pp-th layer from i."""
    parts = []
    for d, p, t in np.ndindex(dp, pp, tp):
        its = rank(t, p, d)
        fragments = []
        for name, (shape, dim) in split.items():
            layer = int(name.split(".")[1]) if name.startswith("layers") else 0
            if layer % pp != p:
                continue
            offset, local = [0] * len(shape), [*shape]
            if dim is not None:
                local[dim] //= tp
                offset[dim] = t * local[dim]
            fragments.append(fragment(name, tuple(offset), tuple(local), its))
        parts.append(
            {"participant_id": name_of(t, p, d), "rank": its, "fragments": fragments},
        )
    return {
        "resource_kind": "model_weight",
        "resource_id": "model",
        "revision": "main",
        "weight_generation": 1,
        "placement_set_id": "set",
        "placement_id": f"tp{tp}pp{pp}dp{dp}",
        "topology": {
            "tp_size": tp,
            "pp_size": pp,
            "ep_size": 1,
            "dp_size": dp,
            "topology_id": f"tp{tp}pp{pp}dp{dp}",
            "participants": [
                {name: part[name] for name in ("participant_id", "rank")} for part in parts
            ],
        },
        "tensors": [tensor(name, *its) for name, its in split.items()],
        "parts": parts,
    }


def weights(
    split: dict[str, tuple[tuple[int, ...], int | None]] = SPLIT,
) -> dict[str, NDArray[np.float32]]:
    """Return tensors whose elements all have different values."""
    numbers = np.random.default_rng(7)
    return {name: numbers.random(shape, np.float32) for name, (shape, _) in split.items()}


def local(whole: NDArray[np.float32], its: dict[str, Any]) -> NDArray[np.float32]:
    """Return the elements of a fragment."""
    box = zip(its["global_offset"], its["local_shape"], strict=True)
    return whole[tuple(slice(first, first + size) for first, size in box)].copy()
