"""`kvplan top`: the running engines of this user, their links and transfers."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final, TypedDict

import click
import msgspec

from kvplan.cli.common import ExitCode, Number, console, json_option, table, write_json
from kvplan.control.status_socket import Answer, read_all
from kvplan.planning.texts import nbytes_text
from kvplan.validation import printable, resolved

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

_MAX_IN_FLIGHT: Final = 12  # rows of transfers
_ENGINE_COLUMNS: Final = (
    *("pid", "cluster", "role", "program", "listens at", ">links", ">caches", ">leases"),
    *(">in flight", ">calls/s", ">failed/s", ">pull", ">push, copy", ">a transfer"),
)
_LINK_COLUMNS: Final = (
    *("cluster", "peer", "state", "over", ">caches", ">in flight", ">calls/s", ">pull", ">push"),
    *(">for", "last error"),
)
_IN_FLIGHT_COLUMNS: Final = ("cluster", "operation", "tag", "peer", ">bytes", ">for")
_NONE: Final = (
    "No engine of this user is running, or none that --cluster and --pid select. An engine is "
    "visible only in its own network namespace (container), and not with kvplan.status_socket=0."
)


class _Operation(TypedDict):
    statuses: dict[str, int]
    nbytes: int
    count: int
    buckets: list[tuple[float | None, int]]


class _Link(TypedDict):
    cluster_id: int
    instance: str
    state: str
    transport: str
    way: str
    passed_over: list[str]
    caches: int
    in_flight: int
    operations: int
    bytes_pulled: int
    bytes_pushed: int
    age_s: float
    last_error: str


class _CacheSize(TypedDict):
    nbytes: int


class _InFlight(TypedDict):
    operation: str
    tag: str
    peer: int | None
    nbytes: int | None
    age_s: float


@resolved
class _Document(TypedDict):
    """The fields of an engine's document that are used; see `kvplan.engine.engine.describe`."""

    cluster_id: int
    role: str
    command: list[str]
    listen_address: str | None
    seconds: float
    operations: dict[str, _Operation]
    links: list[_Link]
    caches: list[_CacheSize]
    leases: int
    in_flight: list[_InFlight]


@dataclass
class Rates:
    """Rates per second, and durations, between two readings of the engine's status."""

    operations: float = 0.0  # calls of all kinds: that ended, or over a link that began
    pulled: float = 0.0  # bytes
    pushed: float = 0.0  # bytes
    copied: float = 0.0  # bytes
    failed: float = 0.0  # failed calls
    median_us: float | None = None  # upper bound of the median duration; None: no transfer
    slowest_us: float | None = None  # upper bound of the longest duration; None: no transfer


@dataclass
class Engine:
    """An engine: its document, and its rates since the previous reading."""

    pid: int
    document: dict[str, Any]
    rates: Rates = field(default_factory=Rates)
    links: list[Rates] = field(default_factory=list)


