"""`LLMConfig` and `LLMClusterInfo`: their defaults, and the options made of them."""

from __future__ import annotations

import json
import os

import pytest

from kvplan.llm_datadist import LLMClusterInfo, LLMConfig, LLMException, LLMRole
from kvplan.llm_datadist.configs import trans_str_ip
from kvplan.llm_datadist.v2.config import EngineConfig
from kvplan.llm_datadist.v2.llm_utils import parse_listen_ip_info

UNSET = {
    "buf_pool_cfg": "",
    "cluster_info": "",
    "deploy_res_path": "",
    "device_id": None,
    "enable_cache_manager": False,
    "enable_remote_cache_accessible": False,
    "enable_switch_role": False,
    "ge_options": {},
    "global_resource_config": "",
    "host_mem_pool_cfg": "",
    "link_retry_count": 1,
    "link_total_time": 0,
    "listen_ip_info": "",
    "local_comm_res": "",
    "mem_pool_cfg": "",
    "mem_utilization": 0.95,
    "output_max_size": None,
    "rdma_service_level": None,
    "rdma_traffic_class": None,
    "sync_kv_timeout": None,
    "transfer_backend": "",
}

SET = {
    "ge_options": ({"ge.x": "1"}, {"ge.x": "1"}),
    "device_id": (3, {"ge.exec.deviceId": "3", "ge.session_device_id": "3"}),
    "sync_kv_timeout": ("5", {"llm.SyncKvCacheWaitTime": "5"}),
    "deploy_res_path": ("/a", {"llm.deployResPath": "/a"}),
    "buf_pool_cfg": ("{}", {"llm.BufPoolCfg": "{}"}),
    "mem_pool_cfg": ("{}", {"llm.MemPoolConfig": "{}"}),
    "host_mem_pool_cfg": ("{}", {"llm.HostMemPoolConfig": "{}"}),
    "enable_cache_manager": (False, {"llm.EnableCacheManager": "0"}),
    "enable_remote_cache_accessible": (True, {"llm.EnableRemoteCacheAccessible": "1"}),
    "listen_ip_info": ("127.0.0.1:5", {"llm.listenIpInfo": "127.0.0.1:5"}),
    "link_total_time": (0, {"llm.LinkTotalTime": "0"}),
    "link_retry_count": (1, {"llm.LinkRetryCount": "1"}),
    "rdma_traffic_class": (100, {"llm.RdmaTrafficClass": "100"}),
    "rdma_service_level": (0, {"llm.RdmaServiceLevel": "0"}),
    "local_comm_res": ("", {"llm.LocalCommRes": ""}),
    "transfer_backend": ("", {"llm.TransferBackend": ""}),
    "global_resource_config": ("", {"llm.GlobalResourceConfig": ""}),
    "cluster_info": ("{}", {"llm.ClusterInfo": "{}"}),
    "output_max_size": (0, {"llm.OutputMaxSize": "0"}),
    "enable_switch_role": (True, {"llm.EnableSwitchRole": "1"}),
    "mem_utilization": (0.0, {"llm.MemoryUtilization": "0.0"}),
}

BY_DEFAULT = {"llm.MemoryUtilization": "0.95"}


@pytest.mark.parametrize("name", UNSET)
def test_an_unset_property_has_a_default(name: str) -> None:
    assert getattr(LLMConfig(), name) == UNSET[name]


def test_unset_properties_are_left_out_of_the_options() -> None:
    assert LLMConfig().generate_options() == BY_DEFAULT


@pytest.mark.parametrize("name", SET)
def test_a_set_property_is_an_option(name: str) -> None:
    config = LLMConfig()
    value, options = SET[name]
    setattr(config, name, value)
    assert getattr(config, name) == value
    assert config.generate_options() == BY_DEFAULT | options


def test_all_options_come_in_the_official_order() -> None:
    config = LLMConfig()
    for name in reversed(SET):
        setattr(config, name, SET[name][0])
    assert list(config.gen_options()) == [key for _, options in SET.values() for key in options]


@pytest.mark.parametrize(
    "name",
    [name for name in SET if SET[name][0] == "" or name.startswith("enable")],
)
def test_none_unsets_a_property(name: str) -> None:
    config = LLMConfig()
    setattr(config, name, SET[name][0])
    setattr(config, name, None)
    assert getattr(config, name) == (None if name == "enable_switch_role" else UNSET[name])
    assert config.generate_options() == BY_DEFAULT


@pytest.mark.parametrize(
    "name", ["buf_pool_cfg", "mem_pool_cfg", "host_mem_pool_cfg", "listen_ip_info"]
)
def test_an_empty_text_is_left_out_of_the_options(name: str) -> None:
    config = LLMConfig()
    setattr(config, name, "")
    assert config.generate_options() == BY_DEFAULT


