"""Where a device is found by the others: what a rank table says of it."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvplan.transport.documents import Document

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSIONS: Final = ("1.0", "1.2")
"""Of rank tables: of A2, and of A3, which knows super pods."""

HCCN_CONF: Final = "/etc/hccn.conf"
HCCN_CONF_VARIABLE: Final = "KVPLAN_HCCN_CONF"
"""Names another file in its place, for containers that do not have it."""

_GIVEN: Final = Document("local_comm_res (llm.LocalCommRes)", 1 << 20)
_MAX_NAME: Final = 64
_SUPER: Final = ("super_device_id", "super_pod_id")


@dataclass(frozen=True, slots=True)
class DeviceAddress:
    """A device, as a rank table says it.

    Attributes:
        version: of the rank table that this is enough for.
        server_id: names its host, among all hosts.
        device_id: its physical number there, in digits.
        device_ip: of its network port; None: not known, which will do inside one host.
        device_port: to listen at, in digits; None: HCCL's own choice.
        super_device_id, super_pod_id: of its super pod; None in version 1.0.
    """

    version: str
    server_id: str
    device_id: str
    device_ip: str | None = None
    device_port: str | None = None
    super_device_id: str | None = None
    super_pod_id: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As `of_fields` reads it."""
        return asdict(self)

    @classmethod
    def of_fields(cls, document: Document, path: str, value: object) -> DeviceAddress:
        """Check and read what `to_dict` has made.

        Raises:
            LLMException: LLM_PARAM_INVALID, naming the field.
        """
        fields = document.fields(path, value, cls.__slots__)
        version = check_version(document, f"{path}.version", fields["version"])
        read = {name: it for name, it in fields.items() if name != "version"}
        given = {name: it for name, it in read.items() if it is not None}
        return cls(version, **_checked(document, path, given, version))

    @classmethod
    def of_local_comm_res(cls, text: str) -> DeviceAddress:
        """Read the option `llm.LocalCommRes`: a rank table of this device alone, without ranks.

        Raises:
            LLMException: LLM_PARAM_INVALID, naming the field, its value and what it must be.
        """
        table = _GIVEN.read(text)
        version = table.get("version") if isinstance(table, dict) else None
        check_version(_GIVEN, "version", version)
        pods = {"super_pod_list"} if version == "1.2" else set()
        table = _GIVEN.fields("", table, {"version", "server_list", *pods}, {"status"})
        if table.get("status", "completed") != "completed":
            raise _GIVEN.bad(f'status is {table["status"]!r}; it must be "completed"')
        server, server_path = _only(table["server_list"], "server_list")
        server = _GIVEN.fields(server_path, server, {"server_id", "device"}, {"host_ip"})
        device, path = _only(server["device"], f"{server_path}.device")
        needed = {"device_id", "super_device_id"} if pods else {"device_id"}
        given = _GIVEN.fields(path, device, needed, {"device_ip", "device_port"})
        checked = _checked(_GIVEN, path, given, version, pod=False)
        checked["server_id"] = _name(_GIVEN, f"{server_path}.server_id", server["server_id"])
        if pods:
            checked["super_pod_id"] = _pod_of(table["super_pod_list"], checked["server_id"])
        return cls(str(version), **checked)


def check_version(document: Document, path: str, value: object) -> str:
    """`value`, if it is the version of a rank table that is known here."""
    return document.text(path, value, VERSIONS.__contains__, f"one of {', '.join(VERSIONS)}")


def device_ip_of(physical_id: int, environment: Mapping[str, str] = os.environ) -> str | None:
    """The address of a device's network port that /etc/hccn.conf has; None: it has none.

    Raises:
        LLMException: LLM_PARAM_INVALID: what is there is no address.
    """
    path = Path(environment.get(HCCN_CONF_VARIABLE) or HCCN_CONF)
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition("=")
        if key.strip() == f"address_{physical_id}":
            document = Document(str(path), 1 << 20)
            return document.text(key.strip(), value.strip(), _is_address, "an IP address")
    return None


def _checked(
    document: Document,
    path: str,
    given: Mapping[str, object],
    version: str | None,
    *,
    pod: bool = True,
) -> dict[str, str]:
    """The fields of a device, each if it is what it must be."""
    rules = {
        "server_id": lambda where, it: _name(document, where, it),
        "device_id": lambda where, it: _digits(document, where, it, 2**31 - 1),
        "device_ip": lambda where, it: document.text(where, it, _is_address, "an IP address"),
        "device_port": lambda where, it: _digits(document, where, it, 65535, low=1),
        "super_device_id": lambda where, it: _digits(document, where, it, 2**32 - 1),
        "super_pod_id": lambda where, it: _name(document, where, it),
    }
    checked = {name: rules[name](f"{path}.{name}", it) for name, it in given.items()}
    for name in _SUPER if pod else _SUPER[:1]:
        if (name in checked) is not (version == "1.2"):
            has = "needs it" if version == "1.2" else "has no such field"
            raise document.bad(f"{path}.{name}: version {version} {has}")
    return checked


def _only(value: object, path: str) -> tuple[Any, str]:
    """The one element of a list, and its path."""
    return _GIVEN.elements(path, value, 1)[0], f"{path}[0]"


def _pod_of(value: object, server_id: str) -> str:
    pod, path = _only(value, "super_pod_list")
    pod = _GIVEN.fields(path, pod, {"super_pod_id", "server_list"})
    server, server_path = _only(pod["server_list"], f"{path}.server_list")
    named = _GIVEN.fields(server_path, server, {"server_id"})["server_id"]
    if named != server_id:
        raise _GIVEN.bad(f"{server_path}.server_id is {named!r}; it must be {server_id!r}")
    return _name(_GIVEN, f"{path}.super_pod_id", pod["super_pod_id"])


def _name(document: Document, path: str, value: object) -> str:
    return document.text(
        path,
        value,
        lambda it: 0 < len(it) <= _MAX_NAME and it.isascii() and it.isprintable(),
        f"1 to {_MAX_NAME} printable ASCII characters",
    )


def _digits(document: Document, path: str, value: object, high: int, low: int = 0) -> str:
    return document.text(
        path,
        value,
        lambda it: (
            it.isascii()
            and it.isdecimal()
            and len(it) <= 10
            and low <= int(it) <= high
            # One spelling of each number: ranks follow from it as text.
            and it == str(int(it))
        ),
        f'a whole number in ["{low}", "{high}"], as text',
    )


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
