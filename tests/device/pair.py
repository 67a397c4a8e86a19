"""Two linked engines on devices in one process; one of them also computes."""

from __future__ import annotations

from typing import Any

from kvplan import BlocksCacheKey, ClusterInfo, LlmDataDist, LlmRole, Options
from tests.ascend.simulator import Controls
from tests.device.compute import compute_on
from tests.device.engines import DEVICE

A_WHILE = 20.0  # milliseconds
FOREVER = 60_000.0


def row(value: int) -> int:
    """Return the 16-bit number whose two bytes have this value."""
    return value * 0x0101


def still_pending(task: Any) -> bool:
    return not task.wait_done(A_WHILE)


class Pair:
    """A prefill engine that computes on device 3, and a decode engine on device 4."""

    def __init__(self, simulator: Controls, engine: type[LlmDataDist]) -> None:
        self.decode, self.prefill = engine(4, LlmRole.DECODER), engine(3, LlmRole.PROMPT)
        for node_engine in (self.decode, self.prefill):
            node_engine.initialize(Options(listen_ip_info="127.0.0.1:0"))
        self.theirs = self.decode.allocate_blocks_cache(DEVICE, BlocksCacheKey(4))
        self.mine = self.prefill.allocate_blocks_cache(DEVICE)
        address = self.decode.listen_address
        self.prefill.link_clusters([ClusterInfo(4, address)]).raise_for_status()
        self.compute = compute_on(simulator)

    def arrived(self) -> list[Any]:
        return self.decode.arrays(self.theirs, copy=True)

    def close(self) -> None:
        self.compute.close()
        for engine in (self.prefill, self.decode):
            engine.finalize()
