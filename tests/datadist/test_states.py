"""States of Mamba and linear attention between unequal tensor parallelism, beside attention."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvplan import BlockLease, ClusterInfo, LlmDataDist, LlmRole, Rows, Transfer
from tests.datadist.peer import Peer
from tests.datadist.states import MODELS, Rank, blocks_of, whole

OFFER = """
from tests.datadist.states import MODELS, Rank, blocks_of, whole

model, engines, held, result = MODELS[name], [], [], []
for rank in range(ranks):
    engine = LlmDataDist(10 + rank, LlmRole.PROMPT)
    engine.initialize({"ListenIpInfo": "127.0.0.1:0", "kvplan.transport": transport})
    pages = Rank(model, rank, ranks, columns_first)
    pages.fill(whole(model, 1))
    leases = {}
    for part, (desc, tensors) in pages.caches().items():
        cache = engine.register_blocks_cache(desc, tensors)
        leases[part] = engine.lease_blocks(cache, blocks_of(part)).to_bytes()
    engines.append(engine)
    held.append(pages)
    result.append((engine.listen_address, leases))
"""


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    """A process with the engines of all ranks of the other side."""
    peer = Peer()
    yield peer
    peer.close()


@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("theirs", "mine", "transport"),
    [(2, 1, "local"), (1, 2, "tcp"), (4, 2, "local"), (4, 2, "tcp")],
)
def test_a_request_moves_between_ranks(
    peer: Peer, theirs: int, mine: int, transport: str, name: str, columns_first: bool
) -> None:
    """A single transfer moves each projection, the recurrent state, and blocks of attention."""
    model = MODELS[name]
    offered = peer.run(
        OFFER, name=name, ranks=theirs, columns_first=columns_first, transport=transport
    )
    try:
        for rank in range(mine):
            near = [
                index for index in range(theirs) if index * mine // theirs == rank or theirs < mine
            ]
            pages, wanted = (Rank(model, rank, mine, columns_first) for _ in range(2))
            wanted.fill(whole(model, 1))
            with LlmDataDist(20 + rank, LlmRole.DECODER) as engine:
                engine.initialize({"kvplan.transport": transport})
                infos = [ClusterInfo(10 + item, offered[item][0]) for item in near]
                engine.link_clusters(infos, timeout_ms=10_000).raise_for_status()
                transfers = {}
                for part, (desc, tensors) in pages.caches().items():
                    cache = engine.register_blocks_cache(desc, tensors)
                    leases = [BlockLease.from_bytes(offered[item][1][part]) for item in near]
                    transfers[part] = Transfer([*map(Rows, leases)], Rows(cache, blocks_of(part)))
                engine.run(transfers, timeout_ms=30_000)
            for found, expected in zip(pages.pages, wanted.pages, strict=True):
                np.testing.assert_array_equal(found, expected)
    finally:
        peer.run(
            "[one.finalize() for one in engines]; del engines, engine, cache, pages, held, tensors"
        )
