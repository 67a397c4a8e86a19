"""Names of engines, "host:port", from which their endpoints follow."""

from __future__ import annotations

import hashlib
import re

from kvplan.control.endpoint import Endpoint
from kvplan.status import invalid
from kvplan.validation import shown


def own_endpoint(local_engine: str) -> Endpoint | None:
    """Return the endpoint of an engine of this name; None without a port, or with one below 1."""
    host, port = split_name(local_engine, "local_engine")
    if port is None or port < 1:
        Endpoint.parse(f"{host}:0")
        return None
    return Endpoint.parse(f"{host}:{port}")


def peer_endpoint(remote_engine: str) -> Endpoint:
    """Return the endpoint of a remote engine of this name."""
    host, port = split_name(remote_engine, "remote_engine")
    if port is None or port < 1:
        raise invalid(f"remote_engine={shown(remote_engine)} has no port; give host:port")
    return Endpoint.parse(f"{host}:{port}")


def where_named(remote_engine: str) -> tuple[Endpoint, int]:
    """Return the endpoint and the cluster id that follow from a remote engine's name."""
    endpoint = peer_endpoint(remote_engine)
    return endpoint, cluster_id_of(endpoint)


def cluster_id_of(endpoint: Endpoint) -> int:
    """Return the cluster id that follows from an engine's endpoint."""
    digest = hashlib.blake2b(f"kvplan {endpoint}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def split_name(name: str, argument: str) -> tuple[str, int | None]:
    """Return the host of a name, and its port or None."""
    found = re.fullmatch(r"(\[[^\]\s]+\]|[^\[\]:\s]+)(?::(-?[0-9]{1,9}))?", name)
    if found is None:
        raise invalid(
            f"{argument}={shown(name)} must be 'host:port', 'host', '[ipv6]:port' or '[ipv6]'"
        )
    host, port = found.groups()
    return host, None if port is None else int(port)
