"""Two ends over UCX find each other, whichever has it loaded; what each lacks is told."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvplan import ClusterInfo, LlmDataDist, LLMException, LlmRole, LLMStatusCode, Options
from kvplan.transport.protocol import DeviceRange
from kvplan.transport.ucx.library import OVERRIDE, Found
from kvplan.transport.ucx.link import UcxLink
from kvplan.transport.ucx.metadata import Metadata
from kvplan.transport.ucx.transport import UcxTransport

pytestmark = pytest.mark.usefixtures("ucx")
SESSION = b"session 16 bytes"


@pytest.fixture
def ends() -> Iterator[tuple[UcxTransport, UcxTransport]]:
    with UcxTransport(mode="gathered") as one, UcxTransport(mode="gathered") as two:
        yield one, two


def connect(one: UcxTransport, two: UcxTransport) -> tuple[UcxLink, UcxLink]:
    theirs = [it.metadata(()) for it in (two, one)]
    with ThreadPoolExecutor(2) as threads:
        calls = [
            threads.submit(it.connect, metadata, timeout_ms=10_000, session=SESSION)
            for it, metadata in zip((one, two), theirs, strict=True)
        ]
        first, second = (it.result() for it in calls)
    return first, second


@pytest.mark.parametrize("ready", ["one", "both"])
def test_one_end_that_is_loaded_is_enough(
    ends: tuple[UcxTransport, UcxTransport], ready: str
) -> None:
    one, two = ends
    one.ready()
    if ready == "both":
        two.ready()
    links = connect(one, two)
    for link in links:
        link.check()
        assert re.fullmatch("gathered over tcp/.+", link.way)
        assert link.finds_freed == "before"
    links[0].close()
    with pytest.raises(LLMException, match="is closed") as refused:
        links[0].check()
    assert refused.value.status_code is LLMStatusCode.LLM_NOT_YET_LINK
    assert links[0].death_fd is None


def test_what_was_registered_before_it_was_loaded_is_served(
    ends: tuple[UcxTransport, UcxTransport],
) -> None:
    one, two = ends
    before, gone = (one.register(np.full(100, it, np.uint8)) for it in (1, 2))
    one.deregister(gone)
    one.ready()
    after = one.register(np.full(100, 3, np.uint8))
    assert before.range.slot != after.range.slot
    assert before.range.generation != after.range.generation
    _, link = connect(one, two)
    for it in (before, after):
        link.memory([it.address], it.nbytes, metadata=one.metadata([it])).check()
    with pytest.raises(LLMException, match="is not inside one range"):
        link.memory([gone.address], 100, metadata=one.metadata([before]))


def test_the_peer_never_comes(ends: tuple[UcxTransport, UcxTransport]) -> None:
    one, two = ends
    two.ready()
    with pytest.raises(LLMException, match=r"has not answered over tcp/.* within 100 ms") as late:
        one.connect(two.metadata(()), timeout_ms=100, session=SESSION)
    assert late.value.status_code is LLMStatusCode.LLM_LINK_FAILED


def test_who_cannot_be_reached(ends: tuple[UcxTransport, UcxTransport]) -> None:
    one, _ = ends
    assert "is this transport itself" in str(one.refusal(one.metadata(())))
    assert "no JSON" in str(one.refusal(b"{"))
    forged = Metadata("0" * 32, "node7", 7, "one_sided")
    refusal = str(one.refusal(forged.to_bytes()))
    assert "process 7 of node7 uses UCX one_sided, this process gathered" in refusal
    assert "kvplan.ucx_mode" in refusal


def test_versions_that_do_not_meet_over_the_loopback(
    ends: tuple[UcxTransport, UcxTransport],
) -> None:
    one, _ = ends
    one.ready()
    old = Metadata("0" * 32, "node7", 7, "gathered", "1.13.1", "tcp/lo tcp/eth0")
    assert "which do not work together over the loopback" in str(one.refusal(old.to_bytes()))


def test_no_more_than_there_are_slots() -> None:
    memory = np.zeros(8, np.uint8)
    with UcxTransport(mode="gathered", max_registrations=2) as transport:
        first = transport.register(memory)
        transport.register(memory)
        with pytest.raises(LLMException, match="all 2 registrations are taken") as full:
            transport.register(memory)
        assert full.value.status_code is LLMStatusCode.LLM_OUT_OF_MEMORY
        transport.deregister(first)
        transport.deregister(first)
        assert transport.register(memory).range.slot == first.range.slot
    with pytest.raises(LLMException, match=r"max_registrations=0 .*\[1, 65536\]"):
        UcxTransport(mode="gathered", max_registrations=0)


def test_memory_of_a_device_is_refused(ends: tuple[UcxTransport, UcxTransport]) -> None:
    with pytest.raises(LLMException, match="is of a device") as refused:
        ends[0].register(DeviceRange(4096, 4096))
    assert refused.value.status_code is LLMStatusCode.LLM_FEATURE_NOT_ENABLED


def test_a_device_that_is_none() -> None:
    none = UcxTransport(mode="gathered", devices="none7")
    with none as transport, UcxTransport(mode="gathered") as peer:
        assert transport.refusal(peer.metadata(())) is None  # nobody has looked yet
        with pytest.raises(LLMException, match=r"(?s)cannot be used gathered: .*none7"):
            transport.ready()
        assert "none7" in str(transport.refusal(peer.metadata(())))


@pytest.mark.parametrize("lacks", ["the caller", "the called"])
def test_who_lacks_it_is_named_with_what_to_do(ucx: Found, lacks: str) -> None:
    """Engines that would be on two hosts: one without UCX, the other without anything else."""
    with ExitStack() as held:
        owner, user = (held.enter_context(LlmDataDist(it, LlmRole.MIX)) for it in (1, 2))
        lacking, having = (user, owner) if lacks == "the caller" else (owner, user)
        listen = {owner: "127.0.0.1:0", user: ""}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(OVERRIDE, "")
            lacking.initialize(Options(listen_ip_info=listen[lacking]))
        having.initialize(Options(listen_ip_info=listen[having], transport="ucx"))
        assert owner.listen_address is not None
        (result,) = user.link_clusters([ClusterInfo(1, owner.listen_address)])
    assert result.status is LLMStatusCode.LLM_LINK_FAILED
    message = str(result.error)
    assert "no transport between cluster 1 and cluster 2" in message
    who = lacking.cluster_id
    assert f"ucx: cluster {who} does not" in message
    assert "pip install 'kvplan[ucx]'" in message


def test_what_is_closed_has_no_files_any_more() -> None:
    """Not even for as long as something refers to it: others may want the ports."""
    files, before, kept = Path("/proc/self/fd"), 0, []
    for _ in range(2):  # UCX has some of its own from the first time on
        before = len(list(files.iterdir()))
        ends = UcxTransport(mode="gathered"), UcxTransport(mode="gathered")
        ends[0].ready()
        kept += [*connect(*ends), *ends]
        assert len(list(files.iterdir())) > before
        for it in kept:
            it.close()
    assert len(list(files.iterdir())) == before


def test_a_forked_child_forgets(ends: tuple[UcxTransport, UcxTransport]) -> None:
    one, two = ends
    one.ready()
    link, _ = connect(one, two)
    if (child := os.fork()) == 0:
        status = 1
        try:
            with pytest.raises(LLMException, match="forked child"):
                link.check()
            with pytest.raises(LLMException, match="forked child"):
                one.metadata(())
            link.close()
            one.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    link.check()
