"""The tests' side of peer_process.py: an agent of NIXL in another process."""

from __future__ import annotations

from tests.support import peer

MIB = 1 << 20


class Peer(peer.Peer):
    """A process with an agent "there", and `memory` of this size at `address`."""

    module = "tests.nixl.peer_process"

    def __init__(self, nbytes: int = MIB) -> None:
        super().__init__()
        try:
            self.address, self.metadata = self.run(
                """
                memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
                memory[:] = np.resize(np.arange(251, dtype=np.uint8), nbytes)
                agent = nixl_agent("there")
                region = memory.ctypes.data, nbytes, 0, "kv of there"
                registered = agent.register_memory([region], "DRAM")
                result = memory.ctypes.data, agent.get_agent_metadata()
                """,
                nbytes=nbytes,
            )
        except BaseException:
            self.close()
            raise
