"""Weights on ranks: manifests are loaded, and reshards write each byte exactly once."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvplan import DataType, LLMException, Plan, reference
from kvplan.planning.weights import WeightPlacement, load_placement, plan_reshard
from tests.planning.placements import SPLIT, fragment, local, manifest, rank, weights
from tests.support.refusals import refused

Document = dict[str, Any]


def loaded(document: Document, folder: Path, name: str = "manifest.json") -> WeightPlacement:
    path = folder / name
    path.write_text(json.dumps(document))
    return load_placement(path)


def resharded(
    source: Document, target: Document, folder: Path, values: dict[str, NDArray[np.float32]]
) -> dict[str, Plan]:
    """Plan a reshard, execute it, and compare the content of each participant."""
    plans = plan_reshard(loaded(source, folder), loaded(target, folder, "target.json"))
    for part in target["parts"]:
        found = {
            item["tensor_id"]: np.zeros(item["local_shape"], np.float32)
            for item in part["fragments"]
        }
        plan = plans[part["participant_id"]]
        sources = []
        for its in plan.parts:
            assert its.source is not None
            holder = source["parts"][its.source]
            assert its.src.name == holder["participant_id"]
            (held,) = (item for item in holder["fragments"] if item["tensor_id"] == its.name)
            sources.append(local(values[its.name], held))
        reference.execute(plan, sources, [found[its.name] for its in plan.parts])
        for item in part["fragments"]:
            expected = local(values[item["tensor_id"]], item)
            np.testing.assert_array_equal(found[item["tensor_id"]], expected)
    return plans


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ({"tp": 4}, {"tp": 2}),
        ({"tp": 2}, {"tp": 4}),
        ({"tp": 4, "pp": 2}, {"tp": 2, "pp": 1}),
        ({"tp": 1, "pp": 2, "dp": 2}, {"tp": 8}),
        ({"tp": 2}, {"tp": 2, "pp": 2, "dp": 2}),
    ],
    ids=str,
)
def test_each_participant_gets_its_weights(
    source: dict[str, int], target: dict[str, int], tmp_path: Path
) -> None:
    resharded(manifest(**source), manifest(**target), tmp_path, weights())


@pytest.mark.parametrize(("shape", "dims"), [((32, 3, 16), (0, 2)), ((1, 32, 16), (1, 2))])
def test_a_tensor_may_be_split_along_another_dimension(
    shape: tuple[int, ...], dims: tuple[int, int], tmp_path: Path
) -> None:
    rows, columns = ({"w": (shape, dim)} for dim in dims)
    source, target = manifest(4, split=rows), manifest(2, split=columns)
    plans = resharded(source, target, tmp_path, weights(rows))
    assert [part.source for part in plans["d0-p0-t1"].parts] == [0, 1, 2, 3]


def test_boxes_that_are_not_neighbours_in_any_order_may_not_overlap(tmp_path: Path) -> None:
    """All of them hold as many elements as the tensor has."""
    split: dict[str, tuple[tuple[int, ...], int | None]] = {"w": ((4, 4), None)}
    document = manifest(1, split=split)
    document["parts"][0]["fragments"] = [
        fragment("w", (0, 0), (4, 2), rank()),
        fragment("w", (1, 2), (2, 2), rank()),
        fragment("w", (2, 0), (2, 2), rank()),
    ]
    with refused("LLM_PARAM_INVALID", r"\[0:4, 0:2\] and \[2:4, 0:2\] overlap"):
        plan_reshard(loaded(document, tmp_path), loaded(manifest(1, split=split), tmp_path))


def test_replicas_share_the_work(tmp_path: Path) -> None:
    plans = resharded(manifest(1, dp=2), manifest(1, dp=2), tmp_path, weights())
    assert [{part.source for part in plan.parts} for plan in plans.values()] == [{0}, {1}]


def test_the_text_names_the_source_of_each_part(tmp_path: Path) -> None:
    source, target = (loaded(manifest(tp), tmp_path) for tp in (4, 2))
    text = plan_reshard(source, target)["d0-p0-t1"].explain()
    layers = "parts layers.0.out.weight: source 2, layers.1.out.weight: source 2"
    assert f"{layers}\n  pull_blocks  B2B   d0-p0-t2 -> d0-p0-t1" in text
    assert "heads 16..23 of 32" in text


def test_memory_with_two_names_is_written_once(tmp_path: Path) -> None:
    documents = []
    for tp in (4, 2):
        document = manifest(tp, split={"a": ((16, 2), 0), "b": ((16, 2), 0)})
        for part in document["parts"]:
            for its in part["fragments"]:
                its["aliases"] = ["a", "b"]
        documents.append(loaded(document, tmp_path))
    plan = plan_reshard(*documents)["d0-p0-t0"]
    assert [(part.name, part.source) for part in plan.parts] == [("a", 0), ("a", 1)]


def test_a_source_that_gives_two_boxes_has_two_parts(tmp_path: Path) -> None:
    """A rank with separate queries and keys has two boxes of one tensor."""
    source, target = manifest(1, split={"w": ((16, 2), 0)}), manifest(2, split={"w": ((16, 2), 0)})
    source["parts"][0]["fragments"] = [
        fragment("w", (first, 0), (4, 2), rank()) for first in (0, 4, 8, 12)
    ]
    plan = plan_reshard(loaded(source, tmp_path), loaded(target, tmp_path))["d0-p0-t1"]
    assert [part.label for part in plan.parts] == ["w: source 0", "w#1: source 0"]
    assert plan.nbytes == 64


def test_each_box_of_a_target_is_filled(tmp_path: Path) -> None:
    """Boxes of one tensor are not mistaken for aliases of the box before."""
    split: dict[str, tuple[tuple[int, ...], int | None]] = {"w": ((16, 2), 0)}
    source, target = manifest(2, split=split), manifest(1, split=split)
    boxes = [fragment("w", (first, 0), (4, 2), rank()) for first in (8, 0, 12, 4)]
    for box in boxes:
        box["aliases"] = ["w", "tied"]
    target["parts"][0]["fragments"] = boxes
    plan = plan_reshard(loaded(source, tmp_path), loaded(target, tmp_path))["d0-p0-t0"]
    (values,) = weights(split).values()
    found = [np.zeros((4, 2), np.float32) for _ in boxes]
    held = [local(values, part["fragments"][0]) for part in source["parts"]]
    reference.execute(plan, [held[part.source or 0] for part in plan.parts], found)
    for box, filled in zip(boxes, found, strict=True):
        np.testing.assert_array_equal(filled, local(values, box))


@pytest.mark.parametrize(
    ("dtype", "itemsize", "data_type"),
    [
        ("torch.bfloat16", 2, DataType.DT_BF16),
        ("float64", 8, DataType.DT_DOUBLE),
        ("float32", 2, DataType.DT_UINT8),  # another item size
        ("complex64", 8, DataType.DT_UINT8),
    ],
)
def test_elements_of_another_type_are_moved_as_bytes(
    dtype: str, itemsize: int, data_type: DataType, tmp_path: Path
) -> None:
    split: dict[str, tuple[tuple[int, ...], int | None]] = {"w": ((6, 16, 2), 1)}
    source, target = manifest(2, split=split), manifest(1, split=split)
    for document in (source, target):
        document["tensors"][0] |= {"dtype": dtype, "itemsize": itemsize}
        for part in document["parts"]:
            part["fragments"][0]["nbytes"] = prod(part["fragments"][0]["local_shape"]) * itemsize
    plan = plan_reshard(loaded(source, tmp_path), loaded(target, tmp_path))["d0-p0-t0"]
    assert {side.data_type for part in plan.parts for side in (part.src, part.dst)} == {data_type}
    values = np.random.default_rng(3).integers(0, 256, (6, 16, 2 * itemsize), np.uint8)
    (found,) = held = [np.zeros_like(values)]
    halves = [values[:, :8].copy(), values[:, 8:].copy()]
    reference.execute(plan, [halves[part.source or 0] for part in plan.parts], 2 * held)
    np.testing.assert_array_equal(found, values)


Change = Callable[[Document], None]


def _set(value: object, *path: str | int) -> Change:
    def change(document: Document) -> None:
        at: Any = document
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value

    return change


FIRST = ("parts", 0, "fragments", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("kv_cache", "resource_kind"), "Invalid enum value 'kv_cache' - at `$.resource_kind`"),
        (_set(-1, "weight_generation"), "Expected `int` >= 0 - at `$.weight_generation`"),
        (_set(1, "surplus"), "Object contains unknown field `surplus`"),
        (_set("4", "tensors", 0, "itemsize"), "Expected `int`, got `str` - at `$.tensors[0]"),
        (_set("x", *FIRST, "tensor_id"), "parts[0].fragments[0].tensor_id='x' must be one of"),
        (_set([0], *FIRST, "global_offset"), "must have 2 entries, as global_shape=[64, 8]"),
        (_set([49, 0], *FIRST, "global_offset"), "elements 49..64 of dimension 0 are outside"),
        (_set(508, *FIRST, "nbytes"), "nbytes=508 must be 512: local_shape=[16, 8] of 4 bytes"),
        (_set([8, 0], *FIRST, "global_offset"), "[8:24, 0:8] and [16:32, 0:8] overlap"),
        (_set([16, 0], *FIRST, "global_offset"), "hold 384 of its 512 elements"),
        (_set("d0-p0-t1", "parts", 0, "participant_id"), "parts names 'd0-p0-t1' twice"),
        (_set("other", "parts", 0, "participant_id"), "must be the participants of the topology"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)  # fmt: skip
def test_a_manifest_is_refused_by_field_value_and_range(
    change: Change, message: str, tmp_path: Path
) -> None:
    document = manifest(4)
    change(document)
    with pytest.raises(LLMException) as refused:
        loaded(document, tmp_path)
    assert message in str(refused.value)
    assert "manifest.json" in str(refused.value)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (SPLIT | {"more": ((4,), None)}, "tensor 'more' of the target is not in the source"),
        (SPLIT | {"embed.weight": ((64, 16), 0)}, r"tensor 'embed.weight': global_shape=(64, 16)"),
    ],
)
def test_a_different_tensor_is_refused(
    split: dict[str, tuple[tuple[int, ...], int | None]], message: str, tmp_path: Path
) -> None:
    target = loaded(manifest(2, split=split), tmp_path)
    with pytest.raises(LLMException) as refused:
        plan_reshard(loaded(manifest(4), tmp_path), target)
    assert message in str(refused.value)


def test_inner_dimensions_that_are_both_split_are_refused(tmp_path: Path) -> None:
    source, target = (
        loaded(manifest(2, split={"w": ((2, 4, 8), dim)}), tmp_path) for dim in (1, 2)
    )
    with pytest.raises(LLMException, match="two of which the first is the outermost"):
        plan_reshard(source, target)


def test_a_dimension_of_any_length_is_checked_at_once(tmp_path: Path) -> None:
    """The time of the check does not depend on the number of elements."""
    nbytes, length = 2**62, 2**60
    document = manifest(1, split={"flat": ((length,), 0)})
    assert loaded(document, tmp_path).tensors[0].global_shape == (length,)
    (held,) = document["parts"][0]["fragments"]
    assert held["nbytes"] == nbytes
    held["local_shape"], held["nbytes"] = [length - 1], nbytes - 4
    with pytest.raises(LLMException, match=f"{length - 1} of its {length} elements"):
        loaded(document, tmp_path)
    document["tensors"][0]["global_shape"] = held["local_shape"] = [2**63]
    with pytest.raises(LLMException, match="is not a WeightPlacementManifest"):
        loaded(document, tmp_path)
