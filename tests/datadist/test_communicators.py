"""Symmetric linking: both ends call `link` with the same name, and neither has a listen address."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvplan import CacheDesc, CacheIndex, DataType, LlmDataDist, LLMStatusCode, RegisterMemStatus
from tests.datadist.conftest import MakeEngine
from tests.datadist.peer import OnItsOwn
from tests.support.refusals import refused
from tests.support.rights import OWN_MOUNTS, needs_mounts

DESC = CacheDesc(2, (4, 64), DataType.DT_INT8)


def settled(engine: LlmDataDist, comm_id: int) -> RegisterMemStatus:
    deadline = time.monotonic() + 60
    while engine.query_register_mem_status(comm_id) is RegisterMemStatus.PREPARING:
        assert time.monotonic() < deadline
    return engine.query_register_mem_status(comm_id)


def test_the_error_of_a_pull_names_the_failure_of_the_rendezvous(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    engine = make_engine(1, comm_dir=str(tmp_path))
    comm_id = engine.link("both", {1: 0, 2: 1})
    assert settled(engine, comm_id) is RegisterMemStatus.FAILED
    mine = engine.allocate_cache(DESC)
    with refused(LLMStatusCode.LLM_NOT_YET_LINK, r"communicator 'both': .*must be 0700"):
        engine.pull_cache(CacheIndex(2, 1), mine)


LINK = """
    engine = LlmDataDist(cluster_id, LlmRole.MIX)
    engine.initialize({"llm.LinkTotalTime": seconds} | options)
    comm_id = engine.link("both", {1: 0, 2: 1})
"""
SETTLE = """
    from tests.datadist.test_communicators import settled
    cache = engine.allocate_cache(kvplan.CacheDesc(1, (1, 64), kvplan.DataType.DT_INT8))
    result = settled(engine, comm_id).name, str(engine._engine.links._transitions.errors.get(other))
"""


@needs_mounts
@pytest.mark.parametrize("shared", [False, True])
def test_containers_share_a_directory_or_report_their_own(short_folder: Path, shared: bool) -> None:
    """Each engine has its own runtime directory, like /tmp of a container."""
    runtime, common = short_folder / "runtime", short_folder / "common"
    for directory in (runtime, common):
        directory.mkdir(mode=0o700)
    mount = f'mount -t tmpfs tmpfs {runtime} && exec "$@"'
    prefix = [*OWN_MOUNTS, "sh", "-c", mount, "-"]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
    options = {"kvplan.comm_dir": str(common)} if shared else {}
    with ExitStack() as held:
        ends = [OnItsOwn("host", prefix=prefix, environment=environment) for _ in range(2)]
        for cluster_id, end in enumerate(ends, 1):
            held.callback(end.close)
            end.run(LINK, cluster_id=cluster_id, options=options, seconds="10" if shared else "1")
        found = [end.run(SETTLE, other=other) for end, other in zip(ends, (2, 1), strict=True)]
    if shared:
        assert [status for status, _ in found] == ["OK", "OK"]
        return
    waited = ("cluster 2 has not connected to ", "cluster 1 has not listened at ")
    for (status, why), text in zip(found, waited, strict=True):
        assert status == "FAILED"
        assert f"{text}ipc://{runtime}/kvplan/" in why
        assert "a member in another container" in why
        assert "share one (kvplan.comm_dir), or give each container its own server_id" in why


def test_engines_link_by_a_common_name(make_engine: MakeEngine, tmp_path: Path) -> None:
    engines = [make_engine(cluster_id, comm_dir=str(tmp_path)) for cluster_id in (1, 2)]
    begun = [(item, item.link("both", {1: 0, 2: 1})) for item in engines]
    assert [settled(*item) for item in begun] == [RegisterMemStatus.OK] * 2
    owner, user = engines
    owner.arrays(owner.allocate_cache(DESC))[0][:] = 4
    mine = user.allocate_cache(DESC)
    user.pull_cache(CacheIndex(1, 1), mine)
    assert (user.arrays(mine)[0][0] == 4).all()
    engine, comm_id = begun[0]
    engine.unlink(comm_id)
    with refused(LLMStatusCode.LLM_NOT_YET_LINK):
        engine.query_register_mem_status(comm_id)