@click.command(
    "top",
    epilog="Examples: kvplan top; kvplan top --once; kvplan top --json | jq .engines[].rates",
)
@click.option(
    "--interval",
    type=Number(0.1, 3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two readings, over which rates are measured.",
)
@click.option("--once", is_flag=True, help="Print once, after one interval, and exit.")
@click.option("--cluster", type=int, metavar="ID", help="Only engines of this cluster.")
@click.option("--pid", type=int, metavar="PID", help="Only engines of this process.")
@json_option
def top(
    interval: float, *, once: bool, cluster: int | None, pid: int | None, as_json: bool
) -> ExitCode:
    """Show the running engines of this user: links, transfers, leases and GB/s.

    Each engine in this network namespace answers through a socket, only to its user and to root.
    Ctrl-C ends the command.
    """

    def look() -> list[Answer]:
        return [
            answer
            for answer in map(checked, read_all())
            if pid in (None, answer.pid)
            and (cluster is None or (answer.document or {}).get("cluster_id") == cluster)
        ]

    before = look()
    if once or as_json:
        time.sleep(interval)
        after = look()
        found = compared(before, after)
        if as_json:
            engines = [
                {**one.document, "pid": one.pid, "rates": asdict(one.rates)}
                | {"link_rates": [asdict(link) for link in one.links]}
                for one in found
            ]
            silent = [{"pid": one.pid, "error": one.error} for one in after if not one.document]
            write_json({"engines": engines, "silent": silent})
        else:
            console().print(page(found, after))
        return ExitCode.OK
    interrupted = False

    def interrupt(number: int, frame: object) -> None:
        """Raise like Python's handler; the flag ends the loop if a destructor drops the error."""
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    # A shell that starts the command with `&` makes it ignore Ctrl-C; keep that.
    handles = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handles:
        signal.signal(signal.SIGINT, interrupt)
    try:
        with suppress(KeyboardInterrupt), _shown() as show:
            show(page(compared([], before), before))
            while not interrupted:
                time.sleep(interval)
                after = look()
                show(page(compared(before, after), after))
                before = after
    finally:
        if handles:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    return ExitCode.OK


@contextmanager
def _shown() -> Iterator[Callable[[Text], object]]:
    """Return a function that shows a page. On a terminal, each page replaces the previous one."""
    out = console(fitted=True)
    if not out.is_terminal:

        def write(page: Text) -> None:
            out.file.write(f"{page.plain}\n\n")
            out.file.flush()

        yield write
        return
    from rich.live import Live

    with Live(console=out, screen=True) as live:
        yield partial(live.update, refresh=True)


def checked(answer: Answer) -> Answer:
    """Return an answer with its document checked: any program of this user may have answered."""
    if answer.document is None:
        return answer
    try:
        fields = msgspec.convert(answer.document, _Document)
    except msgspec.ValidationError as error:
        return answer._replace(document=None, error=f"not an answer of an engine: {error}")
    return answer._replace(document={**answer.document, **fields})


def compared(before: Sequence[Answer], after: Sequence[Answer]) -> list[Engine]:
    """Return the engines that answered, with their rates; rates of new engines are 0."""
    known = {_key(answer): answer.document for answer in before if answer.document is not None}
    found = []
    for answer in after:
        if answer.document is None:
            continue
        old = known.get(_key(answer))
        engine = Engine(answer.pid, answer.document)
        engine.rates = Rates() if old is None else _engine_rates(old, answer.document)
        links = {} if old is None else {link["cluster_id"]: link for link in old["links"]}
        for link in answer.document["links"]:
            was = links.get(link["cluster_id"])
            if old is None or was is None or was["instance"] != link["instance"]:
                engine.links.append(Rates())
                continue
            seconds = max(answer.document["seconds"] - old["seconds"], 1e-9)
            engine.links.append(
                Rates(
                    operations=(link["operations"] - was["operations"]) / seconds,
                    pulled=(link["bytes_pulled"] - was["bytes_pulled"]) / seconds,
                    pushed=(link["bytes_pushed"] - was["bytes_pushed"]) / seconds,
                )
            )
        found.append(engine)
    return found


def _key(answer: Answer) -> tuple[object, ...]:
    document = answer.document or {}
    return answer.pid, document.get("cluster_id"), document.get("listen_address")


def _engine_rates(old: dict[str, Any], new: dict[str, Any]) -> Rates:
    seconds = max(new["seconds"] - old["seconds"], 1e-9)
    rates = Rates()
    buckets: dict[float | None, int] = {}
    for name, row in new["operations"].items():
        was = old["operations"].get(name, {"count": 0, "nbytes": 0, "statuses": {}, "buckets": []})
        count = row["count"] - was["count"]
        moved = (row["nbytes"] - was["nbytes"]) / seconds
        failed = _failures(row) - _failures(was)
        rates.operations += count / seconds
        rates.failed += failed / seconds
        verb = name.partition("_")[0]
        if verb in ("pull", "gather"):
            rates.pulled += moved
        elif verb == "push":
            rates.pushed += moved
        elif verb in ("copy", "swap"):
            rates.copied += moved
        else:
            continue  # not a transfer
        earlier = dict(map(tuple, was["buckets"]))
        for bound, total in row["buckets"]:
            buckets[bound] = buckets.get(bound, 0) + total - earlier.get(bound, 0)
    rates.median_us = _quantile(buckets, 0.5)
    rates.slowest_us = _quantile(buckets, 1.0)
    return rates


def _failures(row: dict[str, Any]) -> int:
    no_failure = ("LLM_SUCCESS", "LLM_CANCELLED")
    return sum(count for status, count in row["statuses"].items() if status not in no_failure)


def _quantile(buckets: dict[float | None, int], fraction: float) -> float | None:
    """Return the upper bound, in us, of a quantile's bucket. Counts are cumulative."""
    total = max(buckets.values(), default=0)
    if not total:
        return None
    bounds = [(bound, count) for bound, count in buckets.items() if bound is not None]
    reached = [bound for bound, count in sorted(bounds) if count >= fraction * total]
    return reached[0] * 1e6 if reached else float("inf")


def page(engines: Sequence[Engine], answers: Sequence[Answer]) -> Text:
    """Return the text of a page. Long lines are not cut; a narrow terminal wraps them."""
    from rich.text import Text

    out = console()
    with out.capture() as printed:
        out.print(rendered(engines, answers))
    lines = Text.from_ansi(printed.get()).split("\n")
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)


