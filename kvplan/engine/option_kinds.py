"""Kinds of options: how their text is read, and which values are refused; rows of options."""

from __future__ import annotations

import dataclasses
import inspect
import ipaddress
import json
import os
import re
import textwrap
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import Any, Final, TypeVar

from kvplan.control.endpoint import MAX_DIRECTORY, PORT_MAX, Endpoint, check_directory
from kvplan.engine.numa import ALL_NODES, MAX_NODE, check_choice_of_node
from kvplan.engine.pools import PoolConfig
from kvplan.execution.tuning import check_choice
from kvplan.execution.verification import verify_every
from kvplan.status import LLMException, invalid
from kvplan.transport.choice import check_devices, check_settings
from kvplan.validation import UINT32_MAX, check_one_of, check_range, check_type, check_width, shown

_T = TypeVar("_T")

INT32: Final = (-(2**31), 2**31 - 1)
UINT32: Final = (0, UINT32_MAX)
_RESOURCES = {  # keys of the global resource config with their smallest and largest value
    "channel_pool.max_channel": (1, 512),
    "comm_resource_config.listen_port": (1, PORT_MAX),
    "comm_resource_config.max_active_channels": (1, 8192),
    "comm_resource_config.qos": (0, 7),
    "connect_pool.task_queue_capacity": (1, 65535),
    "connect_pool.thread_num": (1, 64),
    "fabric_memory.max_capacity": (1, 1024),
    "fabric_memory.start_address": (0, 1024),
    "fabric_memory.task_stream_num": (1, 8),
    "transfer_config.max_transfer_count_per_batch": (1, 32766),
}
_RESOURCE_FILE = "local_comm_res_path"
_MAX_RESOURCE_FILE_NBYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """The values that an option can have.

    Attributes:
        check: refuses an invalid value; called with the name and the value.
        read: parses a text; called with the key and the text.
        values: the valid values in words, for the reference.
    """

    check: Callable[[str, Any], object]
    read: Callable[[str, str], Any] = lambda _name, text: text
    values: str = "text"


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """An option: a field of an options class, with its checks and its documentation.

    Attributes:
        field: name of the field.
        keys: keys in a mapping of options; errors name the first.
        default: the value without a setting. Only an option whose default is None can be None.
        kind: the allowed values.
        unit: unit of a number.
        over: the transports that use the option; empty: all.
        text: the effect.
        see: a link to details, relative to docs/reference.
    """

    field: str
    keys: tuple[str, ...]
    default: Any
    kind: Kind
    unit: str
    over: tuple[str, ...]
    text: str
    see: str

    @property
    def variable(self) -> str:
        """The environment variable of an option of engines."""
        return f"KVPLAN_{self.field.upper()}"

    def check(self, value: object) -> None:
        """Refuse an invalid value, naming the field and its key."""
        key = "" if self.keys == (self.field,) else f" ({self.keys[0]})"
        if value is not None or self.default is not None:
            self.kind.check(self.field + key, value)


def option(
    default: _T,
    kind: Kind,
    text: str,
    *keys: str,
    unit: str = "",
    over: tuple[str, ...] = (),
    see: str = "",
) -> _T:
    """Return the dataclass field of an option; the arguments are those of `Row`.

    Without `keys` the key is the prefix of `rows_of` plus the name of the field.
    """
    row = Row("", keys, default, kind, unit, over, text, see)
    made: dict[str, Any] = {"default": default}
    if isinstance(default, dict):
        made = {"default_factory": default.copy}
    return dataclasses.field(**made, metadata={"row": row})  # type: ignore[no-any-return]


def rows_of(cls: Any, prefix: str = "") -> tuple[Row, ...]:
    """Return the rows of an options class."""
    return tuple(
        dataclasses.replace(row, field=field.name, keys=row.keys or (prefix + field.name,))
        for field in dataclasses.fields(cls)
        if (row := field.metadata.get("row")) is not None
    )


