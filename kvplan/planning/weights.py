"""Weights of a model on ranks: read from a manifest, and planned from placement to placement.

The manifest is Mooncake's `WeightPlacementManifest`, as `weight_placement_to_json` of
`mooncake.reshard.weight` writes it (docs/reference/plan-format.md#weights). To the planner, a
fragment of a tensor is a cache of one block: the inner split dimension stands for heads, an outer
one for layers. So a reshard is a gather, and plans show it as one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from math import prod
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
import numpy as np

from kvplan.layout import Shard
from kvplan.planning.gather import plan_gather
from kvplan.planning.part import Part
from kvplan.planning.plan import MAX_NAME, Plan
from kvplan.planning.schema import MAX_NBYTES
from kvplan.planning.segments import first_overlap
from kvplan.planning.side import Side, side
from kvplan.planning.transfer import Rows, Transfer
from kvplan.status import LLMException, invalid, within
from kvplan.types import CacheDesc, DataType, Placement
from kvplan.validation import INT64_MAX, open_regular, shown

Text = Annotated[str, msgspec.Meta(min_length=1)]
Number = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]
Count = Annotated[int, msgspec.Meta(ge=1, le=INT64_MAX)]
_T = TypeVar("_T")


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value of the manifest; unknown fields are refused."""


class Rank(_Strict, frozen=True):
    """The coordinates of a participant."""

    dp: Number
    tp: Number
    pp: Number
    ep: Number
    cp: Number = 0


class Participant(_Strict, frozen=True):
    """A process that holds weights."""

    participant_id: Text
    rank: Rank


class Topology(_Strict, frozen=True):
    """The sizes of the parallel axes, and the participants."""

    tp_size: Count
    pp_size: Count
    ep_size: Count
    dp_size: Count
    topology_id: Text
    participants: Annotated[tuple[Participant, ...], msgspec.Meta(min_length=1)]
    cp_size: Count = 1


class Axis(_Strict, frozen=True):
    """The meaning of a parallel axis for one tensor."""

    semantics: Literal["split", "replicated", "ownership"]
    kind: Literal["dp", "pp", "ep", "tp", "cp"]
    dim: Number | None = None


class Tensor(_Strict, frozen=True):
    """A weight of the model."""

    tensor_id: Text
    global_shape: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]
    dtype: Text
    itemsize: Count
    shard_dims: tuple[Number, ...]
    layout_fingerprint: Text
    parallel_axes: tuple[Axis, ...]
    layer_id: Number | None
    expert_id: Number | None

    @property
    def identity(self) -> dict[str, object]:
        """The fields that must be equal at both ends of a reshard."""
        names = ("global_shape", "dtype", "itemsize", "layout_fingerprint")
        return {name: getattr(self, name) for name in names}


class Fragment(_Strict, frozen=True):
    """The box of a tensor that one participant holds, contiguous in its memory."""

    placement_fragment_id: Text
    tensor_id: Text
    global_offset: tuple[Number, ...]
    local_shape: tuple[Count, ...]
    nbytes: Count
    rank: Rank
    aliases: tuple[Text, ...]
    pipeline_stage_id: Number | None = None

    @property
    def box(self) -> tuple[range, ...]:
        """The indices of the tensor that the fragment holds, for each dimension."""
        ends = zip(self.global_offset, self.local_shape, strict=True)
        return tuple(range(first, first + size) for first, size in ends)


class PlacementPart(_Strict, frozen=True):
    """The fragments of one participant."""

    participant_id: Text
    rank: Rank
    fragments: tuple[Fragment, ...]


