"""The symmetric form: both ends call `link` with one name, and neither listens anywhere."""

from __future__ import annotations

import time
from pathlib import Path

from kvplan import (
    CacheDesc,
    CacheIndex,
    DataType,
    LlmDataDist,
    LLMStatusCode,
    RegisterMemStatus,
)
from tests.datadist.conftest import MakeEngine
from tests.support.refusals import refused

DESC = CacheDesc(2, (4, 64), DataType.DT_INT8)


def settled(engine: LlmDataDist, comm_id: int) -> RegisterMemStatus:
    deadline = time.monotonic() + 10
    while engine.query_register_mem_status(comm_id) is RegisterMemStatus.PREPARING:
        assert time.monotonic() < deadline
    return engine.query_register_mem_status(comm_id)


def test_a_pull_says_why_a_rendezvous_has_failed(make_engine: MakeEngine, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    engine = make_engine(1, comm_dir=str(tmp_path))
    comm_id = engine.link("both", {1: 0, 2: 1})
    assert settled(engine, comm_id) is RegisterMemStatus.FAILED
    mine = engine.allocate_cache(DESC)
    with refused(LLMStatusCode.LLM_NOT_YET_LINK, r"communicator 'both': .*must be 0700"):
        engine.pull_cache(CacheIndex(2, 1), mine)


def test_engines_link_by_a_common_name(make_engine: MakeEngine, tmp_path: Path) -> None:
    engines = [make_engine(cluster_id, comm_dir=str(tmp_path)) for cluster_id in (1, 2)]
    begun = [(it, it.link("both", {1: 0, 2: 1})) for it in engines]
    assert [settled(*it) for it in begun] == [RegisterMemStatus.OK] * 2
    owner, user = engines
    owner.arrays(owner.allocate_cache(DESC))[0][:] = 4
    mine = user.allocate_cache(DESC)
    user.pull_cache(CacheIndex(1, 1), mine)
    assert (user.arrays(mine)[0][0] == 4).all()
    engine, comm_id = begun[0]
    engine.unlink(comm_id)
    with refused(LLMStatusCode.LLM_NOT_YET_LINK):
        engine.query_register_mem_status(comm_id)
