"""The origin of a descriptor, for texts and errors."""

from __future__ import annotations

from typing import NamedTuple

from kvplan.planning.texts import span, spans_text, to_text


class Origin(NamedTuple):
    """The origin of a descriptor: layers, tensors, and first and last row on each side.

    Attributes:
        src_layer, dst_layer: the layer, or the first of `num_layers`, counted from the cache's
            first.
        src_tensor, dst_tensor: the tensor, counted from 0.
        src_rows, dst_rows: first and last block or slot.
        src_row, dst_row: the word for these: "block" or "slot".
        kv: "K", "V" or "K+V"; empty if the layout does not name keys and values.
        heads: first and last KV head of the model; None if the layout has no such axis.
        tokens: tokens of the request, each stretch as (first, last); empty if they are unknown.
        num_layers: number of layers, which exceeds 1 if a tensor that is moved whole holds several.
        model_layer: the model's number of the first layer; None if no shard names layers.
        part: the label of the part; empty if the plan has one part without a name.
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
        src, dst = (to_text(first, first + more) for first in (self.src_layer, self.dst_layer))
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
