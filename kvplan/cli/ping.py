"""`kvplan ping`: link with an engine, measure what lies between, and leave it as it was."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Final

import click

from kvplan.cli.common import ExitCode, console, json_option, write_json
from kvplan.inspection.units import nbytes_text, plural
from kvplan.validation import printable

if TYPE_CHECKING:
    from kvplan.cli.pinging import Found, Report

SCHEMA_VERSION: Final = 1

_LISTED: Final = 16
"""Caches that are listed before the rest is only counted."""


@click.command("ping", epilog="Example: kvplan ping 10.0.0.7:16000 --key cluster.key")
@click.argument("address")
@click.option("--key", type=click.Path(), help="File of the cluster's key, if the peer has one.")
@click.option(
    "--cluster-id",
    type=click.IntRange(0, 2**64 - 1),
    metavar="ID",
    help="Of the peer. Default: it is asked.",
)
@click.option(
    "-n",
    "--count",
    type=click.IntRange(1, 10_000),
    default=10,
    show_default=True,
    metavar="N",
    help="How often each thing is measured.",
)
@click.option(
    "--transport",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="As kvplan.transport.",
)
@click.option(
    "--device-id",
    type=click.IntRange(min=0),
    metavar="N",
    help="Open this accelerator, for transport hccl. Default: none.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.001, max=3600),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit of each step.",
)
@json_option
def command(
    address: str,
    key: str | None,
    cluster_id: int | None,
    count: int,
    transport: str,
    device_id: int | None,
    timeout: float,
    *,
    as_json: bool,
) -> ExitCode:
    """Link with the engine that listens at ADDRESS ("ip:port"), measure, and unlink.

    Prints the time that linking takes, the transport and why none that comes before it was
    chosen, the round trip of a control message, the caches that the peer offers, and a small and
    a large pull of the first one that can be read. Nothing is written at the peer and no key is
    taken there: caches are read by their id or their blocks key. It has one link more meanwhile.
    Exits with 2 if it cannot be linked or a pull fails.
    """
    from kvplan.cli.pinging import Ping  # an engine, and so sockets: not for --help
    from kvplan.engine.options import Options

    options = Options(
        listen_ip_info="",  # also where the environment says an address
        cluster_key_file=key,
        transport=transport,
        accelerator="none" if device_id is None else "auto",
        device_id=device_id or 0,
        sync_kv_cache_wait_time=round(1000 * timeout),
    )
    found = Ping(address, options, round(1000 * timeout), count).run(cluster_id)
    if as_json:
        write_json(_document(found))
    else:
        _write(found)
    return ExitCode.TROUBLE if any(it.failed for it in found.caches) else ExitCode.OK


def _document(found: Report) -> dict[str, object]:
    status = found.status
    return {
        "schema_version": SCHEMA_VERSION,
        "cluster_id": status.cluster_id,
        "address": status.address,
        "role": None if status.role is None else status.role.name,
        "transport": status.transport,
        "way": status.way,
        "passed": [it._asdict() for it in found.passed],
        "link_ms": 1e3 * found.link_s,
        "unlink_ms": 1e3 * found.unlink_s,
        "round_trip": _times(found.round_trips),
        "caches": [
            {
                "cache_id": it.cache.cache_id,
                "num_tensors": it.cache.cache_desc.num_tensors,
                "shape": [*it.cache.cache_desc.shape],
                "data_type": it.cache.cache_desc.data_type.name,
                "placement": it.cache.cache_desc.placement.name,
                "paged": it.cache.paged,
                "model_id": None if it.cache.blocks_key is None else it.cache.blocks_key.model_id,
                "pulls": [
                    {"size": pull.size, "nbytes": pull.nbytes, "descriptors": pull.descriptors}
                    | _times(pull.seconds)
                    for pull in it.pulls
                ],
                "failed": it.failed,
                "why_not": it.why_not,
            }
            for it in found.caches
        ],
    }


def _times(seconds: list[float]) -> dict[str, object]:
    times = [1e3 * it for it in seconds]
    return {"median_ms": median(times), "min_ms": min(times), "max_ms": max(times)}


def _write(found: Report) -> None:
    out, status = console(), found.status
    role = "" if status.role is None else f", {status.role.name}"
    out.print(f"cluster {status.cluster_id} at {status.address}{role}", style="bold")
    out.print(f"  linked        {_ms(found.link_s)}")
    out.print(f"  transport     {status.transport}: {printable(status.way)}", style="green")
    for it in found.passed:
        out.print(f"  not {it.transport:<9} {printable(it.why_not)}", style="yellow")
    out.print(f"  round trip    {_spread(found.round_trips)}")
    for cache in found.caches[:_LISTED]:
        out.print(f"  cache {cache.cache.cache_id:<7} {cache.text}")
        for pull in cache.pulls:
            rate = pull.nbytes / median(pull.seconds) / 1e9
            out.print(
                f"    {pull.size} pull  {nbytes_text(pull.nbytes)}, "
                f"{plural(pull.descriptors, 'descriptor')}: {_spread(pull.seconds)}"
                + (f", {rate:.2f} GB/s" if pull.size == "large" else "")
            )
        if cache.why_not:
            word, style = ("FAILED", "bold red") if cache.failed else ("not read", "dim")
            out.print(f"    {word}: {printable(cache.why_not)}", style=style)
    if (hidden := len(found.caches) - _LISTED) > 0:
        out.print(f"  ... {plural(hidden, 'more cache')}")
    if not any(it.pulls or it.failed for it in found.caches):
        out.print(f"  {_why_nothing(found.caches)}: only the link was measured")
    out.print(f"  unlinked      {_ms(found.unlink_s)}")


def _why_nothing(caches: list[Found]) -> str:
    return "no cache that can be read" if caches else "no cache is offered"


def _spread(seconds: list[float]) -> str:
    low, high = _ms(min(seconds)), _ms(max(seconds))
    return f"{_ms(median(seconds))} (of {len(seconds)}: {low} to {high})"


def _ms(seconds: float) -> str:
    ms = 1e3 * seconds
    digits = 0 if ms >= 100 else 1 if ms >= 10 else 2 if ms >= 1 else 3
    return f"{ms:.{digits}f} ms"
