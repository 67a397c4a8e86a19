"""Links whose ends lack rights: the denials at each end, and the transport that is used instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from tests.datadist.peer import OnItsOwn
from tests.support import peer
from tests.support.rights import (
    NO_CAPABILITIES,
    NOT_DUMPABLE,
    USER_NAMESPACE,
    denying,
    needs_root,
    needs_users,
)

NO_PROCESS_VM = denying("process_vm_readv", "process_vm_writev")
NO_WRITEV = denying("process_vm_writev")
NO_PIDFD = denying("pidfd_open")

BEGIN = """
    import logging
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append((record.levelname, record.getMessage()))
    logging.getLogger("kvplan").addHandler(handler)
    logging.getLogger("kvplan").setLevel(logging.INFO)
    engine = LlmDataDist(cluster_id, LlmRole.MIX)
    engine.initialize({"llm.ListenIpInfo": "127.0.0.1:0"} | options)
    desc = kvplan.CacheDesc(2, (4, 16), kvplan.DataType.DT_UINT8)
    pool = engine.allocate_blocks_cache(desc, kvplan.BlocksCacheKey(cluster_id, 1))
    engine.write_cache(pool, [np.full((4, 16), 10 * cluster_id, np.uint8) for _ in range(2)])
    arrays = [np.full((4, 16), 10 * cluster_id + 1, np.uint8) for _ in range(2)]
    own = engine.register_blocks_cache(
        desc, [each.ctypes.data for each in arrays], kvplan.BlocksCacheKey(cluster_id, 2)
    )
    mine = engine.allocate_blocks_cache(desc)
    result = engine.listen_address
"""
PULL = """
    def read(model_id):
        key = kvplan.BlocksCacheKey(peer, model_id)
        engine.pull_blocks(key, mine, [1], [2])
        plan = engine.plan(kvplan.Transfer(kvplan.Rows(key, [1]), kvplan.Rows(mine, [2])))
        over = next(line for line in plan.explain().splitlines() if line.startswith("  over "))
        return int(engine.arrays(mine, copy=True)[1][2, 3]), over.split()[1], over
    result = {"pool": read(1), "own": read(2)}
"""
STATUS = """
    (link,) = engine.links()
    (line,) = [text for level, text in messages if level == "INFO" and "state=LINKED" in text]
    result = link.transport, "; ".join(link.passed_over), line
"""


class End(OnItsOwn):
    """An engine in a process with few rights, on the host only."""

    def __init__(
        self,
        cluster_id: int,
        *lost: str,
        prefix: Sequence[str] = (),
        **options: str,
    ) -> None:
        super().__init__("host", prefix=prefix)
        try:
            self.address = str(self.run(*lost, BEGIN, cluster_id=cluster_id, options=options))
        except BaseException:
            self.close()
            raise

    def link(self, other: End) -> None:
        self.run(
            "engine.link_clusters([kvplan.ClusterInfo(2, address)], 20_000).raise_for_status()",
            address=other.address,
        )


class Case(NamedTuple):
    """Rights that the ends lack, and the result.

    Attributes:
        lost: The rights that the first end, which links, and the second end lack.
        transport: The transports of the link.
        own: The transport to registered memory of the other end, at the first and the second.
        reason: A part of the reason that both ends report.
    """

    lost: tuple[str, str]
    transport: str
    own: tuple[str, str]
    reason: str


CASES = {
    "all rights": Case(("", ""), "local", ("local:", "local:"), ""),
    "the first cannot read": Case(
        (NO_PROCESS_VM, ""), "local+tcp", ("tcp:", "local:"), "local: cluster 1: peer"
    ),
    "the second cannot read": Case(
        ("", NO_PROCESS_VM), "local+tcp", ("local:", "tcp:"), "local: cluster 2: peer"
    ),
    "the first cannot write": Case(
        (NO_WRITEV, ""), "local+tcp", ("tcp:", "local:"), "process_vm_writev"
    ),
    "the first has no pidfd": Case(
        (NO_PIDFD, ""), "tcp", ("tcp:", "tcp:"), "local: cluster 1: peer"
    ),
    "the second has no pidfd": Case(
        ("", NO_PIDFD),
        "tcp",
        ("tcp:", "tcp:"),
        "a seccomp filter is active: let it pass pidfd_open",
    ),
    "the first is not dumpable": Case(
        (NOT_DUMPABLE, ""), "tcp", ("tcp:", "tcp:"), "local: cluster 2: peer"
    ),
    "the second is not dumpable": Case(
        ("", NOT_DUMPABLE), "tcp", ("tcp:", "tcp:"), "local: cluster 1: peer"
    ),
}


@pytest.fixture
def make_end() -> Iterator[Callable[..., End]]:
    with ExitStack() as ends:

        def make(cluster_id: int, *lost: str, **given: Any) -> End:
            end = End(cluster_id, *lost, **given)
            ends.callback(end.close)
            return end

        yield make


def check(first: End, second: End, case: Case) -> None:
    """Link, and read memory of both kinds from both ends."""
    first.link(second)
    for end, other, own in ((first, 2, case.own[0]), (second, 1, case.own[1])):
        pool = "local:" if "local" in case.transport else "tcp:"
        read = end.run(PULL, peer=other)
        assert read["pool"][:2] == (10 * other, pool)
        assert read["own"][:2] == (10 * other + 1, own)
        for _, transport, explained in read.values():
            assert ("(not local: cluster" in explained) is (transport == "tcp:")
        transport, passed_over, line = end.run(STATUS)
        assert transport == case.transport
        assert "hccl: cluster 1 does not have it: no Ascend device was found" in passed_over
        assert case.reason in passed_over
        assert f" transport={transport} " in line
        assert f"passed_over={passed_over!r}" in line


@pytest.mark.parametrize("name", CASES)
def test_each_kind_of_memory_uses_a_transport_that_both_ends_may_use(
    make_end: Callable[..., End], name: str
) -> None:
    case = CASES[name]
    ends = [make_end(number, NO_CAPABILITIES, lost) for number, lost in enumerate(case.lost, 1)]
    check(*ends, case)


@needs_root
@pytest.mark.parametrize("lacking", [1, 2])
def test_an_end_without_the_capabilities_of_the_other(
    make_end: Callable[..., End], lacking: int
) -> None:
    ends = [
        make_end(cluster_id, NO_CAPABILITIES if cluster_id == lacking else "")
        for cluster_id in (1, 2)
    ]
    reason = "the peer holds capabilities that this process lacks"
    check(ends[0], ends[1], Case(("", ""), "tcp", ("tcp:", "tcp:"), reason))


@needs_users
def test_an_end_in_another_user_namespace(make_end: Callable[..., End]) -> None:
    ends = make_end(1, prefix=USER_NAMESPACE), make_end(2, NO_CAPABILITIES)
    reason = "the peer is in another user namespace"
    check(*ends, Case(("", ""), "tcp", ("tcp:", "tcp:"), reason))


def test_local_alone_says_what_it_does_not_reach(make_end: Callable[..., End]) -> None:
    option = {"kvplan.transport": "local"}
    first = make_end(1, NO_CAPABILITIES, NO_PROCESS_VM, **option)
    second = make_end(2, NO_CAPABILITIES, **option)
    first.link(second)
    with pytest.raises(peer.RemoteError, match="let it pass pidfd_open") as caught:
        first.run(PULL, peer=2)
    assert "LLM_LINK_FAILED" in caught.value.message
    transport, passed_over, _ = second.run(STATUS)
    assert transport == "local"
    assert "local: cluster 1: peer" in passed_over
