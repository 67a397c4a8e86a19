"""What differs in a cache: the first wrong bytes, a summary, and both as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvplan.planning.part import Part
from kvplan.planning.texts import Span, nbytes_text, plural, spans_of, spans_text
from kvplan.recording import Write


@dataclass(frozen=True)
class Wrong:
    """The first wrong bytes of a cache: those of one block (or slot) of one layer's keys or values.

    Attributes:
        layer: of the model, where the cache says which of them it has; else counted from its first.
        kv: "K" or "V"; empty where the layout does not say.
        heads: the first and last KV head of the model that is wrong; None: not known.
        tokens: the first and last token of the request that is wrong; None: not known.
        tensor, row: where they lie at dst.
        descriptor: of the plan, which wrote the first of them.
        src_tensor, src_row: where it read them.
        entries: positions of `src_row` in the request's block table at src.
        holds: what the bytes are, in words; empty: found nowhere.
        as_planned: whether they are those that lie at the source, where the plan reads them; None:
            no source was given.
        writes: every transfer that is recorded to have written that block, oldest first; None: no
            recording was given.
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
    """How a cache differs from what it should hold, after a plan was executed.

    Sizes count cells: a token's bytes in one head of the keys or values of a layer, or as much of
    it as differs for all that is known of the layout.

    Attributes:
        part: of the plan that was executed.
        wrong_nbytes: bytes that the plan wrote, in cells that differ.
        elsewhere_nbytes: bytes in cells that differ, and that the plan does not write.
        layers: numbers of the layers that are wrong, as in `Wrong.layer`.
        kv: "K", "V" or "K+V".
        heads, tokens: those that are wrong; empty: not known.
        rows: blocks (or slots) at dst that are wrong.
        first: the first of them in the order of layers and of the request; None: nothing is wrong.
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
        """What it says, for people."""
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
        # A slot is in no table, and a copy inside of a process may read a block for several.
        entries = first.entries if part.src.paged and part.local != "both" else ()
        named = " and ".join(f"src_blocks[{it}]" for it in entries[:4])
        source = part.src.name or f"src tensor {first.src_tensor}"
        yield (
            f"  descriptor {first.descriptor} wrote it, from {part.src.row} {first.src_row} of "
            f"{source}{f', {named}' if named else ''}"
        )
        if len(entries) > 1:
            yield f"  {part.src.row} {first.src_row} is in the block table more than once"
        if first.holds:
            yield f"  it holds {first.holds}"
        if first.as_planned:
            yield (
                "  the source holds the same there: it was copied as planned, so the source, or "
                "the plan, was wrong"
            )
        elif first.as_planned is not None:
            yield (
                "  the source holds something else there, so another transfer wrote it, or the "
                "source has changed since"
            )
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
    """What `locate` found; true if anything is wrong, and `print` shows it.

    Attributes:
        differences: of each part of the plan, in order.
        is_replay: True: the expected contents are those that the plan makes of the source.
    """

    differences: tuple[Difference, ...]
    is_replay: bool = False

    def __bool__(self) -> bool:
        return any(it.first is not None for it in self.differences)

    @property
    def first(self) -> Wrong | None:
        """Of the first part in which something is wrong; None: nothing is."""
        return next((it.first for it in self.differences if it.first is not None), None)

    def lines(self) -> Iterator[str]:
        """What it says, for people."""
        for it in self.differences:
            yield from it.lines()
        if self.is_replay and not self:
            yield (
                "  everything was copied as planned: if the cache is wrong, the source, or the "
                "plan, was wrong"
            )

    def __str__(self) -> str:
        return "\n".join(self.lines())