def rendered(engines: Sequence[Engine], answers: Sequence[Answer]) -> Group:
    """Return a table of the engines; if there are any, of links and the oldest operations too."""
    from rich.console import Group
    from rich.text import Text

    if not answers:
        return Group(Text(_NONE))
    rows = table(*_ENGINE_COLUMNS)
    for engine in engines:
        document, caches = engine.document, engine.document["caches"]
        rows.add_row(
            str(engine.pid),
            str(document["cluster_id"]),
            printable(document["role"]),
            printable(PurePath((document["command"] or [""])[0]).name) or "python",
            printable(document["listen_address"] or "-"),
            str(len(document["links"])),
            f"{len(caches)} ({nbytes_text(sum(cache['nbytes'] for cache in caches))})",
            str(document["leases"]),
            str(len(document["in_flight"])),
            f"{engine.rates.operations:,.0f}",
            Text(f"{engine.rates.failed:,.0f}", "bold red" if engine.rates.failed else ""),
            _speed(engine.rates.pulled),
            _speed(engine.rates.pushed + engine.rates.copied),
            _times(engine.rates),
        )
    parts: list[Table | Text] = [rows]
    parts += [
        Text(printable(f"process {answer.pid}: {answer.error}"))
        for answer in answers
        if answer.document is None
    ]
    if any(engine.document["links"] for engine in engines):
        parts += [Text("\nlinks", "bold"), _links(engines), *_passed_over(engines)]
    if any(engine.document["in_flight"] for engine in engines):
        parts += [Text("\nin flight, oldest first", "bold"), _in_flight(engines)]
    return Group(*parts)


def _links(engines: Sequence[Engine]) -> Table:
    from rich.text import Text

    rows = table(*_LINK_COLUMNS)
    for engine in engines:
        for link, rates in zip(engine.document["links"], engine.links, strict=True):
            is_linked = link["state"] == "LINKED"
            over = " ".join(filter(None, [link["transport"], link["way"] and f"({link['way']})"]))
            rows.add_row(
                str(engine.document["cluster_id"]),
                str(link["cluster_id"]),
                Text(printable(link["state"]), "" if is_linked else "bold red"),
                printable(over),
                str(link["caches"]),
                str(link["in_flight"]),
                f"{rates.operations:,.0f}",
                _speed(rates.pulled),
                _speed(rates.pushed),
                _age(link["age_s"]),
                printable(link["last_error"].partition("\n")[0][:100]),
            )
    return rows


def _passed_over(engines: Sequence[Engine]) -> list[Text]:
    """Return a line for each transport that a link does not use, or uses for only some memory."""
    from rich.text import Text

    lines = [
        f"{engine.document['cluster_id']} - {link['cluster_id']}: not {why}"
        for engine in engines
        for link in engine.document["links"]
        for why in link["passed_over"]
    ]
    return [Text(printable(line), "dim") for line in lines]


def _in_flight(engines: Sequence[Engine]) -> Table:
    rows = table(*_IN_FLIGHT_COLUMNS)
    found = [(engine, row) for engine in engines for row in engine.document["in_flight"]]
    for engine, row in sorted(found, key=lambda pair: -pair[1]["age_s"])[:_MAX_IN_FLIGHT]:
        rows.add_row(
            str(engine.document["cluster_id"]),
            printable(row["operation"]),
            printable(row["tag"]),
            "-" if row["peer"] is None else str(row["peer"]),
            "-" if row["nbytes"] is None else nbytes_text(row["nbytes"]),
            _age(row["age_s"]),
        )
    return rows


def _speed(nbytes_per_s: float) -> str:
    if not nbytes_per_s:
        return "-"
    value = nbytes_per_s / 1e6
    return f"{value:.1f} MB/s" if value < 1000 else f"{value / 1000:.2f} GB/s"


def _times(rates: Rates) -> str:
    if rates.median_us is None or rates.slowest_us is None:
        return "-"
    return f"<= {_us(rates.median_us)}, all <= {_us(rates.slowest_us)}"


def _us(value: float) -> str:
    return f"{value:g} us" if value < 1000 else f"{value / 1000:g} ms"


def _age(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
