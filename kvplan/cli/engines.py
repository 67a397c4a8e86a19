"""`kvplan ping` measures a link with an engine; `kvplan keygen` makes the key of a cluster."""

from __future__ import annotations

from statistics import median
from typing import Final

import click

from kvplan.cli.common import NO_POOLS, ExitCode, Number, console, json_option, write_json
from kvplan.cli.probe import Found, Probe, Report
from kvplan.engine.options import Options
from kvplan.links.values import LinkStatus
from kvplan.planning.texts import nbytes_text, plural
from kvplan.validation import printable

_LISTED: Final = 16
"""Maximum number of listed caches; the others are only counted."""


@click.command("ping", epilog="Example: kvplan ping 10.0.0.7:16000 --key cluster.key")
@click.argument("address")
@click.option("--key", type=click.Path(), help="File with the cluster key, if the peer has one.")
@click.option(
    "--cluster-id",
    type=click.IntRange(0, 2**64 - 1),
    metavar="ID",
    help="Cluster ID of the peer. Default: ask the peer.",
)
@click.option(
    "-n",
    "--count",
    type=click.IntRange(1, 10_000),
    default=10,
    show_default=True,
    metavar="N",
    help="Number of measurements of each kind.",
)
@click.option(
    "--transport",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="Transport, as in option kvplan.transport.",
)
@click.option(
    "--device-id",
    type=click.IntRange(min=0),
    metavar="N",
    help="Accelerator to open, for transport hccl. Default: none.",
)
@click.option(
    "--timeout",
    type=Number(min=0.001, max=3600),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit of each step.",
)
@json_option
def ping(
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
    """Link with the engine at ADDRESS ("ip:port" or "ipc:///path"), measure, and unlink.

    Prints the time of linking, the chosen transport and the reason against each preferred one.
    Below are the round trip of a control message, the caches of the peer, and the times of a small
    and a large pull from the first readable cache. Meanwhile the peer has one more link. Nothing
    is written to its caches, and no key of a request is consumed. Exits with 2 if
    linking or a pull fails.
    """
    options = Options(
        listen_ip_info="",  # overrides an address in the environment
        cluster_key_file=key,
        transport=transport,
        accelerator="none" if device_id is None else "auto",
        device_id=device_id or 0,
        sync_kv_cache_wait_time=round(1000 * timeout),
        **NO_POOLS,
    )
    report = Probe(address, options, round(1000 * timeout), count).run(cluster_id)
    if as_json:
        write_json(_document(report))
    else:
        _write(report)
    return ExitCode.TROUBLE if any(cache.failed for cache in report.caches) else ExitCode.OK


def _cache_document(found: Found) -> dict[str, object]:
    cache, desc = found.cache, found.cache.cache_desc
    return {
        "cache_id": cache.cache_id,
        "num_tensors": desc.num_tensors,
        "shape": [*desc.shape],
        "data_type": desc.data_type.name,
        "placement": desc.placement.name,
        "paged": cache.paged,
        "model_id": None if cache.blocks_key is None else cache.blocks_key.model_id,
        "pulls": [
            {"size": pull.size, "nbytes": pull.nbytes, "descriptors": pull.descriptors}
            | _times(pull.seconds)
            for pull in found.pulls
        ],
        "failed": found.failed,
        "why_not": found.why_not,
    }


def _document(report: Report) -> dict[str, object]:
    status = report.status
    return {
        "cluster_id": status.cluster_id,
        "address": status.address,
        "role": None if status.role is None else status.role.name,
        "transport": status.transport,
        "way": status.way,
        "passed": [{"transport": name, "why_not": why_not} for name, why_not in _passed(status)],
        "link_ms": 1e3 * report.link_s,
        "unlink_ms": 1e3 * report.unlink_s,
        "round_trip": _times(report.round_trips),
        "caches": [*map(_cache_document, report.caches)],
    }


def _passed(status: LinkStatus) -> list[tuple[str, str]]:
    """Return the transports that were passed over for some or all memory, with the reasons."""
    pairs = (text.partition(": ") for text in status.passed_over)
    return [(name, why_not) for name, _, why_not in pairs]


def _times(seconds: list[float]) -> dict[str, object]:
    times = [1e3 * one for one in seconds]
    return {"median_ms": median(times), "min_ms": min(times), "max_ms": max(times)}


def _write(report: Report) -> None:
    out, status = console(), report.status
    role = "" if status.role is None else f", {status.role.name}"
    out.print(f"cluster {status.cluster_id} at {status.address}{role}", style="bold")
    out.print(f"  linked        {_ms(report.link_s)}")
    out.print(f"  transport     {status.transport}: {printable(status.way)}", style="green")
    for name, why_not in _passed(status):
        out.print(f"  not {name:<9} {printable(why_not)}", style="yellow")
    out.print(f"  round trip    {_spread(report.round_trips)}")
    for found in report.caches[:_LISTED]:
        out.print(f"  cache {found.cache.cache_id:<7} {found.text}")
        for pull in found.pulls:
            rate = pull.nbytes / median(pull.seconds) / 1e9
            out.print(
                f"    {pull.size} pull  {nbytes_text(pull.nbytes)}, "
                f"{plural(pull.descriptors, 'descriptor')}: {_spread(pull.seconds)}"
                + (f", {rate:.2f} GB/s" if pull.size == "large" else "")
            )
        if found.why_not:
            word, style = ("FAILED", "bold red") if found.failed else ("not read", "dim")
            out.print(f"    {word}: {printable(found.why_not)}", style=style)
    if (hidden := len(report.caches) - _LISTED) > 0:
        out.print(f"  ... {plural(hidden, 'more cache')}")
    if not any(found.pulls or found.failed for found in report.caches):
        reason = "no readable cache" if report.caches else "the peer has no cache"
        out.print(f"  {reason}: only the link was measured")
    out.print(f"  unlinked      {_ms(report.unlink_s)}")


def _spread(seconds: list[float]) -> str:
    low, high = _ms(min(seconds)), _ms(max(seconds))
    return f"{_ms(median(seconds))} (of {len(seconds)}: {low} to {high})"


def _ms(seconds: float) -> str:
    ms = 1e3 * seconds
    digits = 0 if ms >= 100 else 1 if ms >= 10 else 2 if ms >= 1 else 3
    return f"{ms:.{digits}f} ms"


@click.command(
    "keygen",
    epilog="Example: kvplan keygen /etc/kvplan/cluster.key",
)
@click.argument("path", type=click.Path())
@json_option
def keygen(path: str, *, as_json: bool) -> ExitCode:
    """Make a cluster key in the new file PATH.

    Copy the file to every host of the cluster, with mode 0600, and set option
    kvplan.cluster_key_file of each engine. An existing file is not changed.
    """
    from kvplan.control.auth import ClusterKey

    try:
        ClusterKey.generate().save(path)
    except FileExistsError:
        raise FileExistsError(
            f"{path} exists and was not changed: a new key would exclude all engines that use the "
            "old one. Give another path, or remove the file first"
        ) from None
    except OSError as error:
        error.filename = path  # not the name under which the key is written first
        raise
    if as_json:
        write_json({"path": path})
    else:
        click.echo(f"{path}: a new cluster key; any process that can read it can link")
    return ExitCode.OK
