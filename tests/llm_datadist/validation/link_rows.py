"""Links, roles and the life of the one engine of a process."""

from __future__ import annotations

import json
import socket

from kvplan.llm_datadist import LLMClusterInfo, LLMDataDist, LLMRole, LLMStatusCode
from tests.llm_datadist.validation.environments import (
    CACHE_MANAGER,
    CLUSTER,
    REMOTE,
    Engine,
    Fresh,
    Linked,
    cluster,
)
from tests.llm_datadist.validation.row import INVALID, TYPE, VALUE, Accepted, Raised, Row, status

SUCCESS, FAILED = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_FAILED
PARAM_INVALID = LLMStatusCode.LLM_PARAM_INVALID
LINK_FAILED, UNLINK_FAILED = LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_UNLINK_FAILED
RANK_TABLE = json.dumps(
    {
        "version": "1.0",
        "server_count": "1",
        "server_list": [
            {
                "server_id": "127.0.0.1",
                "device": [{"device_id": f"{rank}", "rank_id": f"{rank}"} for rank in range(2)],
            }
        ],
        "status": "completed",
    }
)


def row(case: str, official: Accepted | Raised, call: object, environment: str = "engine") -> Row:
    return Row(case, official, call, environment)  # type: ignore[arg-type]


def outcome_of(code: LLMStatusCode, *each: LLMStatusCode) -> Accepted:
    """Return the code that link_clusters or unlink_clusters returned, for one cluster or none."""
    return Accepted((code, list(each)))


def first_communicator(fresh: Fresh) -> int:
    fresh.init(REMOTE)
    comm_id: int = fresh.datadist.link("ranks", {1: 0, CLUSTER: 0}, RANK_TABLE)
    fresh.datadist.unlink(comm_id)
    return comm_id


def without_local_ip(engine: Engine) -> object:
    given = LLMClusterInfo()
    given.remote_cluster_id = 1
    given.append_remote_ip_info("127.0.0.1", 1)
    return engine.datadist.link_clusters([given])


def port_without_listener(engine: Engine) -> object:
    # bound and not listening, so that no other program gets this port
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return engine.datadist.link_clusters([cluster(1, f"127.0.0.1:{bound.getsockname()[1]}")])


def never_linked(engine: Engine, force: bool) -> object:
    return engine.datadist.unlink_clusters([cluster(1, "127.0.0.1:1")], force=force)


def same_role(linked: Linked) -> None:
    linked.datadist.switch_role(LLMRole.PROMPT)


def second_object(engine: Engine) -> None:
    LLMDataDist(LLMRole.PROMPT, CLUSTER + 1).init(CACHE_MANAGER)


def again_after_finalize(fresh: Fresh) -> None:
    fresh.init(CACHE_MANAGER)
    fresh.datadist.finalize()
    fresh.datadist.init(CACHE_MANAGER)


LINK = [
    row(
        "link not incl self",
        INVALID,
        lambda e: e.datadist.link("ranks", {1: 0, CLUSTER + 1: 1}, RANK_TABLE),
    ),
    row("link dup rank", Accepted(1), first_communicator, "fresh"),
    row(
        "link rank_table None",
        TYPE,
        lambda e: e.datadist.link("ranks", {1: 0, CLUSTER: 1}, None),
    ),
    row("link_clusters []", outcome_of(PARAM_INVALID), lambda e: e.datadist.link_clusters([])),
    row(
        "link_clusters timeout -1",
        INVALID,
        lambda e: e.datadist.link_clusters([cluster(1, "127.0.0.1:1")], timeout=-1),
    ),
    row("link_clusters no local ip", INVALID, without_local_ip),
    row("unlink -1", VALUE, lambda e: e.datadist.unlink(-1)),
    row("unlink_clusters id unset", TYPE, lambda e: e.datadist.unlink_clusters([LLMClusterInfo()])),
]

ROLE = [
    Row(
        "switch_role None",
        Raised(KeyError),
        lambda e: e.datadist.switch_role(None),
        "engine",
        ours=TYPE,
        why="None is not a role; a wrong type is a TypeError everywhere else (defect 8)",
    ),
    row("switch_role same role", status(LLMStatusCode.LLM_EXIST_LINK), same_role, "linked"),
]

LIFE = [
    row("kv_cache_manager", INVALID, lambda e: e.datadist.kv_cache_manager),
    row("check_link_status", INVALID, lambda e: e.datadist.check_link_status(1)),
    row("init again same obj", Accepted(None), lambda e: e.datadist.init(CACHE_MANAGER)),
    row("init 2nd object", status(FAILED), second_object),
]

OUTCOMES = [
    row(
        "link_clusters refused port -> return value",
        outcome_of(LINK_FAILED, LINK_FAILED),
        port_without_listener,
    ),
    row(
        "unlink_clusters never linked, force",
        outcome_of(SUCCESS, SUCCESS),
        lambda e: never_linked(e, force=True),
    ),
    row(
        "unlink_clusters never linked, no force",
        outcome_of(UNLINK_FAILED, UNLINK_FAILED),
        lambda e: never_linked(e, force=False),
    ),
    row("init after finalize (same obj)", Accepted(None), again_after_finalize, "fresh"),
]

ROWS = [*LINK, *ROLE, *LIFE, *OUTCOMES]
