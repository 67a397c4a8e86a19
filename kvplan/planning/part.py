"""A part of a plan: what is copied between one pair of caches.

A part holds the tensor pairs and one segment table that all pairs share; its size grows with
layers + segments, not with layers x segments. It knows no address and imports nothing that could
move a byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np

from kvplan.inspection.contents import (
    heads_of,
    kv_of,
    local_layers,
    model_layers,
    spans_text,
    to_text,
    tokens_of,
)
from kvplan.inspection.units import span
from kvplan.planning.segments import Coalesce, Segments
from kvplan.planning.side import Side
from kvplan.validation import check_index

if TYPE_CHECKING:
    from kvplan.planning.blocks import Blocks
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
"""What a part plans; a plan of several parts has a name of its own, see `Plan.operation`."""
Kind = Literal["C2C", "C2B", "B2B"]


_LATER = ("segments", "tables", "num_slices")
"""Fields that a part has once somebody looks at them, where its request was lowered without."""


class LayerPair(NamedTuple):
    """A source layer, the layer it goes to, and their tensor pairs (src, dst).

    Attributes:
        src_layer: of the source cache, counted from its first.
        dst_layer: of the destination, likewise.
        tensors: the pairs.
    """

    src_layer: int
    dst_layer: int
    tensors: tuple[tuple[int, int], ...]


class Origin(NamedTuple):
    """Where a descriptor came from: layers, tensors, and first and last row on each side.

    Attributes:
        src_layer, dst_layer: the layer, or the first of `num_layers`.
        src_tensor, dst_tensor: the tensor, counted from 0.
        src_rows, dst_rows: first and last block or slot.
        src_row, dst_row: the word for these: "block" or "slot".
        kv: "K", "V" or "K+V"; empty where the layout does not say.
        heads: first and last KV head of the model; None where there is no such axis.
        tokens: tokens of the request, as (first, last) each; empty where the plan does not know.
        num_layers: layers from `src_layer` and `dst_layer` on, where a tensor that is moved whole
            holds several.
        model_layer: the number of the first of them in the model; None: no shard names layers. The
            other two count from the first layer of their cache.
        part: the label of the part; empty: the plan has one part without a name.
    """

    src_layer: int
    dst_layer: int
    src_tensor: int
    dst_tensor: int
    src_rows: tuple[int, int]
    dst_rows: tuple[int, int]
    src_row: str
    dst_row: str
    kv: str = ""
    heads: tuple[int, int] | None = None
    tokens: tuple[tuple[int, int], ...] = ()
    num_layers: int = 1
    model_layer: int | None = None
    part: str = ""

    def __str__(self) -> str:
        more = self.num_layers - 1
        src, dst = (to_text(it, it + more) for it in (self.src_layer, self.dst_layer))
        layers = f"layer{'s' if more else ''} {src}>{dst}"
        number = self.model_layer
        if number is not None and not self.src_layer == self.dst_layer == number:
            layers += f" ({to_text(number, number + more)} of the model)"
        src, dst = (span(rows) for rows in (self.src_rows, self.dst_rows))
        words = self.src_row if self.src_row == self.dst_row else f"{self.src_row}>{self.dst_row}"
        held = [
            self.kv,
            spans_text("head", [self.heads] if self.heads else []),
            spans_text("token", [*self.tokens]),
        ]
        return " ".join(
            [
                *([f"{self.part}:"] if self.part else []),
                f"{layers} tensor {self.src_tensor}>{self.dst_tensor} {words} {src}>{dst}",
                *filter(None, held),
            ]
        )


@dataclass(frozen=True, repr=False, eq=False)
class Part:
    """What a plan copies between one pair of caches.

    Descriptor i is segment `i % len(segments)` of tensor pair `i // len(segments)`: layer by
    layer, tensor by tensor, segment by segment.

    Attributes:
        operation: the call that it plans, e.g. "push_blocks".
        kind: C2C, C2B or B2B.
        src, dst: the two sides; all offsets are relative to a tensor's base address.
        src_tensors, dst_tensors: the tensor pairs; two ranges of equal length.
        tensors_per_layer: how many consecutive tensors are one layer.
        segments: (src offset, dst offset, nbytes) in bytes, shared by all tensor pairs.
        num_slices: slices of one tensor before coalescing.
        coalesce: how slices became segments.
        split: the axes inside of the tensors ("layer", "kv") along which a tensor is paired in
            parts; `src_tensors` and `dst_tensors` then count those parts, see `Side.locate`.
        reinterpret: whether rows that mean different things are copied as bytes, as the caller
            asked for.
        tables: the rows of the request in its order, for texts; not compared.
        name: the caller's name of the transfer, of several caches; empty: the only one.
        source: of a gather, the place of `src` among its sources; None: no gather.

    Parts are compared without `tables`, `name`, `source` and the names of caches. A part of a
    request that was executed has `segments` and `tables` when they are first looked at: lowering
    did not need them (`kvplan.execution.rows`).
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
    tables: BlockTables | None = field(default_factory=lambda: None)  # no default of the class
    name: str = ""
    source: int | None = None
    # Where whole rows move, the tables say all segments: recordings have those alone.
    by_rows: ClassVar[bool] = False
    # Of a request that was lowered without a plan: whole rows are copied as bytes.
    as_bytes: ClassVar[bool] = False

    if not TYPE_CHECKING:  # as to mypy: every field is there

        def __getattr__(self, name: str) -> Any:
            """Plan a request that was lowered without segments."""
            if name not in _LATER or (unplanned := vars(self).get("unplanned")) is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            from kvplan.planning.kinds import plan_rows  # it makes plans: not at the top

            made = plan_rows(self.operation, self.kind, self.src, self.dst, *unplanned)
            vars(self).update({it: getattr(made, it) for it in _LATER})
            return getattr(made, name)

    @property
    def label(self) -> str:
        """What texts call the part: "latent", "source 1" or "latent: source 1"; often nothing."""
        return label_of(self.name, self.source)

    def labelled(self, name: str, source: int | None = None) -> Part:
        """Return the same part under a name, and of a gather with the place of its source."""
        if name == self.name and source == self.source:
            return self
        part = object.__new__(Part)
        vars(part).update(vars(self), name=name, source=source)
        return part

    @property
    def unplanned_rows(self) -> tuple[Blocks, Blocks] | None:
        """The rows at src and at dst of a request that was lowered without a plan.

        All of each row is moved as bytes, of each tensor pair: row i of one to row i of the other,
        or a slot to blocks in their order. None: it is planned, or cut otherwise.
        """
        known = vars(self)
        if "segments" in known or not self.as_bytes:
            return None
        src_rows, dst_rows, *_ = known["unplanned"]
        return src_rows, dst_rows

    @property
    def local(self) -> Literal["src", "dst", "both"]:
        """Which side is this process's own: a pull writes it, a push reads it."""
        verb = self.operation.partition("_")[0]
        return "dst" if verb == "pull" else "src" if verb == "push" else "both"

    @property
    def num_tensor_pairs(self) -> int:
        """Number of tensor pairs."""
        return len(self.src_tensors)

    @cached_property
    def num_descriptors(self) -> int:
        """Descriptors that lowering will make."""
        return self.num_tensor_pairs * self.segments.num_runs

    # These two the planner knows and has set; they are computed for a plan that was read, or cut.
    @cached_property
    def nbytes_per_tensor(self) -> int:
        """Bytes copied from one tensor to its pair."""
        return self.segments.total_nbytes

    @cached_property
    def nbytes(self) -> int:
        """Bytes copied in all."""
        return len(self.src_tensors) * self.nbytes_per_tensor

    @property
    def src_layers(self) -> range:
        """Source layers, in order."""
        return self._layers_of(self.src_tensors)

    @property
    def dst_layers(self) -> range:
        """Destination layers, in order; `dst_layers[i]` receives `src_layers[i]`."""
        return self._layers_of(self.dst_tensors)

    def _layers_of(self, tensors: range) -> range:
        t = self.tensors_per_layer
        return range(tensors.start // t, -(-tensors.stop // t))

    @property
    def layers(self) -> tuple[LayerPair, ...]:
        """The layers with their tensor pairs, in order."""
        return tuple(self.layer(i) for i in range(len(self.src_layers)))

    def layer(self, index: int) -> LayerPair:
        """Return the layer at `index` of `layers`, without making the others."""
        part = slice(index * self.tensors_per_layer, (index + 1) * self.tensors_per_layer)
        tensors = zip(self.src_tensors[part], self.dst_tensors[part], strict=True)
        return LayerPair(self.src_layers[index], self.dst_layers[index], tuple(tensors))

    def tensors_of(self, layer: int) -> tuple[range, range]:
        """The tensors of each side that the layer at this position of `layers` lies in."""
        part = slice(layer * self.tensors_per_layer, (layer + 1) * self.tensors_per_layer)
        views = self.src_tensors[part], self.dst_tensors[part]
        if not self.split:
            return views
        located = (
            side.locate(it, self.split, self.tensors_per_layer)[0]
            for side, it in zip((self.src, self.dst), views, strict=True)
        )
        src, dst = (range(int(it.min()), int(it.max()) + 1) for it in located)
        return src, dst

    def origin(self, descriptor: int) -> Origin:
        """Return where a descriptor came from; computed, not stored.

        Raises:
            TypeError: `descriptor` is no int.
            LLMException: LLM_PARAM_INVALID if there is no such descriptor.
        """
        check_index("descriptor", descriptor, self.num_descriptors)
        pair, run = divmod(descriptor, self.segments.num_runs)
        src, dst, nbytes = self.run_at(run)
        last = dst + nbytes - 1
        (src_tensor, _), (dst_tensor, _) = self.pair(pair)
        layer = pair // self.tensors_per_layer
        part = slice(layer, layer + 1)
        src_layers, dst_layers = (local_layers(self, it, part) for it in ("src", "dst"))
        numbers = model_layers(self, src_layers, dst_layers)
        return Origin(
            src_layers[0],
            dst_layers[0],
            src_tensor,
            dst_tensor,
            self.src.rows(src, nbytes),
            self.dst.rows(dst, nbytes),
            self.src.row,
            self.dst.row,
            kv_of(self, self.dst_tensors[pair], dst, last),
            heads_of(self, dst, last),
            tuple(tokens_of(self, dst, last)),
            dst_layers[1] - dst_layers[0] + 1,
            None if numbers is None else numbers[0][0],
            self.label,
        )

    def pair(self, index: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The tensor of each side of a pair, and the byte of it that offsets count from."""
        places = []
        for side, views in ((self.src, self.src_tensors), (self.dst, self.dst_tensors)):
            if self.split:
                found = side.locate(views[index : index + 1], self.split, self.tensors_per_layer)
                places.append((int(found[0][0]), int(found[1][0])))
            else:
                places.append((views[index], 0))
        return places[0], places[1]

    def run_at(self, index: int) -> tuple[int, int, int]:
        """Return a run of a tensor pair by its position: src offset, dst offset, nbytes."""
        src, dst, nbytes = self.segments.runs_at(np.array([index]))
        return int(src[0]), int(dst[0]), int(nbytes[0])

    def rows(self, segment: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """First and last row of a segment, on the src and on the dst side."""
        src, dst, nbytes = (int(getattr(self.segments, c)[segment]) for c in Segments.columns())
        return self.src.rows(src, nbytes), self.dst.rows(dst, nbytes)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of options and segments; equal for equal parts."""
        import hashlib  # loads OpenSSL
        import json

        digest = hashlib.sha256(json.dumps([2, *self._scalars()], default=str).encode())
        for column in self.segments.parts():
            digest.update(column.astype("<u8", copy=False).data)
        return digest.hexdigest()

    def _scalars(self) -> Iterator[Any]:
        """Everything that makes two parts different, but the segments and the names."""
        yield from (self.operation, self.kind, self.coalesce, self.num_slices)
        yield from (self.tensors_per_layer, self.num_tensor_pairs)
        yield from (self.src_tensors.start, self.dst_tensors.start)
        yield from (self.split, self.reinterpret)
        for s in (self.src, self.dst):
            yield from (s.num_tensors, s.count, s.stride, s.paged, s.placement)
            yield from (s.data_type, s.shape, s.layout, s.label, s.shard)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Part):
            return NotImplemented
        return self.segments == other.segments and all(
            a == b for a, b in zip(self._scalars(), other._scalars(), strict=True)
        )

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        from kvplan.inspection.explain import one_line

        return f"<Part {one_line(self)}>"


def label_of(name: str, source: int | None) -> str:
    """Return what texts call a part of this name, from this source of a gather."""
    if source is None:
        return name
    return f"{name}: source {source}" if name else f"source {source}"


def from_label(label: str) -> tuple[str, int | None]:
    """Return the name and the source that a label says; the inverse of `label_of`."""
    if (found := re.fullmatch(r"(?:(.*): )?source (\d{1,9})", label)) is None:
        return label, None
    return found[1] or "", int(found[2])
