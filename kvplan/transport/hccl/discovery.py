"""What this process's device is called by others: as the user says, or as the system does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvplan.ascend.products import A2, A3
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.transport.hccl.device_address import DeviceAddress, device_ip_of

if TYPE_CHECKING:
    from kvplan.ascend.device import AscendDevice

_SUPER_DEVICE_ID: Final = 403  # of aclrtGetDeviceInfo
_SUPER_POD_ID: Final = 405


def device_address(device: AscendDevice, local_comm_res: str) -> DeviceAddress:
    """The address of `device`: read from `local_comm_res`, or found out if that is empty.

    A host is called by the id of its running kernel: unlike an IP address, it is the same in all
    containers of the host, and no other host's.

    Raises:
        LLMException: LLM_PARAM_INVALID: `local_comm_res`, or /etc/hccn.conf, is not as it must be;
            LLM_FEATURE_NOT_ENABLED: what the system does not say.
    """
    if local_comm_res:
        given = DeviceAddress.of_local_comm_res(local_comm_res)
        if given.version == "1.2" and device.product is A2:
            raise invalid(
                "local_comm_res (llm.LocalCommRes): version is '1.2'; devices of "
                f"{device.soc_name} have no super pods: it must be 1.0"
            )
        return given
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError as error:
        raise _unknown("server_id", f"/proc cannot be read ({error.strerror})") from error
    physical_id = device.native.physical_id
    found = DeviceAddress("1.0", host, str(physical_id), device_ip_of(physical_id))
    if device.product is not A3:
        return found
    pod, number = (device.native.attribute(it) for it in (_SUPER_POD_ID, _SUPER_DEVICE_ID))
    if pod is None or number is None:
        name = "super_pod_id" if pod is None else "super_device_id"
        raise _unknown(name, "this CANN does not say it (8.5 and later do)")
    return DeviceAddress(
        "1.2",
        found.server_id,
        found.device_id,
        found.device_ip,
        super_device_id=str(number),
        super_pod_id=str(pod),
    )


def _unknown(field: str, why: str) -> LLMException:
    return LLMException(
        f"{field} of this device is not known: {why}; give llm.LocalCommRes",
        status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
    )
