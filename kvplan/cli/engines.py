"""`kvplan ping`, which measures a link with an engine, and `keygen`, which makes their key."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from kvplan.cli.common import ExitCode, console, json_option, write_json
from kvplan.engine.datadist import LlmDataDist
from kvplan.links.values import ClusterInfo, LinkStatus, cluster_here
from kvplan.planning.texts import nbytes_text, plural
from kvplan.planning.transfer import Rows, Transfer
from kvplan.status import LLMException
from kvplan.transport.choice import TRANSPORTS
from kvplan.types import CacheKeyByIdAndIndex, KvCacheExtParam, LlmRole, Placement
from kvplan.validation import printable

if TYPE_CHECKING:
    from kvplan.engine.cache_api import PeerCacheStatus
    from kvplan.engine.options import Options
    from kvplan.types import Cache, CacheDesc

PING_VERSION: Final = 1

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
    """Link with the engine that listens at ADDRESS ("ip:port"), measure, and unlink.

    Prints the time that linking takes, the transport and why none that comes before it was
    chosen, the round trip of a control message, the caches that the peer offers, and a small and
    a large pull of the first one that can be read. Nothing is written at the peer and no key is
    taken there: caches are read by their id or their blocks key. It has one link more meanwhile.
    Exits with 2 if it cannot be linked or a pull fails.
    """
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
        "schema_version": PING_VERSION,
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


_LARGE: Final = 64 << 20
_LARGEST: Final = 1 << 30
"""Bytes that ping takes of its own memory, at most, to read one row of a cache."""

_FIRST: Final = range(1)
_ONE_LAYER: Final = (
    KvCacheExtParam(_FIRST, _FIRST),
    KvCacheExtParam(_FIRST, _FIRST, tensor_num_per_layer=1),
)
_ALL_LAYERS: Final = (KvCacheExtParam(), KvCacheExtParam(tensor_num_per_layer=1))


class Passed(NamedTuple):
    """A transport that is preferred to the chosen one, and why it was not chosen."""

    transport: str
    why_not: str


class Pull(NamedTuple):
    """A size that was pulled.

    Attributes:
        size: "small", "large".
        seconds: of each time.
    """

    size: str
    nbytes: int
    descriptors: int
    seconds: list[float]


@dataclass
class Found:
    """A cache that the peer offers.

    Attributes:
        text: what it is.
        pulls: what was read of it.
        why_not: nothing was read of it; empty: another one was.
        failed: whether that is a failure.
    """

    cache: PeerCacheStatus
    text: str
    pulls: list[Pull] = field(default_factory=list)
    why_not: str = ""
    failed: bool = False


class Report(NamedTuple):
    """All that was found.

    Attributes:
        link_s, unlink_s: seconds that it took.
        status: of the link, after the pulls.
        round_trips: seconds of each control message and its reply.
        passed: the transports that would have been preferred.
        caches: all that the peer offers.
    """

    link_s: float
    unlink_s: float
    status: LinkStatus
    round_trips: list[float]
    passed: list[Passed]
    caches: list[Found]


@dataclass(frozen=True)
class Ping:
    """How to ping.

    Attributes:
        address: where the peer listens.
        options: of the engines that link with it.
        timeout_ms: of each step.
        count: how often each thing is measured.
        cluster_id: this side's: one that no other engine has.
    """

    address: str
    options: Options
    timeout_ms: int
    count: int
    # The upper half of what is possible, where no one counts.
    cluster_id: int = field(default_factory=lambda: secrets.randbits(63) + 2**63)

    def run(self, peer: int | None) -> Report:
        """Link with the cluster `peer` (None: whichever listens there), measure, and unlink."""
        with self._engine(self.options) as engine:
            if peer is None:
                peer = self._ask(engine)
            link_s = _timed(lambda: self._link(engine, peer))
            round_trips = [_timed(lambda: engine.caches(peer)) for _ in range(self.count)]
            caches = [self._found(it) for it in engine.caches(peer)]
            self._read(engine, peer, caches)
            (status,) = engine.links()
            unlink_s = _timed(
                lambda: engine.unlink_clusters([peer], self.timeout_ms).raise_for_status()
            )
        return Report(
            link_s, unlink_s, status, round_trips, [*self._passed(peer, status.transport)], caches
        )

    def _engine(self, options: Options) -> LlmDataDist:
        """One that can be used in `with`, which ends it and its link."""
        engine = LlmDataDist(self.cluster_id, LlmRole.DECODER)
        engine.initialize(options)
        return engine

    def _link(self, engine: LlmDataDist, peer: int) -> None:
        engine.link_clusters([ClusterInfo(peer, self.address)], self.timeout_ms).raise_for_status()

    def _ask(self, engine: LlmDataDist) -> int:
        """Which cluster listens there: it says so when another one is wanted."""
        another = self.cluster_id ^ 1
        try:
            self._link(engine, another)
        except LLMException as error:
            if (here := cluster_here(error)) is not None:
                return here
            reason = str(error.args[0]).removeprefix(f"cluster {another} at ")
            raise LLMException(reason, status_code=error.status_code) from None
        return another

    def _found(self, it: PeerCacheStatus) -> Found:
        desc = it.cache_desc
        rows = plural(desc.batch_size, "block" if it.paged else "slot")
        key = "" if it.blocks_key is None else f", model_id {it.blocks_key.model_id}"
        text = (
            f"{plural(desc.num_tensors, 'tensor')} of {rows} x {nbytes_text(_row_nbytes(desc))}, "
            f"{desc.data_type.name}, {desc.placement.name}{key}"
        )
        found = Found(it, text)
        if not it.reachable:
            found.why_not = "this transport does not reach its memory"
        elif it.paged and it.blocks_key is None:
            found.why_not = "it has no blocks key: only who has a lease can read it"
        elif (needed := desc.num_tensors * _row_nbytes(desc)) > _LARGEST:
            found.why_not = f"one {'block' if it.paged else 'slot'} is {nbytes_text(needed)}"
        return found

    def _read(self, engine: LlmDataDist, peer: int, caches: list[Found]) -> None:
        """Pull from the first cache that can be read, a little and much."""
        for found in caches:
            if found.why_not:
                continue
            try:
                found.pulls = self._pulls(engine, peer, found.cache)
            except LLMException as error:
                found.why_not, found.failed = str(error), True
            return

    def _pulls(self, engine: LlmDataDist, peer: int, cache: PeerCacheStatus) -> list[Pull]:
        row = cache.cache_desc.num_tensors * _row_nbytes(cache.cache_desc)
        count = min(cache.cache_desc.batch_size, max(1, _LARGE // row)) if cache.paged else 1
        desc = _with_rows(cache.cache_desc, count)
        here = engine.allocate_blocks_cache(desc) if cache.paged else engine.allocate_cache(desc)
        reading = _Reading(engine, peer, cache, here, self.timeout_ms)
        return [
            reading.pull("small", 1, (*_ONE_LAYER, *_ALL_LAYERS), self.count),
            reading.pull("large", count, _ALL_LAYERS, self.count),
        ]

    def _passed(self, peer: int, chosen: str) -> Iterator[Passed]:
        """The transports before the chosen one: each is tried alone, and says why it fails."""
        if self.options.transport != "auto":
            return
        for name in TRANSPORTS:
            if name == chosen:
                return
            yield Passed(name, self._why_not(peer, name))

    def _why_not(self, peer: int, transport: str) -> str:
        try:
            with self._engine(replace(self.options, transport=transport)) as engine:
                self._link(engine, peer)
                engine.unlink_clusters([peer], self.timeout_ms).raise_for_status()
        except LLMException as error:
            names = "|".join(TRANSPORTS)
            text = str(error.args[0])
            said = re.search(
                rf"(?:^|[:;] ){transport}: (.*?)(?=; (?:{names}): |$)", text, re.DOTALL
            )
            return said[1] if said else text
        return "it works, and was not chosen: was it just restored?"


@dataclass(frozen=True)
class _Reading:
    """A cache of a peer, and one of this side that has room for some of its rows."""

    engine: LlmDataDist
    peer: int
    theirs: PeerCacheStatus
    here: Cache
    timeout_ms: int

    def pull(self, size: str, rows: int, parts: tuple[KvCacheExtParam, ...], count: int) -> Pull:
        """Pull the first rows that often; of the first of `parts` that the cache has."""
        refused: LLMException | None = None
        for part in parts:
            try:
                plan = self.engine.plan(self._transfer(rows, part))
            except LLMException as error:  # its tensors are not cut into layers that way
                refused = refused or error
                continue
            self._move(rows, part)  # the first time touches the pages of this side
            seconds = [_timed(partial(self._move, rows, part)) for _ in range(count)]
            return Pull(size, plan.nbytes, plan.num_descriptors, seconds)
        assert refused is not None
        raise refused

    def _transfer(self, rows: int, part: KvCacheExtParam) -> Transfer:
        if key := self.theirs.blocks_key:
            return Transfer(Rows(key, range(rows)), Rows(self.here, range(rows)), layers=part)
        return Transfer(Rows(self._slot), Rows(self.here), layers=part)

    def _move(self, rows: int, part: KvCacheExtParam) -> None:
        self.engine.run(self._transfer(rows, part), timeout_ms=self.timeout_ms)

    @property
    def _slot(self) -> CacheKeyByIdAndIndex:
        """By its id: no key is claimed, so none can be used up."""
        return CacheKeyByIdAndIndex(self.peer, self.theirs.cache_id, 0)


def _row_nbytes(desc: CacheDesc) -> int:
    """Of one block or slot of a tensor, wherever its parts lie."""
    return desc.tensor_nbytes // desc.batch_size


def _with_rows(desc: CacheDesc, count: int) -> CacheDesc:
    shape = list(desc.shape)
    shape[desc.batch_dim_index] = count
    return replace(desc, shape=tuple(shape), placement=Placement.HOST)


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


KEYGEN_VERSION = 1


@click.command(
    "keygen",
    epilog="Example: kvplan keygen /etc/kvplan/cluster.key",
)
@click.argument("path", type=click.Path())
@json_option
def keygen(path: str, *, as_json: bool) -> ExitCode:
    """Make the key of a cluster in the new file PATH.

    Copy it to every host of the cluster, mode 0600; engines are given it as
    kvplan.cluster_key_file. A file that exists is left as it is.
    """
    from kvplan.control.auth import ClusterKey  # no other command needs ZeroMQ

    try:
        ClusterKey.generate().save(path)
    except FileExistsError:
        raise FileExistsError(
            f"{path} exists, and is left as it is: a new key would shut out every engine "
            "that uses this one. Give another path, or remove the file first"
        ) from None
    if as_json:
        write_json({"schema_version": KEYGEN_VERSION, "path": path})
    else:
        click.echo(f"{path}: a new cluster key; anyone who can read it can link")
    return ExitCode.OK
