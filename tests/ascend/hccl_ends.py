"""Two processes with HCCL between them, and calls for both of them."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.ascend.simulator import ELSEWHERE, HOME, Log
from tests.ascend_sim.build import build
from tests.support.peer import Peer, Remote

_names = itertools.count()


class Product(NamedTuple):
    soc: str
    max_batch: int
    table_version: str


class Outcome(NamedTuple):
    """A report of the other process."""

    status: int
    code: int
    failed: int | None
    message: str
    bytes_done: int
    unconfirmed: tuple[tuple[int, int], ...]


A2 = Product("Ascend910B1", 256, "1.0")
A3 = Product("Ascend910_9391", 256, "1.2")
A950 = Product("Ascend950PR_9599", 64, "1.2")
_IDS = {A2: "A2", A3: "A3", A950: "950"}


def ends_on(*products: Product) -> Any:
    """Return a module's fixture: two ends on each of `products`, which must not leak."""

    @pytest.fixture(scope="module", params=products, ids=[_IDS[product] for product in products])
    def ends(
        request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Ends]:
        with two_ends(tmp_path_factory.mktemp("kvsim"), request.param) as ends:
            yield ends
            assert [end.left() for end in ends.both] == [{}, {}]
        ends.log.rewind()
        assert ends.log.calls("violation") == []

    return ends


def rank_table(version: str, num_hosts: int = 2) -> str:
    """Return a table of two servers with devices 0 and 1, or of one server with both."""
    servers: list[dict[str, Any]] = []
    for rank in range(2):
        device = {"device_id": str(rank), "device_ip": f"10.1.0.{rank + 1}", "rank_id": str(rank)}
        if version == "1.2":
            device["super_device_id"] = str(rank)
        if rank < num_hosts:
            servers.append({"server_id": f"10.0.0.{rank + 1}", "device": []})
        servers[-1]["device"].append(device)
    count = str(num_hosts)
    table: dict[str, Any] = {"version": version, "server_count": count, "server_list": servers}
    if version == "1.2":
        members = [{"server_id": server["server_id"]} for server in servers]
        table["super_pod_list"] = [{"super_pod_id": "0", "server_list": members}]
    return json.dumps(table | {"status": "completed"})


class EndPeer(Peer):
    """The process of an `End`."""

    module = "tests.ascend.hccl_end"


class Ends:
    """Rank 0 on device 0 of one process, and rank 1 on device 1 of another."""

    def __init__(self, folder: Path, variant: str, product: Product, settings: dict[str, str]):
        self.product = product
        self.table = rank_table(product.table_version)
        environment = os.environ | {
            HOME: str(build(variant)),
            "KVSIM_DIR": str(folder),
            "KVSIM_LOG": str(folder / "log"),
            "KVSIM_SOC": product.soc,
        }
        environment.pop(ELSEWHERE, None)
        self.log = Log(folder / "log")
        environment |= settings
        self.both = [
            Remote(EndPeer(str(device), environment=environment), "end") for device in range(2)
        ]

    def __getitem__(self, rank: int) -> Remote:
        return self.both[rank]

    def at_once(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method at both ends at the same time."""
        for end in self.both:
            end.send(method, *arguments)
        return [end.result() for end in self.both]

    def open(self, **options: Any) -> str:
        """Make a communicator at both ends, without bound memory."""
        name = f"communicator_{next(_names)}"
        for rank, end in enumerate(self.both):
            end.open(name, self.table, rank, max_batch=self.product.max_batch, **options)
        return name

    def memory(self, nbytes: int, kind: str = "device") -> list[int]:
        """Allocate and register memory at both ends."""
        addresses = [end.memory(kind, nbytes) for end in self.both]
        for end, address in zip(self.both, addresses, strict=True):
            end.region(address)
        return addresses

    def take_back(self, name: str, addresses: list[int]) -> None:
        """Close a communicator, and free the memory that was bound to it at both ends."""
        for end, address in zip(self.both, addresses, strict=True):
            end.close(name)
            end.deregister(address)
            end.free(address)

    def connect(self, nbytes: int, *, kind: str = "device", staging: dict[str, int] | None = None):
        """Make, bind and prepare a communicator; return its `Connection`."""
        name = self.open()
        addresses = self.memory(nbytes, kind)
        if staging is not None:
            self.both[0].staging(name, **staging)
        self.both[0].bind(name, addresses[0], *([name] if staging is not None else []))
        self.both[1].bind(name, addresses[1])
        self.at_once("prepare", name)
        return Connection(self, name, addresses, staging is not None)

    def finish(self) -> None:
        for end in self.both:
            end.peer.finish()


def reversed_pieces(content: bytes, sizes: list[int]) -> bytes:
    """Return the result of a transfer of `Connection.rows(sizes)` from `content`."""
    cuts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return b"".join(reversed([content[a:b] for a, b in itertools.pairwise(cuts)]))


class Connection:
    """A prepared communicator, with a region at each end."""

    def __init__(self, ends: Ends, name: str, addresses: list[int], staged: bool) -> None:
        self.ends, self.name, self.addresses, self._staged = ends, name, addresses, staged
        ends.log.restart()

    def rows(self, nbytes: list[int], local: int | None = None) -> list[tuple[int, int, int]]:
        """Return adjacent descriptors, in the opposite order at the remote end."""
        local = self.addresses[0] if local is None else local
        rows, at, end = [], local, self.addresses[1] + sum(nbytes)
        for size in nbytes:
            end -= size
            rows.append((at, end, size))
            at += size
        return rows

    def transfer(self, direction: str, rows: Any, **options: Any) -> Outcome:
        return Outcome(**self.ends[0].transfer(self.name, direction, rows, **options))

    def start(self, direction: str, rows: Any, **options: Any) -> None:
        self.ends[0].start(self.name, self.name, direction, rows, **options)

    def begin(self, direction: str, rows: Any, **options: Any) -> None:
        """Start a transfer, and return once some of it was issued."""
        self.start(direction, rows, **options)
        call, pid = f"HcclBatch{direction.capitalize()}", self.ends[0].peer.pid
        while not self.ends.log.calls(call, pid=pid):
            pass

    def wait(self, timeout_ms: float | None = 20000) -> Outcome:
        return Outcome(**self.ends[0].wait(self.name, timeout_ms))

    def hanging(self, direction: str, rows: Any, **options: Any) -> Outcome:
        """Transfer until all planned faults have happened, and then to a deadline."""
        self.start(direction, rows, **options)
        while self.ends[0].faults_left_now():
            pass
        return self.wait(50)

    def close_communicator(self) -> None:
        for end in self.ends.both:
            end.close(self.name)

    def close(self) -> None:
        """Close both ends, and check that nothing is left."""
        self.close_communicator()
        for end, address in zip(self.ends.both, self.addresses, strict=True):
            end.deregister(address)
            end.free(address)
        if self._staged:
            self.ends[0].close_staging(self.name)


@contextmanager
def two_ends(
    folder: Path, product: Product = A2, variant: str = "8.5", **settings: object
) -> Iterator[Ends]:
    """Yield two ends. Settings are environment variables, such as KVSIM_LATENCY_US=1000."""
    ends = Ends(
        folder, variant, product, {name: str(setting) for name, setting in settings.items()}
    )
    try:
        yield ends
    finally:
        ends.finish()