class WeightPlacement(_Strict, frozen=True):
    """One complete placement of a generation of weights, without addresses.

    Any two fragments of a tensor are equal boxes (replicas) or disjoint, and together they are the
    whole tensor.
    """

    resource_kind: Literal["model_weight"]
    resource_id: Text
    revision: Text
    weight_generation: Number
    placement_set_id: Text
    placement_id: Text
    topology: Topology
    tensors: tuple[Tensor, ...]
    parts: Annotated[tuple[PlacementPart, ...], msgspec.Meta(min_length=1)]

    def fragments(self) -> dict[str, list[tuple[int, Fragment]]]:
        """Return the fragments of each tensor, with the index of their part."""
        found: dict[str, list[tuple[int, Fragment]]] = {one.tensor_id: [] for one in self.tensors}
        for index, part in enumerate(self.parts):
            for fragment in part.fragments:
                found[fragment.tensor_id].append((index, fragment))
        return found

    def check(self) -> None:
        """Refuse fragments that do not fit their tensors, and tensors that are not covered.

        Raises:
            LLMException: LLM_PARAM_INVALID: the message names the field, its value and the allowed
                range.
        """
        tensors = _by_id("tensors", ((one.tensor_id, one) for one in self.tensors))
        members = _by_id(
            "topology.participants",
            ((one.participant_id, one.rank) for one in self.topology.participants),
        )
        parts = _by_id("parts", ((one.participant_id, one.rank) for one in self.parts))
        if parts != members:
            raise invalid(
                f"parts={shown(parts)} must be the participants of the topology, with their "
                f"ranks: {shown(members)}"
            )
        for index, part in enumerate(self.parts):
            for place, fragment in enumerate(part.fragments):
                _check_fragment(f"parts[{index}].fragments[{place}]", fragment, tensors)
        for tensor_id, held in self.fragments().items():
            _check_covered(tensors[tensor_id], {fragment.box for _, fragment in held})


def is_placement(document: object) -> bool:
    """Return True if a JSON document is meant as a manifest, and not as a plan."""
    return isinstance(document, dict) and "resource_kind" in document


