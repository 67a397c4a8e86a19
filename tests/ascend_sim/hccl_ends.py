"""Two processes with a communicator between them, and calls for both of them."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.ascend_sim.build import build
from tests.ascend_sim.hccl_end import DEVICE, config
from tests.support.peer import Peer, Remote

NBYTES = 1 << 16
_names = itertools.count()


class EndPeer(Peer):
    """The process of an `End`."""

    module = "tests.ascend_sim.hccl_end"
    flags = ("-S",)  # the process starts sooner


def start(environment: dict[str, str], variant: str, device: int) -> Remote:
    """Return an `End` in a process of its own."""
    lib64 = str(build(variant) / "lib64")
    return Remote(EndPeer(lib64, str(device), environment=os.environ | environment), "end")


def table(**changes: Any) -> str:
    """Return a rank table of two servers with a device each; `changes` replace its fields."""
    servers = [
        {
            "server_id": f"10.0.0.{rank + 1}",
            "device": [
                {"device_id": str(rank), "device_ip": f"10.1.0.{rank + 1}", "rank_id": str(rank)}
            ],
        }
        for rank in range(2)
    ]
    made = {"version": "1.0", "server_count": "2", "server_list": servers, "status": "completed"}
    return json.dumps({key: value for key, value in (made | changes).items() if value is not None})


class Ends:
    """Rank 0 on device 0 of one process, and rank 1 on device 1 of another."""

    def __init__(self, folder: Path, variant: str, settings: dict[str, str]) -> None:
        self.log_path = folder / "log.jsonl"
        environment = {"KVSIM_DIR": str(folder), "KVSIM_LOG": str(self.log_path)} | settings
        self.both = [start(environment, variant, device) for device in range(2)]
        self.name = f"comm_{next(_names)}"
        self.comms = [0, 0]
        self.memory = [0, 0]
        self.handles = [0, 0]
        self.streams = [0, 0]

    def __getitem__(self, rank: int) -> Remote:
        return self.both[rank]

    def call_both(self, name: str, *arguments: tuple[Any, ...]) -> list[Any]:
        """Call a method at both ends at the same time, each with its own arguments."""
        for end, own in zip(self.both, arguments, strict=True):
            end.send(name, *own)
        return [end.result() for end in self.both]

    def init(self) -> None:
        for rank, end in enumerate(self.both):
            code, self.comms[rank] = end.init(table(), rank, config(self.name))
            assert code == 0

    def bind(self, nbytes: int = NBYTES, kind: int = DEVICE) -> None:
        for rank, end in enumerate(self.both):
            self.memory[rank] = end.allocate(nbytes, kind)
            code, self.handles[rank] = end.register(self.memory[rank], nbytes, kind)
            assert code == 0
            assert end.bind(self.comms[rank], self.handles[rank]) == 0

    def prepare(self, timeout: int = 5) -> list[int]:
        return self.call_both("prepare", *((comm, timeout) for comm in self.comms))

    def connect(self, nbytes: int = NBYTES, kind: int = DEVICE) -> None:
        """Give both ranks memory, a communicator that is prepared, and a stream."""
        self.init()
        self.bind(nbytes, kind)
        assert self.prepare() == [0, 0]
        self.streams = [end.stream() for end in self.both]

    def log(self, call: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log_path.read_text().splitlines()]
        return [line for line in lines if line["call"] == call]

    def close(self) -> None:
        for end in self.both:
            end.peer.finish()


@contextmanager
def two_ends(folder: Path, variant: str = "8.5", **settings: str) -> Iterator[Ends]:
    """Yield two ends. `settings` are environment variables without the prefix KVSIM_."""
    ends = Ends(folder, variant, {f"KVSIM_{name}": value for name, value in settings.items()})
    try:
        yield ends
    finally:
        ends.close()
