"""Properties of LLMConfig: values that may be set, and values that are read back."""

from __future__ import annotations

from json import JSONDecodeError

from kvplan.llm_datadist import LLMConfig
from tests.llm_datadist.validation.row import INVALID, TYPE, VALUE, Accepted, Raised, Row

SAME = Accepted("what was set")

PROPERTIES: dict[str, list[tuple[object, Accepted | Raised]]] = {
    "device_id": [
        (-1, INVALID),
        (0, SAME),
        ("0", TYPE),
        (2**31, VALUE),
        ([0, -1], INVALID),
        ((0, 1), SAME),
        (True, SAME),
        (1.5, TYPE),
        (None, TYPE),
        ([], SAME),
    ],
    "sync_kv_timeout": [
        (0, INVALID),
        (-1, INVALID),
        ("0", INVALID),
        ("5", SAME),
        ("-5", INVALID),
        ("x", INVALID),
        (2**31, VALUE),
        (1.5, TYPE),
        (None, TYPE),
    ],
    "link_total_time": [
        (-1, INVALID),
        (0, SAME),
        (2**32 - 1, SAME),
        (2**32, INVALID),
        ("1", TYPE),
    ],
    "link_retry_count": [
        (0, INVALID),
        (1, SAME),
        (100, SAME),
        (101, INVALID),
    ],
    "rdma_traffic_class": [
        (-1, VALUE),
        (0, SAME),
        (300, SAME),
        (2**32, VALUE),
        ("1", TYPE),
        (None, TYPE),
    ],
    "rdma_service_level": [
        (-1, VALUE),
        (8, SAME),
        (2**32, VALUE),
    ],
    "mem_utilization": [
        (0.0, SAME),
        (1.0, SAME),
        (1.1, INVALID),
        (-0.1, INVALID),
        (1, TYPE),
        (None, TYPE),
    ],
    "enable_cache_manager": [
        (1, TYPE),
        (True, SAME),
        (None, Accepted(False)),
    ],
    "listen_ip_info": [
        (123, TYPE),
        ("", SAME),
        (None, SAME),
    ],
    "local_comm_res": [
        ("", SAME),
        (None, Accepted("")),
        ({}, TYPE),
    ],
    "ge_options": [
        ({}, SAME),
        ({"a": 1}, TYPE),
        ([1], TYPE),
    ],
    "global_resource_config": [
        ("{bad", SAME),
        (1, TYPE),
    ],
    "transfer_backend": [
        ("hixl", SAME),
        ("zzz", SAME),
        (1, TYPE),
    ],
    "cluster_info": [
        ("{}", SAME),
        ("notjson", Raised(JSONDecodeError)),
        (1, TYPE),
    ],
}

DIFFERENT = {
    "LLMConfig.device_id = True": (
        TYPE,
        "a bool is not a number; the official package refuses bools since 7bf37005",
    ),
    "LLMConfig.cluster_info = 'notjson'": (
        INVALID,
        "a refused value raises an LLMException of the interface (defect 8)",
    ),
}


def set_and_read(name: str, value: object) -> object:
    config = LLMConfig()
    setattr(config, name, value)
    return getattr(config, name)


def row(name: str, value: object, official: Accepted | Raised) -> Row:
    case = f"LLMConfig.{name} = {value!r}"
    ours, why = DIFFERENT.get(case, (None, ""))
    return Row(
        case,
        Accepted(value) if official is SAME else official,
        lambda: set_and_read(name, value),
        ours=ours,
        why=why,
    )


ROWS = [row(name, *each) for name, values in PROPERTIES.items() for each in values]