def test_one_dict_is_filled_again_and_again() -> None:
    config = LLMConfig()
    first = config.generate_options()
    first["llm.Own"] = "1"
    config.enable_switch_role = True
    assert config.generate_options() is first is config.options
    assert first == {"llm.MemoryUtilization": "0.95", "llm.Own": "1", "llm.EnableSwitchRole": "1"}
    assert LLMConfig().options == {}


def test_ge_options_are_overruled_by_properties() -> None:
    config = LLMConfig()
    config.ge_options = {"ge.exec.deviceId": "7", "ge.y": "2"}
    config.device_id = 1
    assert config.generate_options()["ge.exec.deviceId"] == "1"
    assert config.options["ge.y"] == "2"


@pytest.mark.parametrize("devices", [[4, 5], (4, 5)])
def test_the_first_of_several_devices_is_the_sessions(devices: list[int]) -> None:
    config = LLMConfig()
    config.device_id = devices
    assert config.generate_options() == BY_DEFAULT | {
        "ge.exec.deviceId": "4;5",
        "ge.session_device_id": "4",
    }


def test_an_empty_list_of_devices_is_refused_when_options_are_made() -> None:
    config = LLMConfig()
    config.device_id = []
    with pytest.raises(LLMException, match=r"device_id=\[\] is empty"):
        config.generate_options()


def test_the_private_attribute_of_a_property_may_be_set() -> None:
    config = LLMConfig()
    config._enable_remote_cache_accessible = True  # type: ignore[attr-defined]
    assert config.enable_remote_cache_accessible is True
    assert config.generate_options()["llm.EnableRemoteCacheAccessible"] == "1"


def test_addresses_of_cluster_info_become_integers() -> None:
    config = LLMConfig()
    config.cluster_info = json.dumps(
        {"cluster_id": 1, "listen_ip_info": [{"ip": "1.2.3.4", "port": 5}, {"ip": 6, "port": 7}]}
    )
    assert json.loads(config.cluster_info) == {
        "cluster_id": 1,
        "listen_ip_info": [{"ip": 0x04030201, "port": 5}, {"ip": 6, "port": 7}],
    }


@pytest.mark.parametrize(
    "text",
    [
        *("", "notjson", "5", "[]", "null", '{"listen_ip_info": [{}]}', '{"listen_ip_info": 5}'),
        pytest.param("[" * 100_000, id="nested"),
    ],
)
def test_a_cluster_info_of_another_form_is_invalid(text: str) -> None:
    with pytest.raises(LLMException, match="must be a JSON object"):
        LLMConfig().cluster_info = text


def test_a_refused_value_changes_nothing() -> None:
    config = LLMConfig()
    config.sync_kv_timeout = 5
    with pytest.raises(LLMException):
        config.sync_kv_timeout = 0
    assert config.sync_kv_timeout == 5


def test_an_address_is_the_little_endian_integer_of_its_bytes() -> None:
    cluster = LLMClusterInfo()
    cluster.append_local_ip_info("1.2.3.4", 5)
    cluster.append_local_ip_info(ip=6, port=7)
    cluster.append_remote_ip_info("127.0.0.1", 0)
    assert cluster.local_ip_info_list == [(0x04030201, 5), (6, 7)]
    assert cluster.remote_ip_info_list == [(0x0100007F, 0)]


def test_a_cluster_is_empty_until_it_is_filled() -> None:
    cluster = LLMClusterInfo()
    assert (cluster.remote_cluster_id, cluster.remote_role_type) == (None, None)
    assert (cluster.local_ip_info_list, cluster.remote_ip_info_list) == ([], [])
    cluster.remote_cluster_id = 2**64 - 1
    cluster.remote_role_type = LLMRole.MIX
    with pytest.raises(ValueError, match="remote_cluster_id"):
        cluster.remote_cluster_id = 2**64
    assert (cluster.remote_cluster_id, cluster.remote_role_type) == (2**64 - 1, LLMRole.MIX)


@pytest.mark.parametrize("ip", ["host", "::1", "256.0.0.1", ""])
def test_an_invalid_address_is_refused_and_not_added(ip: str) -> None:
    cluster = LLMClusterInfo()
    with pytest.raises(RuntimeError, match="is not an IPv4 address"):
        cluster.append_remote_ip_info(ip, 1)
    assert cluster.remote_ip_info_list == []


def test_the_listening_address_is_read_as_text_and_as_integer() -> None:
    assert parse_listen_ip_info("1.2.3.4:5") == ("1.2.3.4", 5)
    assert EngineConfig.parse_listen_ip_info("1.2.3.4:5") == (trans_str_ip("1.2.3.4"), 5)


@pytest.mark.parametrize(
    "text", ["x", "a:b:c", "1.2.3.4:", "1.2.3.4:abc", "1.2.3.4:65536", "[::1]:5"]
)
def test_the_listening_address_has_one_form(text: str) -> None:
    with pytest.raises(LLMException, match="listenIpInfo"):
        parse_listen_ip_info(text)


def test_the_environment_has_the_official_variable() -> None:
    assert "AUTO_USE_UC_MEMORY" in os.environ
