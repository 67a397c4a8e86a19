"""The other end has another version of UCX, or none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.across import other_ucx
from tests.across.conftest import MakeEngine
from tests.across.engine import OWN_PROCESSES
from tests.across.other_ucx import NotHereError, debian
from tools.namespaces import Namespace

OLD_WHEEL = "1.14.1.post1"


def old_wheel() -> tuple[str, ...]:
    return other_ucx.wheel(OLD_WHEEL)


@pytest.mark.parametrize("version", [old_wheel, debian])
def test_another_version(
    hosts: list[Namespace], make_engine: MakeEngine, version: Callable[[], tuple[str, ...]]
) -> None:
    """Both ways of linking, both directions of moving."""
    try:
        before = version()
    except NotHereError as error:
        pytest.skip(str(error))
    other, ours = make_engine(hosts[0], 1, *before), make_engine(hosts[1], 2)
    for caller, called in ((ours, other), (other, ours)):
        caller.link(called)
        for mover, peer in ((ours, other), (other, ours)):
            for direction in ("pull", "push"):
                source, target = (peer, mover) if direction == "pull" else (mover, peer)
                source.hold(seed=1)
                target.hold(seed=None)
                outcome = mover.move(direction, peer)
                assert outcome.status == "LLM_SUCCESS", outcome
                target.check(seed=1)
        caller.run(f"it.datadist.unlink_clusters([{called.cluster_id}]).raise_for_status()")


@pytest.mark.parametrize("which", [0, 1])
def test_none(hosts: list[Namespace], make_engine: MakeEngine, which: int) -> None:
    """Whoever calls is told what to install, and where."""
    lacks = [(), ()]
    lacks[which] = ("env", "KVPLAN_UCX_LIBRARY=", *OWN_PROCESSES)
    here, there = (
        make_engine(host, number, *before, transport="auto")
        for number, (host, before) in enumerate(zip(hosts, lacks, strict=True), 1)
    )
    cluster = f"ClusterInfo(2, {there.address!r})"
    (status, text), *_ = here.run(
        f"results = it.datadist.link_clusters([{cluster}], 5000)\n"
        "result = [(each.status.name, str(each.error)) for each in results]"
    )
    assert status == "LLM_LINK_FAILED"
    assert "pip install 'kvplan[ucx]'" in text
