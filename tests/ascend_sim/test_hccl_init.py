"""The simulated HCCL: arguments that make a communicator, and refused ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ascend_sim.hccl_end import config
from tests.ascend_sim.hccl_ends import start, table
from tests.support.peer import Remote

PARA, PTR, UNAVAIL, NOT_SUPPORT = 1, 2, 7, 5


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hccl") / "log.jsonl"


@pytest.fixture(scope="module")
def end(log: Path) -> Iterator[Remote]:
    remote = start({"KVSIM_DIR": str(log.parent), "KVSIM_LOG": str(log)}, "8.5", 0)
    yield remote
    remote.peer.finish()


def device(number: str = "0", rank: str = "0", **more: str) -> dict[str, str]:
    return {"device_id": number, "device_ip": f"10.1.0.{int(rank) + 1}", "rank_id": rank} | more


def server(name: str, *devices: dict[str, str]) -> dict[str, Any]:
    return {"server_id": name, "device": list(devices)}


def super_pod_table(pods: list[tuple[str, list[str]]] | None = None, **changes: Any) -> str:
    """Return a table of version 1.2: two servers of one super pod."""
    servers = [
        server("a", device("0", "0", super_device_id="10")),
        server("b", device("1", "1", super_device_id="11")),
    ]
    listed = [
        {"super_pod_id": pod, "server_list": [{"server_id": name} for name in names]}
        for pod, names in (pods or [("0", ["a", "b"])])
    ]
    made = {"version": "1.2", "server_list": servers, "super_pod_list": listed}
    return table(**(made | changes))


def no_address(rank: str, **more: str) -> dict[str, str]:
    return {key: value for key, value in device(rank, rank, **more).items() if key != "device_ip"}


def test_a_communicator_is_made_and_destroyed(end: Remote) -> None:
    code, comm = end.init(table(), 0, config("c"))
    assert (code, end.destroy(comm), end.destroy(comm)) == (0, 0, PARA)


GOOD = {
    "one server, no addresses": table(
        server_count="1", server_list=[server("a", no_address("0"), no_address("1"))]
    ),
    "a port": table(
        server_list=[
            server("a", device("0", "0", device_port="16666")),
            server("b", device("0", "1")),
        ]
    ),
    "IPv6": table().replace("10.1.0.", "fe80::"),
    "spaces and escapes": table().replace(",", " ,\n").replace('"a"', '"\\u0061"'),
}


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD)
def test_valid_rank_tables_are_accepted(end: Remote, text: str) -> None:
    code, comm = end.init(text, 0, config("table"))
    assert code == 0
    assert end.destroy(comm) == 0


BAD = {
    "no JSON": "{",
    "text after it": table() + "x",
    "duplicate key": table().replace('"status"', '"version"'),
    "a list": "[]",
    "unknown version": table(version="1.1"),
    "version as a number": table(version=1.0),
    "no status": table(status=None),
    "not completed": table(status="initializing"),
    "no server count": table(server_count=None),
    "server count as a number": table(server_count=2),
    "wrong server count": table(server_count="1"),
    "unknown field": table(server_lists=[]),
    "no servers": table(server_list=[]),
    "server without a name": table(
        server_list=[server("", device()), server("b", device("1", "1"))]
    ),
    "server twice": table(server_list=[server("a", device()), server("a", device("1", "1"))]),
    "device twice": table(server_count="1", server_list=[server("a", device(), device("0", "1"))]),
    "device as a number": table().replace('"device_id": "0"', '"device_id": 0'),
    "device with a sign": table().replace('"device_id": "0"', '"device_id": "+0"'),
    "device with a leading zero": table().replace('"device_id": "0"', '"device_id": "00"'),
    "device of no server": table().replace('"device_id": "0"', '"device_id": "64"'),
    "rank twice": table().replace('"rank_id": "1"', '"rank_id": "0"'),
    "rank 2": table().replace('"rank_id": "1"', '"rank_id": "2"'),
    "one rank": table(server_count="1", server_list=[server("a", device())]),
    "no IP address": table().replace("10.1.0.1", "host-a"),
    "address twice": table().replace("10.1.0.2", "10.1.0.1"),
    "no addresses on two servers": table(
        server_list=[server("a", no_address("0")), server("b", no_address("1"))]
    ),
    "port 0": table(
        server_list=[server("a", device(device_port="0")), server("b", device("1", "1"))]
    ),
    "super pods in 1.0": super_pod_table(version="1.0"),
    "1.2 on a product without super pods": super_pod_table(),
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_invalid_rank_tables_are_refused(end: Remote, text: str) -> None:
    assert end.init(text, 0, config("table")) == (PARA, 0)


BAD_PODS = {
    "server in no pod": super_pod_table([("0", ["a"])]),
    "server in two pods": super_pod_table([("0", ["a", "b"]), ("1", ["b"])]),
    "pod twice": super_pod_table([("0", ["a"]), ("0", ["b"])]),
    "unknown server": super_pod_table([("0", ["a", "b", "c"])]),
    "no pods": super_pod_table(super_pod_list=None),
    "no super device": super_pod_table().replace('"super_device_id": "10"', '"device_port": "1"'),
    "super device twice": super_pod_table().replace('"11"', '"10"'),
}


def test_tables_of_super_pods_are_checked(log: Path) -> None:
    end = start({"KVSIM_SOC": "Ascend910_9391", "KVSIM_DIR": str(log.parent)}, "8.5", 0)
    good = {
        "one pod": super_pod_table(),
        "two pods": super_pod_table([("0", ["a"]), ("1", ["b"])]),
        "no addresses in one pod": super_pod_table(
            server_list=[
                server("a", no_address("0", super_device_id="10")),
                server("b", no_address("1", super_device_id="11")),
            ]
        ),
        "version 1.0": table(),
    }
    for name, text in good.items():
        assert (name, end.init(text, 0, config(name.replace(" ", "_")))[0]) == (name, 0)
    for name, text in BAD_PODS.items():
        assert (name, end.init(text, 0, config("bad"))) == (name, (PARA, 0))
    end.peer.finish()


BAD_RECORDS = {
    "version": config("c", version=6),
    "size": config("c", size=312),
    "magic": config("c", magic=1),
    "empty name": config(""),
    "name without an end": config("x" * 128),
    "name with a space": config("a b"),
    "no buffer": config("c", buffer_mb=0),
    "traffic class": config("c", traffic_class=131),
    "service level": config("c", service_level=8),
}


@pytest.mark.parametrize("record", BAD_RECORDS.values(), ids=BAD_RECORDS)
def test_invalid_records_are_refused(end: Remote, record: bytes) -> None:
    assert end.init(table(), 0, record) == (PARA, 0)


def test_a_long_name_and_quality_of_service_are_accepted(end: Remote) -> None:
    code, comm = end.init(table(), 0, config("x" * 127, traffic_class=132, service_level=7))
    assert (code, end.destroy(comm)) == (0, 0)


def test_invalid_arguments_are_refused(end: Remote) -> None:
    assert end.init(None, 0, config("c")) == (PTR, 0)
    assert end.init(table(), 0, None) == (PTR, 0)
    assert end.init(table(), 2, config("c")) == (PARA, 0)
    assert end.init(table(), 1, config("c")) == (UNAVAIL, 0)  # rank 1 is device 1
    assert end.destroy(0) == PTR
    assert end.destroy(123456) == PARA
    assert end.async_error(0)[0] == PTR


def test_name_is_unique_on_a_device(end: Remote) -> None:
    code, comm = end.init(table(), 0, config("one"))
    assert code == 0
    assert end.init(table(), 0, config("one")) == (PARA, 0)
    assert end.destroy(comm) == 0
    code, comm = end.init(table(), 0, config("one"))
    assert (code, end.destroy(comm)) == (0, 0)


def test_concurrent_initializations_are_refused(end: Remote, log: Path) -> None:
    end.setting("init_us", "100000")
    codes = end.init_together(table(), 0, ["first", "second"])
    end.setting("init_us", "0")
    assert codes == [0, PARA]
    assert '"what":"concurrent init"' in log.read_text()


def test_logs_calls_with_their_reason(end: Remote, log: Path) -> None:
    end.init(table(version="3"), 0, config("c"))
    line = json.loads(log.read_text().splitlines()[-1])
    assert line["call"] == "HcclCommInitClusterInfoMemConfig"
    assert line["code"] == PARA
    assert line["reason"] == "rank table: 'version' is '3'; it must be '1.0' or '1.2'"


def test_codes_have_texts(end: Remote) -> None:
    assert end.error_text(PARA) == "parameter error"
    assert end.error_text(25) == "unknown error"


@pytest.mark.parametrize("variant", ["8.1", "hccl-only"])
def test_variants_without_libhcomm_have_the_same_calls(tmp_path: Path, variant: str) -> None:
    end = start({"KVSIM_DIR": str(tmp_path)}, variant, 0)
    code, comm = end.init(table(), 0, config("c"))
    assert (code, end.destroy(comm)) == (0, 0)
    end.peer.finish()
