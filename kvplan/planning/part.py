"""A part of a plan: the copies between one pair of caches.

A part holds the tensor pairs and one segment table that all pairs share. So its size grows with
layers + segments, not with layers x segments. It contains no address.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np

from kvplan.planning.blocks import Blocks
from kvplan.planning.segments import Coalesce, Segments
from kvplan.planning.side import Side
from kvplan.planning.texts import Origin
from kvplan.planning.tokens import BlockTables

Operation = Literal[
    "pull_cache",
    "pull_blocks",
    "push_cache",
    "push_blocks",
    "copy_cache",
    "copy_blocks",
    "swap_blocks",
    "pull_ranges",
    "push_ranges",
]
"""The operation of a part. A plan of several parts has a name of its own, see `Plan.operation`."""
Kind = Literal["C2C", "C2B", "B2B"]


class LayerPair(NamedTuple):
    """A source layer, its destination layer, and their tensor pairs.

    Attributes:
        src_layer: the layer of the source cache, counted from the cache's first.
        dst_layer: the layer of the destination cache, counted in the same way.
        tensors: the pairs (src, dst); of pieces if the part has a `split`.
    """

    src_layer: int
    dst_layer: int
    tensors: tuple[tuple[int, int], ...]


def label_of(name: str, source: int | None) -> str:
    """Return the label of a part: "latent", "source 1" or "latent: source 1"; often empty."""
    if source is None:
        return name
    return f"{name}: source {source}" if name else f"source {source}"


@dataclass(frozen=True, repr=False, eq=False)
class Part:
    """The copies of a plan between one pair of caches.

    Descriptor i is run `i % n` of tensor pair `i // n`, with n = `segments.num_runs`: layer by
    layer, tensor by tensor, run by run.

    Attributes:
        operation: the planned call, such as "push_blocks".
        kind: C2C, C2B or B2B.
        src, dst: the two sides. All offsets are relative to the base address of a tensor.
        src_tensors, dst_tensors: the tensor pairs, as two ranges of equal length.
        tensors_per_layer: the number of consecutive tensors that are one layer.
        segments: (src offset, dst offset, nbytes) in bytes, shared by all tensor pairs.
        num_slices: slices of one tensor before coalescing.
        coalesce: how slices became segments.
        split: the axes inside the tensors ("layer", "kv") along which tensors are paired in
            pieces. `src_tensors` and `dst_tensors` then count the pieces, see `Side.locate`.
        reinterpret: True if rows of different meaning are copied as bytes, as the caller asked.
        tables: the rows and tokens that move, in the order of the request.
        name: the caller's name of this transfer among several; empty for a single transfer.
        source: the position of `src` among the sources of a gather; None without a gather.

    Equality ignores `tables`, `name`, `source`, and the names, ways and ids of caches.
    """

    operation: Operation
    kind: Kind
    src: Side
    dst: Side
    src_tensors: range
    dst_tensors: range
    tensors_per_layer: int
    segments: Segments
    num_slices: int
    coalesce: Coalesce
    split: tuple[str, ...] = ()
    reinterpret: bool = False
    tables: BlockTables | None = None
    name: str = ""
    source: int | None = None
    # True if whole rows move by block tables, which then describe all segments.
    by_rows: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """The part's name in texts; see `label_of`."""
        return label_of(self.name, self.source)

    def labelled(self, name: str, source: int | None = None) -> Self:
        """Return the same part with another name and source."""
        if name == self.name and source == self.source:
            return self
        part = object.__new__(type(self))
        vars(part).update(vars(self), name=name, source=source)
        return part

    @property
    def unplanned_rows(self) -> tuple[Blocks, Blocks] | None:
        """Source and destination rows of a part whose segments are not computed yet.

        Row i of the source is copied whole to row i of the destination; a slot is cut into blocks,
        in order. None if the part has segments, or its rows are not copied as bytes.
        """
        return None

    @property
    def local(self) -> Literal["src", "dst", "both"]:
        """The side of this process: "dst" for a pull, "src" for a push, "both" for a copy."""
        verb = self.operation.partition("_")[0]
        return "dst" if verb == "pull" else "src" if verb == "push" else "both"

    @property
    def num_tensor_pairs(self) -> int:
        """Number of tensor pairs."""
        return len(self.src_tensors)

    @cached_property
    def num_descriptors(self) -> int:
        """Number of descriptors after lowering."""
        return self.num_tensor_pairs * self.segments.num_runs

    # The planner sets these two. They are computed for a part that was read, or cut.
    @cached_property
    def nbytes_per_tensor(self) -> int:
        """Bytes copied from one tensor to its pair."""
        return self.segments.total_nbytes

    @cached_property
    def nbytes(self) -> int:
        """Bytes copied in total."""
        return len(self.src_tensors) * self.nbytes_per_tensor

    @cached_property
    def src_layers(self) -> range:
        """Source layers, in order."""
        return self._layers_of(self.src_tensors)

    @property
    def dst_layers(self) -> range:
        """Destination layers, in order; `dst_layers[i]` receives `src_layers[i]`."""
        return self._layers_of(self.dst_tensors)

    def _layers_of(self, tensors: range) -> range:
        per_layer = self.tensors_per_layer
        return range(tensors.start // per_layer, -(-tensors.stop // per_layer))

    @property
    def layers(self) -> tuple[LayerPair, ...]:
        """The layers with their tensor pairs, in order."""
        return tuple(self.layer(index) for index in range(len(self.src_layers)))

    def layer(self, index: int) -> LayerPair:
        """Return the layer at `index` of `layers`, without making the others."""
        views = slice(index * self.tensors_per_layer, (index + 1) * self.tensors_per_layer)
        tensors = zip(self.src_tensors[views], self.dst_tensors[views], strict=True)
        return LayerPair(self.src_layers[index], self.dst_layers[index], tuple(tensors))

    @cached_property
    def tensors_by_layer(self) -> list[tuple[range, range]]:
        """Tensors that hold each of `layers`, on each side."""
        return [self._tensors_of(index) for index in range(len(self.src_layers))]

    def _tensors_of(self, layer: int) -> tuple[range, range]:
        piece = slice(layer * self.tensors_per_layer, (layer + 1) * self.tensors_per_layer)
        views = self.src_tensors[piece], self.dst_tensors[piece]
        if not self.split:
            return views
        src, dst = (
            side.locate(numbers, self.split, self.tensors_per_layer)[0]
            for side, numbers in zip((self.src, self.dst), views, strict=True)
        )
        return range(src.min(), src.max() + 1), range(dst.min(), dst.max() + 1)

    def whole_src_tensors(self) -> range | None:
        """Return the source tensors that move with all of their views; None: none does."""
        if not self.split:
            return self.src_tensors
        moved, _ = self.src.locate(self.src_tensors, self.split, self.tensors_per_layer)
        views = self.src.num_views(self.split) // self.src.num_tensors
        whole = np.flatnonzero(np.bincount(moved) == views).tolist()
        return range(whole[0], whole[-1] + 1) if whole else None

    def origin(self, descriptor: int) -> Origin:
        """Return where a descriptor came from. Origins are computed, not stored.

        Raises:
            TypeError: `descriptor` is not an int.
            LLMException: LLM_PARAM_INVALID: the descriptor does not exist.
        """
        from kvplan.planning.contents import origin_of  # here: that module imports this one

        return origin_of(self, descriptor)

    def pair(self, index: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the tensor of each side of a pair, and the byte at which its view begins."""
        places = []
        for side, views in ((self.src, self.src_tensors), (self.dst, self.dst_tensors)):
            if self.split:
                found = side.locate(views[index : index + 1], self.split, self.tensors_per_layer)
                places.append((int(found[0][0]), int(found[1][0])))
            else:
                places.append((views[index], 0))
        return places[0], places[1]

    def run_at(self, index: int) -> tuple[int, int, int]:
        """Return the run at a position of a tensor pair: src offset, dst offset, nbytes."""
        src, dst, nbytes = self.segments.runs_at(np.array([index]))
        return int(src[0]), int(dst[0]), int(nbytes[0])

    def rows(self, segment: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return first and last row of a segment's first run, at the source and the destination."""
        src, dst, nbytes = (int(getattr(self.segments, c)[segment]) for c in Segments.columns())
        return self.src.rows(src, nbytes), self.dst.rows(dst, nbytes)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything that equality compares; equal for equal parts."""
        import hashlib  # loads OpenSSL
        import json

        digest = hashlib.sha256(json.dumps([2, *self._scalars()], default=str).encode())
        for column in self.segments.parts():
            digest.update(column.astype("<u8", copy=False).data)
        return digest.hexdigest()

    def _scalars(self) -> Iterator[Any]:
        """Yield everything that equality compares, except the segments."""
        yield from (self.operation, self.kind, self.coalesce, self.num_slices)
        yield from (self.tensors_per_layer, self.num_tensor_pairs)
        yield from (self.src_tensors.start, self.dst_tensors.start)
        yield from (self.split, self.reinterpret)
        for side in (self.src, self.dst):
            yield from (side.num_tensors, side.count, side.stride, side.paged, side.placement)
            yield from (side.data_type, side.shape, side.layout, side.label, side.shard)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Part):
            return NotImplemented
        return self.segments == other.segments and all(
            a == b for a, b in zip(self._scalars(), other._scalars(), strict=True)
        )

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        from kvplan.planning.contents import one_line

        return f"<Part {one_line(self)}>"
