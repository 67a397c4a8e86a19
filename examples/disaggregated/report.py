"""The output of the demo, and the two comparisons that decide whether it succeeded."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from .messages import Generated, Located, Moved, MovedByLayer


class DemoError(Exception):
    """The demo did not show what it must show."""


class Console:
    """Plain lines with the time since the start, and generated text as it comes."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._line_open = False

    def progress(self, name: str, text: str) -> None:
        self._end_line()
        print(f"[{time.monotonic() - self._started:5.1f} s] {name}: {text}", flush=True)

    def piece(self, text: str) -> None:
        """Print a piece of generated text, marked off by a bar on the left."""
        for part in text.splitlines(keepends=True):
            if not self._line_open:
                sys.stdout.write("  | ")
            sys.stdout.write(part)
            self._line_open = not part.endswith("\n")
        sys.stdout.flush()

    def title(self, text: str) -> None:
        self._end_line()
        print(f"\n== {text} ==\n", flush=True)

    def lines(self, text: str) -> None:
        self._end_line()
        print(text, flush=True)

    def _end_line(self) -> None:
        if self._line_open:
            print()
        self._line_open = False


def moved_text(moved: Moved) -> str:
    """Return the cost of a transfer, one figure a line."""

    def speed(seconds: float) -> str:
        return f"{seconds * 1e3:.2f} ms, {moved.nbytes / seconds / 1e9:.1f} GB/s"

    lines = [
        f"  bytes        {moved.nbytes:,}",
        f"  descriptors  {moved.num_slices:,} before coalescing, {moved.num_descriptors:,} after",
        f"  planned in   {moved.plan_seconds * 1e6:.0f} us",
        f"  moved in     {speed(moved.transfer_seconds)} (planned, too)",
        f"  again        {speed(moved.repeated_seconds)} (median of repetitions)",
    ]
    if moved.link_seconds is not None:
        lines.insert(2, f"  linked in    {moved.link_seconds * 1e3:.1f} ms")
    return "\n".join(lines)


def hidden_text(moved_by_layer: MovedByLayer, whole: Moved) -> str:
    """Say how much of the transfer was hidden behind compute; `whole` moved the same bytes."""
    hidden = 1 - moved_by_layer.visible_seconds / whole.transfer_seconds
    in_ready = sum(moved_by_layer.ready_seconds)
    lines = [
        *(f"  chunk {number}      {plan}" for number, plan in enumerate(moved_by_layer.plans)),
        f"  bytes        {moved_by_layer.nbytes:,}",
        f"  computed in  {moved_by_layer.compute_seconds:.2f} s, {in_ready * 1e3:.1f} ms of it in "
        f"{len(moved_by_layer.ready_seconds)} calls of ready()",
        f"  then waited  {moved_by_layer.visible_seconds * 1e3:.2f} ms for the rest to arrive",
        f"  hidden       {hidden:.0%} of the {whole.transfer_seconds * 1e3:.2f} ms that the push "
        "took by itself",
    ]
    return "\n".join(lines)


def speed_text(generated: Generated) -> str:
    rate = len(generated.ids) / generated.seconds
    return f"  {len(generated.ids)} tokens in {generated.seconds:.1f} s, {rate:.0f} a second"


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the first position at which two sequences differ, the end of one included."""
    if list(a) == list(b):
        return None
    shared = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(shared) if x != y), min(len(a), len(b)))


def check_identical(disaggregated: Generated, monolithic: Generated, how: str) -> str:
    """Say that both generated the same; `how` the cache came, "pulled" or "pushed".

    Raises:
        DemoError: they did not: a transfer went wrong.
    """
    at = first_difference(disaggregated.ids, monolithic.ids)
    if at is not None:
        raise DemoError(
            f"the token ids differ from position {at} on: {how} "
            f"{disaggregated.ids[at : at + 4]}..., monolithic {monolithic.ids[at : at + 4]}...\n"
            f"{how}:     {disaggregated.text}\nmonolithic: {monolithic.text}"
        )
    return (
        f"IDENTICAL: all {len(monolithic.ids)} token ids are the same, generated from the cache "
        f"that was {how} and without a move."
    )


def check_located(
    located: Located, *, tokens: tuple[int, int] | None = None, heads: tuple[int, int] | None = None
) -> str:
    """Say what `kvplan.debug.locate` found: it must be what was planted; None: whichever.

    Raises:
        DemoError: it is not.
    """
    first = located.first
    if first is None or tokens not in (None, first.tokens) or heads not in (None, first.heads):
        raise DemoError(f"kvplan.debug.locate found something else:\n{located.text}")
    return f"kvplan.debug.locate compares the cache with the one that was right:\n{located.text}"


def check_changed(right: Generated, broken: Generated, what: str) -> str:
    """Say where the broken cache changed the text; `what` was wrong, a "block" or a "head".

    Raises:
        DemoError: it did not.
    """
    at = first_difference(right.ids, broken.ids)
    if at is None:
        raise DemoError(
            f"the wrong {what} changed none of the {len(right.ids)} tokens: the model did not need "
            "what it held; generate more with --max-tokens"
            + (", or choose another with --break-token" if what == "block" else "")
        )
    fluent = ", and no less fluent" if what == "block" else ""
    return (
        f"CHANGED: from token {at} on the text is another{fluent}. Nothing failed: a\n"
        "wrong KV cache shows in the text that comes out, and in the plan, and nowhere else."
    )
