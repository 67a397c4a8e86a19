"""The address of an engine: `host:port`, `[ipv6]:port` or `ipc:///path`."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from typing import Any, Final

from kvplan.status import invalid
from kvplan.validation import check_type, shown

IPC: Final = "ipc://"
PORT_MAX: Final = 65535
MAX_PATH: Final = 107  # bytes of a Unix socket's name
MAX_DIRECTORY: Final = MAX_PATH - 19  # bytes; the name of a socket there has 18, and a "/"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address to listen on or to connect to. Exactly one of `host` and `path` is not empty."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Read an address as users write it."""
        check_type("endpoint", text, str)
        if text.startswith(IPC):
            path = text.removeprefix(IPC)
            if not re.fullmatch("/[^\0\ud800-\udfff]*", path) or len(path.encode()) > MAX_PATH:
                raise invalid(
                    f"endpoint={shown(text)}: the path must be absolute and have at most "
                    f"{MAX_PATH} bytes of Unicode text"
                )
            return cls(path=path)
        host, colon, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        if bracketed:
            host = host[1:-1]
        if not colon or not host or bracketed is not (":" in host) or not _is_name(host):
            raise invalid(
                f"endpoint={shown(text)} must be 'host:port', '[ipv6]:port' or 'ipc:///path'"
            )
        # isdecimal() alone accepts the digits of every script.
        if not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) < 2**16):
            raise invalid(
                f"endpoint={shown(text)}: port {shown(port)} is out of range [0, {PORT_MAX}]"
            )
        return cls(host, int(port))

    @classmethod
    def advertised(cls, text: str, port: int) -> Endpoint:
        """Read the address at which peers reach a listener: a host, or a host and its port."""
        check_type("endpoint", text, str)
        has_port = re.fullmatch(r"(\[.*\]|[^:]*):[^:]*", text) is not None
        endpoint = cls.parse(text if has_port else f"{text}:{port}")
        if endpoint.path or not endpoint.port:
            raise invalid(f"endpoint={shown(text)} must name a host, and a port in [1, {PORT_MAX}]")
        if endpoint.is_wildcard:
            raise invalid(f"endpoint={shown(text)} stands for all addresses; peers need one")
        return endpoint

    @property
    def is_loopback(self) -> bool:
        """True if only processes of this host can reach the address."""
        if self.path or self.host == "localhost":
            return True
        address = self._address
        # A listener for IPv6 and IPv4 sees 127.0.0.1 as ::ffff:127.0.0.1.
        address = getattr(address, "ipv4_mapped", None) or address
        return address is not None and address.is_loopback

    @property
    def is_wildcard(self) -> bool:
        """True if the address stands for all addresses of this host."""
        return self._address is not None and self._address.is_unspecified

    @property
    def is_name(self) -> bool:
        """True for a host name that may resolve to any address."""
        return not self.path and self.host != "localhost" and self._address is None

    @property
    def _address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The IP address, or None for a path or a name, which may resolve to anything."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    def __str__(self) -> str:
        if self.path:
            return IPC + self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def endpoint_of(name: Any) -> Endpoint:
    """Return the endpoint of a socket address."""
    return Endpoint(name[0], name[1]) if isinstance(name, tuple) else Endpoint(path=name)


def check_directory(name: str, path: str, remedy: str = "") -> None:
    """Refuse a directory in which the paths of sockets would be too long."""
    if (nbytes := len(os.fsencode(path))) > MAX_DIRECTORY:
        raise invalid(
            f"{name}={shown(path)} has {nbytes} bytes; at most {MAX_DIRECTORY} are allowed, as "
            f"paths of sockets in it have at most {MAX_PATH}{remedy}"
        )


def _is_name(host: str) -> bool:
    return host.isprintable() and not any(char.isspace() or char in "[]/" for char in host)