def described(cls: type[_T]) -> type[_T]:
    """Add a section Attributes with the options of a class to its docstring."""
    lines = "\n".join(
        textwrap.fill(
            f"{row.field}: {row.text}", 96, initial_indent="    ", subsequent_indent=" " * 8
        )
        for row in rows_of(cls)
    )
    text, found, rest = inspect.cleandoc(cls.__doc__ or "").partition("\n\nRaises:")
    cls.__doc__ = f"{text}\n\nAttributes:\n{lines}{found}{rest}"
    return cls


def whole(name: str, text: str) -> int:
    """Read a whole number."""
    if not re.fullmatch(r"-?[0-9]{1,20}", text):
        raise invalid(f"{name}={shown(text)} must be one whole number")
    return int(text)


def _flag(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise invalid(f'{name}={shown(text)} must be "0" or "1"')
    return text == "1"


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{name}={shown(text)} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise invalid(f"{name}={shown(text)} must be a JSON object")
    return document


def number(low: int, high: int, width: tuple[int, int] | None = None) -> Kind:
    """Return the kind of whole numbers in [low, high]; `width` is the range of the C field."""

    def check(name: str, value: object) -> None:
        if width is not None:
            check_width(name, value, *width)
        check_range(name, value, low, high)

    return Kind(check, whole, f"[{low}, {high}]")


def one_of(allowed: Collection[str]) -> Kind:
    """Return the kind whose values are the `allowed` words."""
    words = ", ".join(f"`{word}`" for word in allowed)
    return Kind(lambda name, value: check_one_of(name, value, allowed), values=words)


def _check_json(name: str, value: object) -> None:
    if text := check_type(name, value, str):
        _json_object(name, text)


def _check_resources(name: str, value: object) -> None:
    text = check_type(name, value, str)
    given = _json_object(name, text) if text else {}
    for key in given.keys() & _RESOURCES.keys():
        found, (low, high) = given[key], _RESOURCES[key]
        if isinstance(found, str):  # a number or its digits
            found = whole(key, found)
        if type(found) is not int or not low <= found <= high:
            raise invalid(f"{key}={shown(found)} of {name} is out of range [{low}, {high}]")


def check_resource_file(name: str, resources: str) -> None:
    """Refuse a local_comm_res_path of the global resource config that is not a small file."""
    given = _json_object(name, resources) if resources else {}
    if _RESOURCE_FILE not in given:
        return
    name, path = f"{_RESOURCE_FILE} of {name}", given[_RESOURCE_FILE]
    if not isinstance(path, str) or not path:
        raise invalid(f"{name}={shown(path)} must be the path of a file")
    try:
        status = Path(path).stat()
    except (OSError, ValueError) as error:
        raise invalid(f"{name}={shown(path)} cannot be read: {error}") from None
    if not S_ISREG(status.st_mode) or not 1 <= status.st_size <= _MAX_RESOURCE_FILE_NBYTES:
        raise invalid(
            f"{name}={shown(path)} must be a regular file of [1, {_MAX_RESOURCE_FILE_NBYTES}] "
            f"bytes; it has {status.st_size}"
        )


def _pool_config(name: str, text: str) -> PoolConfig | None:
    if not text:
        return None
    given = _json_object(name, text)
    if "memory_size" not in given or given.keys() - {"memory_size", "page_shift"}:
        raise invalid(f"{name}={shown(text)} must have memory_size, and may have page_shift")
    try:
        return PoolConfig(**given)
    except TypeError as error:
        raise invalid(f"{name}={shown(text)}: {error}") from None


def _check_address(name: str, value: object) -> None:
    """Refuse a malformed address; the listener finds out whether the address exists."""
    text = check_type(name, value, str)
    if not text or text.startswith("ipc://"):
        return
    host, _, port = text.rpartition(":")
    if ";" in text or not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > PORT_MAX:
        raise invalid(
            f'{name}={shown(text)} must be one address, "ip:port" with port in [0, {PORT_MAX}]'
        )


def _check_path(name: str, value: object) -> str:
    path = check_type(name, value, str)
    with suppress(UnicodeEncodeError):
        if b"\0" not in os.fsencode(path):
            return path
    raise invalid(f"{name}={shown(path)} cannot be a path: it has a NUL or a lone surrogate")


def _check_directory(name: str, value: object) -> None:
    path = _check_path(name, value)
    if not path.startswith("/"):
        raise invalid(f"{name}={shown(path)} must be an absolute path")
    check_directory(name, path)


def _check_advertise(name: str, value: object) -> None:
    text = check_type(name, value, str)
    if not text:
        return
    try:
        Endpoint.advertised(text, PORT_MAX)
    except LLMException as error:
        raise invalid(
            f'{name}={shown(text)} must be "host", "host:port" or "[ipv6]:port" that peers can '
            f"reach: {error.args[0]}"
        ) from None


def _check_source(name: str, value: object) -> None:
    text = check_type(name, value, str)
    try:
        if text:
            ipaddress.ip_address(text)
    except ValueError:
        raise invalid(f"{name}={shown(text)} must be empty or an IP address of this host") from None


def _check_verify(name: str, value: object) -> None:
    try:
        verify_every(check_type(name, value, str))
    except ValueError:
        raise invalid(
            f'{name}={shown(value)} must be "off", "all" or a sample such as "sample:1/64"'
        ) from None


def _check_congestion(name: str, value: object) -> None:
    """Refuse a malformed name; the kernel finds out whether the name exists."""
    if not re.fullmatch("[a-z0-9_-]{0,15}", check_type(name, value, str)):
        raise invalid(f'{name}={shown(value)} must be a name such as "cubic" or "bbr", or empty')


def _check_traffic_class(name: str, value: object) -> None:
    found = check_width(name, value, *UINT32)
    if found > 255 or found % 4:
        raise invalid(f"{name}={found} must be a multiple of 4 in [0, 255]")


def _check_backend(name: str, value: object) -> None:
    if check_type(name, value, str) not in ("", "hixl"):
        raise invalid(f'{name}={shown(value)} must be empty or "hixl"')


def positive(*types: type) -> Kind:
    """Return the kind of numbers > 0 of the given types."""

    def check(name: str, value: Any) -> None:
        number: Any = value
        if isinstance(value, bool) or not isinstance(value, types):
            raise TypeError(f"{name}={shown(value)} must be a number: {types[0].__name__}")
        if not number > 0:
            raise invalid(f"{name}={value} must be > 0")

    return Kind(check, values="> 0")


def _typed(expected: type) -> Callable[[str, Any], object]:
    return lambda name, value: check_type(name, value, expected)


TEXT: Final = Kind(_typed(str))
PATH: Final = Kind(_check_path, values="path")
DIRECTORY: Final = Kind(_check_directory, values=f"absolute path of at most {MAX_DIRECTORY} bytes")
FLAG: Final = Kind(_typed(bool), _flag, "0, 1")
JSON: Final = Kind(_check_json, values="JSON")
RESOURCES: Final = Kind(_check_resources, values="JSON")
POOL: Final = Kind(_typed(PoolConfig), _pool_config, "JSON")
ADDRESS: Final = Kind(_check_address, values="address")
ADVERTISED: Final = Kind(_check_advertise, values="address")
SOURCE: Final = Kind(_check_source, values="IP address")
VERIFY: Final = Kind(_check_verify, values="`off`, `all`, `sample:1/N`")
CONGESTION: Final = Kind(_check_congestion, values="name")
TRAFFIC_CLASS: Final = Kind(_check_traffic_class, whole, "multiple of 4 in [0, 255]")
BACKEND: Final = Kind(_check_backend)
NODE: Final = Kind(
    check_choice_of_node,
    lambda _name, text: int(text) if re.fullmatch("-?[0-9]{1,20}", text) else text,
    f"[0, {MAX_NODE}], `{ALL_NODES}`",
)
TUNING: Final = Kind(check_choice, values="`auto`, `builtin`, JSON")
UCX_DEVICES: Final = Kind(check_devices, values="names")
UCX_SETTINGS: Final = Kind(check_settings, values="JSON")
