"""Options: keys and rules of the reference, typed values, and hints for mistyped keys."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import pytest

from kvplan.engine import option_rows
from kvplan.engine.options import Options
from kvplan.engine.pools import PoolConfig
from tests.support.refusals import refused


@pytest.mark.parametrize(
    ("key", "text", "field", "value"),
    [
        ("llm.ListenIpInfo", "192.168.1.1:26000", "listen_ip_info", "192.168.1.1:26000"),
        ("llm.listenIpInfo", "[::1]:0", "listen_ip_info", "[::1]:0"),
        ("listenIpInfo", "node-1:65535", "listen_ip_info", "node-1:65535"),
        ("ListenIpInfo", "ipc:///run/kv", "listen_ip_info", "ipc:///run/kv"),
        ("kvplan.advertise", "node-1", "advertise", "node-1"),
        ("advertise", "10.0.0.1:36000", "advertise", "10.0.0.1:36000"),
        ("advertise", "[::1]", "advertise", "[::1]"),
        ("llm.DeviceId", "3", "device_id", 3),
        ("ge.exec.deviceId", "3", "device_id", 3),
        ("llm.SyncKvCacheWaitTime", "5", "sync_kv_cache_wait_time", 5),
        ("MemPoolConfig", '{"memory_size": 4096, "page_shift": 12}', "mem_pool_config",
         PoolConfig(4096, 12)),
        ("llm.HostMemPoolConfig", '{"memory_size": 65536}', "host_mem_pool_config",
         PoolConfig(65536, 16)),
        ("llm.MemPoolConfig", "", "mem_pool_config", None),
        ("llm.LocalCommRes", "", "local_comm_res", ""),
        ("llm.LinkTotalTime", "4294967295", "link_total_time", 2**32 - 1),
        ("llm.LinkRetryCount", "100", "link_retry_count", 100),
        ("llm.RdmaTrafficClass", "252", "rdma_traffic_class", 252),
        ("llm.RdmaServiceLevel", "7", "rdma_service_level", 7),
        ("kvplan.transport", "local", "transport", "local"),
        ("cluster_key_file", "/etc/kv.key", "cluster_key_file", "/etc/kv.key"),
        ("kvplan.max_links", "600", "max_links", 600),
        ("kvplan.tcp_connections", "16", "tcp_connections", 16),
        ("kvplan.tcp_congestion", "bbr", "tcp_congestion", "bbr"),
        ("kvplan.tcp_busy_poll_us", "50", "tcp_busy_poll_us", 50),
        ("kvplan.encrypt", "1", "encrypt", True),
        ("kvplan.pages", "hugetlb", "pages", "hugetlb"),
        ("kvplan.numa_node", "1023", "numa_node", 1023),
        ("kvplan.numa_node", "all", "numa_node", "all"),
        ("kvplan.populate", "off", "populate", "off"),
    ],
)  # fmt: skip
def test_a_key_and_its_text(key, text, field, value):
    assert Options.of({key: text}) == Options(**{field: value})


def test_the_constants_of_the_header_are_keys():
    names = [name for name in vars(option_rows) if name.startswith("OPTION_")]
    assert len(names) == 10
    for name in names:
        key = getattr(option_rows, name)
        assert key in option_rows.SPELLINGS or key in option_rows.WITHOUT_MEANING


def test_every_field_has_a_key():
    fields = {field.name for field in dataclasses.fields(Options)}
    assert fields == {row.field for row in option_rows.ROWS}


def test_options_without_a_meaning_here_are_checked_and_ignored():
    given = {
        "ge.flowGraphMemMaxSize": "10",
        "llm.MemoryUtilization": "0.95",
        "llm.Role": "1",
        "llm.BufPoolCfg": '{"buf_cfg":[]}',
        "TransferBackend": "hixl",
        "llm.EnableSwitchRole": "0",
    }
    assert Options.of(given) == Options()
    for key, text in {"BufPoolCfg": "{", "TransferBackend": "x", "EnableCacheManager": "2"}.items():
        with refused("LLM_PARAM_INVALID", f"llm.{key}"):
            Options.of({f"llm.{key}": text})


def test_without_options_the_defaults_apply():
    assert Options.of(None) == Options.of({}) == Options()
    options = Options(device_id=3)
    assert Options.of(options) is options
    assert pickle.loads(pickle.dumps(options)) == options
    assert hash(options) == hash(Options(device_id=3))


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("llm.SyncKvCacheWaitTme", "llm.SyncKvCacheWaitTime"),
        ("DeviceID", "DeviceId"),
        ("device_id", "DeviceId"),
        ("llm.mempoolconfig", "llm.MemPoolConfig"),
        ("kvplan.heartbeat_ms", "heartbeat_timeout_ms"),
    ],
)
def test_a_warning_of_an_unknown_key_names_the_nearest(key, near):
    with pytest.warns(UserWarning, match=f"{key}.*nearest is .*{near}") as caught:
        assert Options.of({key: "1"}) == Options()
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "key",
    [
        "listen_ip_info",
        "llm.listen_ip_info",
        "LISTEN_IP_INFO",
        "llm.ListenIPInfo",
        "kvplan.ListenIpInfo",
        "llm.LisenIpInfo",
        "listen_address",
        "listen",
    ],
)
def test_a_key_that_resembles_the_listen_address_is_refused(key):
    with refused(
        "LLM_PARAM_INVALID", f"option '{key}' is unknown.*to listen at.*'llm.ListenIpInfo'"
    ):
        Options.of({key: "127.0.0.1:0"})


@pytest.mark.parametrize(
    ("key", "text", "match"),
    [
        ("llm.ListenIpInfo", "x", 'listen_ip_info .*="?.x.* "ip:port"'),
        ("llm.ListenIpInfo", "127.0.0.1:abc", "ip:port"),
        ("llm.ListenIpInfo", "127.0.0.1:65536", "65535"),
        ("llm.ListenIpInfo", ":26000", "ip:port"),
        ("llm.ListenIpInfo", "1.2.3.4:1;1.2.3.5:1", "one address"),
        ("kvplan.advertise", "0.0.0.0", 'advertise .*=.*0.0.0.0.* must be "host".*all addresses'),
        ("kvplan.advertise", "[::]:26000", "stands for all addresses; peers need one"),
        ("kvplan.advertise", "10.0.0.1:0", r"a port in \[1, 65535\]"),
        ("kvplan.advertise", "10.0.0.1:65536", "65536"),
        ("kvplan.advertise", "::1", "ipv6"),
        ("kvplan.advertise", "ipc:///run/kv", "name a host"),
        ("llm.DeviceId", "0;1", "one whole number"),
        ("llm.DeviceId", "-1", "device_id .*-1 is out of range"),
        ("llm.DeviceId", "1.5", "one whole number"),
        ("llm.SyncKvCacheWaitTime", "abc", "llm.SyncKvCacheWaitTime='abc'"),
        ("llm.SyncKvCacheWaitTime", "0", "range \\[1"),
        ("kvplan.pages", "large", "'large' must be one of auto, collapse, small, hugetlb"),
        ("kvplan.numa_node", "-1", "numa_node .*-1 is out of range"),
        ("kvplan.numa_node", "1024", "range \\[0, 1023\\]"),
        ("kvplan.numa_node", "both", 'numa_node\\)=.both. must be "all" or a number in .0, 1023'),
        ("kvplan.populate", "1", "'1' must be one of background, now, off"),
        ("llm.LinkRetryCount", "101", "range \\[1, 100\\]"),
        ("llm.LinkTotalTime", "4294967296", "range"),
        ("llm.RdmaTrafficClass", "6", "multiple of 4"),
        ("llm.RdmaTrafficClass", "256", "multiple of 4"),
        ("llm.RdmaServiceLevel", "8", "range \\[0, 7\\]"),
        ("llm.EnableRemoteCacheAccessible", "2", '"0" or "1"'),
        ("llm.TransferBackend", "bogus", "hixl"),
        ("llm.MemPoolConfig", "x", "not JSON"),
        ("llm.MemPoolConfig", "[1]", "JSON object"),
        ("llm.MemPoolConfig", "{}", "must have memory_size"),
        ("llm.MemPoolConfig", '{"memory_size": 65536, "size": 1}', "may have page_shift"),
        ("llm.MemPoolConfig", '{"memory_size": "1"}', "memory_size='1' must be int"),
        ("llm.MemPoolConfig", '{"memory_size": -1}', "memory_size=-1"),
        ("llm.MemPoolConfig", '{"memory_size": 65536, "page_shift": 9}', "page_shift=9"),
        ("llm.HostMemPoolConfig", '{"memory_size": 65536, "page_shift": 31}', "page_shift=31"),
        ("llm.LocalCommRes", "{", "not JSON"),
        ("llm.BufPoolCfg", "[" * 100_000, "not JSON"),
        ("llm.GlobalResourceConfig", '{"connect_pool.thread_num": 65}', "range \\[1, 64\\]"),
        ("llm.GlobalResourceConfig", '{"connect_pool.thread_num": "x"}', "whole number"),
        ("llm.GlobalResourceConfig", '{"connect_pool.thread_num": true}', "True of"),
        ("kvplan.max_links", "0", "max_links .*range"),
        ("kvplan.comm_port", "65536", "range"),
        ("kvplan.tcp_source", "eth0", "'eth0' must be empty or an IP address of this host"),
        ("kvplan.tcp_connections", "0", "tcp_connections .*=0 is out of range \\[1, 16\\]"),
        ("kvplan.tcp_connections", "many", "one whole number"),
        ("kvplan.tcp_congestion", "b b r", 'tcp_congestion .*"cubic" or "bbr", or empty'),
        ("kvplan.tcp_busy_poll_us", "10001", "tcp_busy_poll_us .*=10001 .*\\[0, 10000\\]"),
        ("kvplan.encrypt", "yes", '"0" or "1"'),
        ("kvplan.encrypt", "", '"0" or "1"'),
        ("kvplan.encrypt", "01", '"0" or "1"'),
        ("kvplan.comm_dir", "comm", r"comm_dir .*='comm' must be an absolute path"),
        ("kvplan.comm_dir", "~/comm", "must be an absolute path"),
        ("kvplan.comm_dir", "", "must be an absolute path"),
        ("kvplan.comm_dir", "/" + 88 * "a", "comm_dir .* has 89 bytes; at most 88 .* at most 107"),
        ("kvplan.comm_dir", "/\ud800", r"comm_dir .*='/.ud800' cannot be a path"),
        ("kvplan.cluster_key_file", "\ud800", r"cluster_key_file .*='.ud800' cannot be a path"),
        ("kvplan.cluster_key_file", "a\0", r"cluster_key_file .*='a.x00' cannot be a path"),
        ("kvplan.heartbeat_timeout_ms", "1000", "more than heartbeat_interval_ms=1000"),
    ],
)
def test_values_are_checked_by_rules(key, text, match):
    with refused("LLM_PARAM_INVALID", match):
        Options.of({key: text})


@pytest.mark.parametrize("source", ["", "127.0.0.5", "::1"])
def test_connections_come_from_an_address_of_either_family(source: str) -> None:
    assert Options.of({"kvplan.tcp_source": source}).tcp_source == source


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"llm.DeviceId": str(2**31)}, ValueError),
        ({"llm.RdmaServiceLevel": str(2**32)}, ValueError),
        ({"llm.DeviceId": 0}, TypeError),
        ({0: "0"}, TypeError),
        ("llm.DeviceId", TypeError),
        (5, TypeError),
    ],
)
def test_other_types_and_widths(options, error):
    with pytest.raises(error):
        Options.of(options)


@pytest.mark.parametrize(
    "wrong",
    [
        {"device_id": "0"},
        {"device_id": True},
        {"device_id": None},
        {"listen_ip_info": None},
        {"mem_pool_config": '{"memory_size": 65536}'},
        {"encrypt": 1},
    ],
    ids=str,
)
def test_fields_are_typed(wrong):
    with pytest.raises(TypeError, match=next(iter(wrong))):
        Options(**wrong)


def test_one_option_by_two_keys_has_one_value():
    assert Options.of({"llm.DeviceId": "2", "ge.exec.deviceId": "2"}).device_id == 2
    with refused(
        "LLM_PARAM_INVALID", "ge.exec.deviceId='3' and llm.DeviceId='2' are the same option"
    ):
        Options.of({"llm.DeviceId": "2", "ge.exec.deviceId": "3"})


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1])
def test_a_resource_file_has_from_one_byte_to_a_mib(tmp_path: Path, size: int) -> None:
    file = tmp_path / "resources.json"
    file.write_bytes(bytes(size))
    config = json.dumps({"local_comm_res_path": str(file)})
    if 0 < size <= 1 << 20:
        assert Options(global_resource_config=config).global_resource_config == config
    else:
        with refused("LLM_PARAM_INVALID", rf"of \[1, 1048576\] bytes; it has {size}"):
            Options(global_resource_config=config)
