"""The address of a device's network port: from /etc/hccn.conf, or from the driver's hccn_tool."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvnative.ascend_files import driver_folder
from kvplan.logs import Log
from kvplan.status import invalid
from kvplan.validation import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

HCCN_CONF: Final = "/etc/hccn.conf"
HCCN_CONF_VARIABLE: Final = "KVPLAN_HCCN_CONF"
"""Names another file in its place, for containers that do not have it."""

_LOG = Log("kvplan")
_TOOL_S: Final = 10.0  # that the tool may take
_KEYS: Final = ("address_{}", "IPv6address_{}")
_QUERIES: Final = (("-ip", "-g"), ("-ip", "-inet6", "-g"))


def device_ip_of(physical_id: int, environment: Mapping[str, str] = os.environ) -> str | None:
    """The address of a device's network port, of IPv4 if it has one; None: it is not known.

    Args:
        physical_id: of the device.
        environment: names the file and the driver's folder, and has the PATH.

    Raises:
        LLMException: LLM_PARAM_INVALID: what stands there is no address.
    """
    path = Path(environment.get(HCCN_CONF_VARIABLE) or HCCN_CONF)
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return _ask_tool(physical_id, environment)
    values: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition("=")
        values.setdefault(key.strip(), value.strip())
    for name in _KEYS:
        key = name.format(physical_id)
        if key in values:
            return _checked(str(path), key, values[key])
    return None


def is_address(text: str) -> bool:
    """Whether that is an address of IPv4 or IPv6."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _checked(source: str, name: str, text: str) -> str:
    if not is_address(text):
        raise invalid(f"{source}: {name} is {shown(text)}; it must be an IP address")
    return text


def _ask_tool(physical_id: int, environment: Mapping[str, str]) -> str | None:
    """What the driver's tool says, for containers without the file; None: it cannot be asked."""
    tool = driver_folder(environment) / "tools" / "hccn_tool"
    command = (
        str(tool) if tool.exists() else shutil.which("hccn_tool", path=environment.get("PATH"))
    )
    if command is None:
        return None
    for query in _QUERIES:
        try:
            done = subprocess.run(
                (command, "-i", str(physical_id), *query),
                check=False,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TOOL_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            _LOG.warning("event=no_device_ip device=%d reason=%s", physical_id, error)
            return None
        found = re.search(r"^ipaddr:\s*([^\s/]+)", done.stdout, re.MULTILINE)
        if found:
            return _checked(command, "ipaddr", found[1])
    return None