def load_placement(path: str | os.PathLike[str]) -> WeightPlacement:
    """Return the placement in a file of JSON.

    Raises:
        OSError: the file cannot be read.
        LLMException: LLM_PARAM_INVALID: not a regular file; see also `read_placement`.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        return read_placement(file.read(MAX_NBYTES + 1), os.fspath(path))


def read_placement(blob: bytes, name: str) -> WeightPlacement:
    """Return the placement in a document of JSON, which error messages call `name`.

    Raises:
        LLMException: LLM_PARAM_INVALID: not a manifest; the message names the field.
    """
    if len(blob) > MAX_NBYTES:
        raise invalid(f"{name} has more than {MAX_NBYTES >> 20} MiB, the maximum for a manifest")
    try:
        found = _decode(blob)
        found.check()
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise invalid(f"{name} is not a WeightPlacementManifest: {error}") from None
    except LLMException as error:
        raise within(name, error) from None
    return found


_decode: Final = msgspec.json.Decoder(WeightPlacement).decode


def plan_reshard(source: WeightPlacement, target: WeightPlacement) -> dict[str, Plan]:
    """Plan the pulls by which each participant of `target` gets its weights from `source`.

    The parts of a plan are named by tensor; `source` of a part is the index in `source.parts`.
    Replicas of the source share the work: targets take from different ones. The result is by
    participant; participants without fragments have no plan.

    Raises:
        LLMException: LLM_PARAM_INVALID: a tensor that the source lacks or has in another shape,
            data type or layout; more than two split dimensions, or two of which the first is not
            the outermost; a byte of a target that is written twice, or not at all.
    """
    tensors = {one.tensor_id: one for one in source.tensors}
    for tensor in target.tensors:
        theirs = tensors.get(tensor.tensor_id)
        if theirs is None:
            raise invalid(f"tensor {shown(tensor.tensor_id)} of the target is not in the source")
        for name, value in tensor.identity.items():
            if value != (found := theirs.identity[name]):
                raise invalid(
                    f"tensor {shown(tensor.tensor_id)}: {name}={shown(value)} of the target must "
                    f"be {shown(found)}, the value of the source: bytes are moved, not converted"
                )
    held, wanted = source.fragments(), target.fragments()
    split = {
        tensor.tensor_id: _split_dims(tensor, [*held[tensor.tensor_id], *wanted[tensor.tensor_id]])
        for tensor in target.tensors
    }
    plans: dict[str, Plan] = {}
    for rank, part in enumerate(target.parts):
        planned: list[Part] = []
        used: Counter[tuple[str, int]] = Counter()
        written: set[tuple[frozenset[str], tuple[range, ...]]] = set()
        for fragment in part.fragments:
            shared = frozenset(fragment.aliases) or frozenset([fragment.tensor_id])
            if (shared, fragment.box) in written:
                continue  # another name of memory that is already written
            written.add((shared, fragment.box))
            tensor = tensors[fragment.tensor_id]
            target_side = _side(tensor, split[tensor.tensor_id], fragment, part.participant_id)
            sides = [
                _side(tensor, split[tensor.tensor_id], own, source.parts[index].participant_id)
                for index, own in held[tensor.tensor_id]
            ]
            rows = [Rows(own, [0]) for own in sides]
            transfer = Transfer(rows, Rows(target_side, [0]), rank=rank)
            made = plan_gather(transfer, sides, target_side)
            taken = [
                (index, own)
                for (index, _), own in zip(held[tensor.tensor_id], made, strict=True)
                if own is not None
            ]
            _check_written_once(tensor.tensor_id, fragment.nbytes, [own for _, own in taken])
            planned += _labelled(tensor.tensor_id, taken, used)
        if planned:
            plans[part.participant_id] = Plan(planned)
    return plans


def _labelled(
    tensor_id: str, taken: Iterable[tuple[int, Part]], used: Counter[tuple[str, int]]
) -> Iterator[Part]:
    """Yield the parts under the name of their tensor, with a number if a source uses it again."""
    name = tensor_id[-MAX_NAME:]
    for index, part in taken:
        again = used[name, index]
        used[name, index] += 1
        suffix = f"#{again}" if again else ""
        yield part.labelled((name + suffix)[-MAX_NAME:], index)


def _by_id(field: str, pairs: Iterable[tuple[str, _T]]) -> dict[str, _T]:
    found: dict[str, _T] = {}
    for name, value in pairs:
        if name in found:
            raise invalid(f"{field} names {shown(name)} twice")
        found[name] = value
    return found


def _check_fragment(place: str, fragment: Fragment, tensors: dict[str, Tensor]) -> None:
    tensor = tensors.get(fragment.tensor_id)
    if tensor is None:
        raise invalid(f"{place}.tensor_id={shown(fragment.tensor_id)} must be one of tensors")
    whole, offset, local = tensor.global_shape, fragment.global_offset, fragment.local_shape
    if not len(whole) == len(offset) == len(local):
        raise invalid(
            f"{place}: global_offset={[*offset]} and local_shape={[*local]} must have "
            f"{len(whole)} entries, as global_shape={[*whole]} of {shown(fragment.tensor_id)}"
        )
    for dim, (first, size, total) in enumerate(zip(offset, local, whole, strict=True)):
        if first + size > total:
            raise invalid(
                f"{place}: elements {first}..{first + size - 1} of dimension {dim} are outside "
                f"of [0, {total}), global_shape of {shown(fragment.tensor_id)}"
            )
    nbytes = prod(local) * tensor.itemsize
    if fragment.nbytes != nbytes:
        raise invalid(
            f"{place}.nbytes={fragment.nbytes} must be {nbytes}: local_shape={[*local]} of "
            f"{tensor.itemsize} bytes"
        )


def _check_covered(tensor: Tensor, boxes: set[tuple[range, ...]]) -> None:
    """Refuse boxes that overlap, or that do not cover the tensor."""
    name = shown(tensor.tensor_id)
    for a, b in combinations(sorted(boxes, key=lambda box: [held.start for held in box]), 2):
        if all(max(x.start, y.start) < min(x.stop, y.stop) for x, y in zip(a, b, strict=True)):
            raise invalid(
                f"tensor {name}: fragments {_box_text(a)} and {_box_text(b)} overlap; fragments "
                "must be equal or disjoint"
            )
    held, total = sum(prod(map(len, box)) for box in boxes), prod(tensor.global_shape)
    if held != total:
        raise invalid(
            f"tensor {name}: fragments {', '.join(map(_box_text, boxes)) or '(none)'} hold {held} "
            f"of its {total} elements, global_shape={[*tensor.global_shape]}"
        )


def _box_text(box: tuple[range, ...]) -> str:
    return "[" + ", ".join(f"{part.start}:{part.stop}" for part in box) + "]"


def _split_dims(tensor: Tensor, held: Sequence[tuple[int, Fragment]]) -> tuple[int, ...]:
    """Return the dimensions that some fragment at either end holds only in part; at least one."""
    split = tuple(
        dim
        for dim, size in enumerate(tensor.global_shape)
        if any(fragment.local_shape[dim] != size for _, fragment in held)
    )
    before = prod(tensor.global_shape[: split[0]]) if split else 1
    if len(split) > 2 or (len(split) == 2 and before > 1):
        raise invalid(
            f"tensor {shown(tensor.tensor_id)}: dimensions {[*split]} of "
            f"global_shape={[*tensor.global_shape]} are split; at most one is allowed, or two of "
            "which the first is the outermost"
        )
    return split or (0,)


def _side(tensor: Tensor, split: tuple[int, ...], fragment: Fragment, participant: str) -> Side:
    """Return a fragment as a cache of one block; split dimensions become heads and layers."""
    whole, box = tensor.global_shape, fragment.box
    *outer, inner = split
    data_type, after = _DATA_TYPES.get(tensor.dtype.removeprefix("torch.")), whole[inner + 1 :]
    if data_type is None or data_type.bits != tensor.itemsize * 8:
        data_type, after = DataType.DT_UINT8, (*after, tensor.itemsize)
    shard: dict[str, Any] = {"heads": box[inner], "num_heads": whole[inner]}
    layers: tuple[int, ...] = ()
    if outer:
        shard |= {"layers": box[outer[0]], "num_layers": whole[outer[0]]}
        layers = (len(box[outer[0]]),)
    between = prod(whole[outer[0] + 1 : inner]) if outer else prod(whole[:inner])
    desc = CacheDesc(
        1,
        (1, *layers, between, len(box[inner]), prod(after)),
        data_type,
        Placement.DEVICE,
        kv_tensor_format=f"block {'layer ' if outer else ''}state head dim",
        shard=Shard(**shard),
    )
    return replace(side("fragment", desc, paged=True), name=participant)


_DATA_TYPES: Final = {
    "float64": DataType.DT_DOUBLE,
    "float32": DataType.DT_FLOAT,
    "float16": DataType.DT_FLOAT16,
    "bfloat16": DataType.DT_BF16,
    "int64": DataType.DT_INT64,
    "int32": DataType.DT_INT32,
    "int8": DataType.DT_INT8,
    "uint8": DataType.DT_UINT8,
    "float8_e4m3fn": DataType.DT_FLOAT8_E4M3FN,
    "float8_e5m2": DataType.DT_FLOAT8_E5M2,
}
"""Data types by their names in torch. Elements of another type are moved as bytes."""


def _check_written_once(tensor_id: str, nbytes: int, parts: Sequence[Part]) -> None:
    """Refuse parts that do not write each byte of a fragment exactly once."""
    starts, sizes = [], []
    for part in parts:
        runs = part.segments.expanded()
        for _, (_, base) in map(part.pair, range(part.num_tensor_pairs)):
            starts.append(runs.dst_offsets + np.uint64(base))
            sizes.append(runs.nbytes)
    offsets, lengths = np.concatenate(starts), np.concatenate(sizes)
    twice = first_overlap(offsets, lengths) is not None
    if twice or int(lengths.sum()) != nbytes or int((offsets + lengths).max()) > nbytes:
        raise invalid(
            f"tensor {shown(tensor_id)}: the parts write {int(lengths.sum())} bytes"
            f"{', some of them twice,' if twice else ''} of the {nbytes} that the target holds"
        )
