"""A pull of 4 KiB over TCP, beside a bare exchange of as many bytes between two C programs."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from benchmarks import libraries
from benchmarks.network import places
from benchmarks.pairs import Pair
from benchmarks.table import Row, Run, Topic

TOPIC = Topic()
TIMES = 2000
ROUNDS = 15
FACADE_US = 12
"""Maximum time of a whole call in addition to the executor."""


def microseconds(run: Run) -> dict[str, tuple[float, float, float]]:
    """Return by place the medians of the bare exchange, of the executor, and of a whole call.

    The bare programs wait by sleeping or by spinning: the faster way counts.
    """

    def measure() -> dict[str, tuple[float, float, float]]:
        measured = {}
        with places() as both:
            for place in both:
                with ExitStack() as opened:
                    bare = opened.enter_context(Pair(libraries.bare(place, "exchange.c"), place))
                    ours = opened.enter_context(
                        Pair(libraries.kvplan_over_tcp(place, "small"), place)
                    )
                    blocking, spinning, executor, facade = run.medians(
                        *(partial(bare.seconds, name, TIMES) for name in ("blocking", "spinning")),
                        *(partial(ours.seconds, name, TIMES) for name in ("executor", "facade")),
                        rounds=ROUNDS,
                    )
                least = min(blocking, spinning)
                measured[place.name] = 1e6 * least, 1e6 * executor, 1e6 * facade
        return measured

    found: dict[str, tuple[float, float, float]] = run.share("small pulls over TCP", measure)
    return found


@TOPIC.row("tcp_pull_4KiB_us")
def executor(run: Run, name: str) -> Row:
    """Pull by the executor alone, with a ready descriptor; the worse of two places."""
    measured = microseconds(run)
    where, (bare, ours, _) = max(measured.items(), key=lambda value: value[1][1] / value[1][0])
    ratios = ", ".join(f"{place} {b / a:.2f}" for place, (a, b, _) in measured.items())
    note = f"{where}, the worse of {ratios}; limit: 64 bytes for 4 KiB, two C programs"
    return Row(name, ours, "us", bare, target=1.3, note=note)


@TOPIC.row("tcp_facade_pull_4KiB_us")
def facade(run: Run, name: str) -> Row:
    """Pull by a whole call: plan, check, move, check, count; the worse of two places."""
    measured = microseconds(run)
    where, (_, executor, whole) = max(measured.items(), key=lambda value: value[1][2] - value[1][1])
    note = f"{where}; limit: the executor's part and {FACADE_US} us"
    return Row(name, whole, "us", executor + FACADE_US, note=note)
