"""The tests' side of peer_process.py: an engine of hixl in another process."""

from __future__ import annotations

from tests.hixl.places import MIB, free_name
from tests.support import peer


class Peer(peer.Peer):
    """A process with a listening `engine` called `name`, and its `memory` at `address`."""

    module = "tests.hixl.peer_process"
    flags = ("-W", "error")

    def __init__(self, place: str = "host", nbytes: int = MIB) -> None:
        super().__init__(place)
        try:
            self.begin(nbytes)
        except BaseException:
            self.close()
            raise

    def begin(self, nbytes: int = MIB) -> None:
        """Make an engine in the process."""
        self.name = free_name()
        self.address, self.handle = self.run(
            """
            engine = hixl.Hixl()
            assert engine.initialize(name, place.options | more) == hixl.SUCCESS
            memory = registered(engine, place, nbytes)
            result = memory.address, memory.handle
            """,
            name=self.name,
            nbytes=nbytes,
            more={},
        )

    def fill(self, seed: int) -> None:
        self.run("memory.array[:] = pattern(len(memory.array), seed)", seed=seed)

    def bytes(self) -> bytes:
        """Return the content of its memory."""
        return bytes(self.run("result = memory.array.tobytes()"))

    def end(self) -> None:
        self.run("engine.finalize()")
        self.close()
