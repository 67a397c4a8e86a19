"""The difference between a cache and its expected content: first wrong bytes, summary and text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvplan.planning.part import Part
from kvplan.planning.texts import Span, nbytes_text, plural, spans_of, spans_text
from kvplan.recording import Write


@dataclass(frozen=True)
class Wrong:
    """The first wrong bytes of a cache, in one block (or slot) of one layer's keys or values.

    Attributes:
        layer: number in the model if the shard names layers, otherwise counted from the first
            layer of the cache.
        kv: "K" or "V"; empty: unknown.
        heads: first and last wrong KV head of the model; None: unknown.
        tokens: first and last wrong token of the request; None: unknown.
        tensor, row: the place of the bytes at dst.
        descriptor: number, in its part, of the descriptor that writes the first of the bytes.
        src_tensor, src_row: the place from which the descriptor read.
        entries: positions of `src_row` in the request's block table at src.
        holds: text about the origin of the bytes; empty: they were not found elsewhere.
        as_planned: True if the bytes equal the source bytes that the plan reads; None: no source
            was given.
        writes: all recorded transfers that wrote the block, by end time; None: no recording was
            given.
    """

    layer: int
    kv: str
    heads: Span | None
    tokens: Span | None
    tensor: int
    row: int
    descriptor: int
    src_tensor: int
    src_row: int
    entries: tuple[int, ...]
    holds: str
    as_planned: bool | None
    writes: tuple[Write, ...] | None = None


@dataclass(frozen=True)
class Difference:
    """The difference between a cache and its expected content, after a plan was executed.

    Sizes count whole cells. A cell is one token in one head of the keys or values of a layer, or
    less if the layout is unknown, or if the plan cuts cells.

    Attributes:
        part: the part of the plan that was executed.
        wrong_nbytes: bytes that the plan writes, in cells that differ.
        elsewhere_nbytes: bytes in differing cells that the plan does not write.
        layers: numbers of the wrong layers, as in `Wrong.layer`.
        kv: "K", "V" or "K+V"; empty: unknown.
        heads, tokens: the wrong heads and tokens; empty: unknown.
        rows: the wrong blocks (or slots) at dst.
        first: the first wrong bytes in the order of layers and of the request; None: no byte is
            wrong.
    """

    part: Part
    wrong_nbytes: int
    elsewhere_nbytes: int
    layers: tuple[int, ...] = ()
    kv: str = ""
    heads: tuple[int, ...] = ()
    tokens: tuple[Span, ...] = ()
    rows: tuple[int, ...] = ()
    first: Wrong | None = None

    def lines(self) -> Iterator[str]:
        """Yield the difference as text."""
        part, first = self.part, self.first
        name = f"{part.operation} (plan {part.fingerprint[:6]})"
        if part.label:
            name = f"part {part.label}: {name}"
        if first is None:
            yield f"as expected: all {nbytes_text(part.nbytes)} that {name} writes"
        else:
            total = nbytes_text(part.nbytes)
            yield f"wrong: {nbytes_text(self.wrong_nbytes)} of the {total} that {name} writes"
            rows = spans_text(part.dst.row, spans_of(self.rows))
            held = [spans_text("layer", spans_of(self.layers)), self.kv]
            held += [spans_text("head", spans_of(self.heads)), spans_text("token", [*self.tokens])]
            yield f"  {', '.join(filter(None, [*held, f'{rows} at dst']))}"
            yield from self._first_lines(first)
        if self.elsewhere_nbytes:
            yield (
                f"  {nbytes_text(self.elsewhere_nbytes)} that it does not write differ as well: "
                "another transfer, or the model, wrote there"
            )

    def _first_lines(self, first: Wrong) -> Iterator[str]:
        part = self.part
        held = [f"layer {first.layer}", first.kv]
        held += [spans_text("head", [first.heads] if first.heads else [])]
        held += [spans_text("token", [first.tokens] if first.tokens else [])]
        where = f"{part.dst.row} {first.row} of {part.dst.name or f'dst tensor {first.tensor}'}"
        yield f"first: {', '.join(filter(None, [*held, where]))}"
        # Slots have no block table, and a copy inside a process may read a block several times.
        entries = first.entries if part.src.paged and part.local != "both" else ()
        named = " and ".join(f"src_blocks[{entry}]" for entry in entries[:4])
        source = part.src.name or f"src tensor {first.src_tensor}"
        yield (
            f"  descriptor {first.descriptor} wrote it, from {part.src.row} {first.src_row} of "
            f"{source}{f', {named}' if named else ''}"
        )
        if len(entries) > 1:
            yield f"  {part.src.row} {first.src_row} is in the block table more than once"
        if first.holds:
            yield f"  it holds {first.holds}"
        if first.as_planned is None:
            yield "  give source=, to know whether it was copied as planned or overwritten"
        elif first.as_planned:
            yield (
                "  the source holds the same there: it was copied as planned, so the source, or "
                "the plan, was wrong"
            )
        else:
            zeros = first.holds.startswith("zeros")
            cause = "it was not copied, was cleared later" if zeros else "another transfer wrote it"
            changed = "or the source has changed since"
            yield f"  the source holds something else there, so {cause}, {changed}"
        if first.writes is not None:
            yield from _writes_lines(first.writes)


def _writes_lines(writes: tuple[Write, ...]) -> Iterator[str]:
    if not writes:
        yield "  no transfer that is recorded wrote it"
        return
    *before, last = writes
    yield f"  written last by {last}"
    if before:
        yield f"  before that by {before[-1]}" + (
            f", and {plural(len(before) - 1, 'more transfer')}" if len(before) > 1 else ""
        )


@dataclass(frozen=True)
class Located:
    """The result of `locate`: true if a byte that the plan writes is wrong. Its `str` is a report.

    Attributes:
        differences: one for each part of the plan, in order.
        is_replay: True if `replay` made the expected content.
    """

    differences: tuple[Difference, ...]
    is_replay: bool = False

    def __bool__(self) -> bool:
        return any(difference.first is not None for difference in self.differences)

    @property
    def first(self) -> Wrong | None:
        """The first wrong bytes of the first part with wrong bytes; None: no byte is wrong."""
        return next(
            (difference.first for difference in self.differences if difference.first is not None),
            None,
        )

    def lines(self) -> Iterator[str]:
        """Yield all differences as text."""
        for difference in self.differences:
            yield from difference.lines()
        if self.is_replay and not self:
            yield (
                "  everything was copied as planned: if the cache is wrong, the source, or the "
                "plan, was wrong"
            )

    def __str__(self) -> str:
        return "\n".join(self.lines())
