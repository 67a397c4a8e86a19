"""The options in `kv_connector_extra_config`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvplan.control.endpoint import PORT_MAX
from kvplan.engine.option_kinds import ADVERTISED, TEXT, Kind, described, one_of, option, rows_of
from kvplan.serving import ExchangeOptions
from kvplan.status import invalid
from kvplan.validation import check_type, shown


def _check_listen(name: str, value: object) -> None:
    _, _, port = check_type(name, value, str).rpartition(":")
    if not port.isdecimal() or int(port) > PORT_MAX:
        raise invalid(f'{name}={shown(value)} must be "ip:port" with port in [0, {PORT_MAX}]')


def _check_engine(name: str, value: Mapping[str, str]) -> None:
    for key, text in value.items():
        check_type(f"a key of {name}", key, str)
        check_type(f"{name}[{key!r}]", text, str)


@described
@dataclass(frozen=True)
class ConnectorOptions:
    """The keys of `kv_connector_extra_config`, which also has those of `ExchangeOptions`."""

    # fmt: off
    mode: str = option(
        "pull", one_of(("pull", "push")),
        "`pull`: the consumer fetches finished requests; `push`: the producer sends each layer "
        "while it computes the next, to consumers of this mode.",
        see="../how-to/vllm.md#layer-by-layer")
    listen: str = option(
        "127.0.0.1:0", Kind(_check_listen, values="ip:port"),
        "Address at which the first worker of a producer listens; the others, those of other "
        "stages and replicas included, use the next ports. Port 0: any.")
    advertise: str = option(
        "", ADVERTISED,
        "Address that consumers link to, if it is not `listen`: \"host\", or \"host:port\" of the "
        "first worker behind a port mapping; the others have the next ports. Needed if `listen` "
        "is 0.0.0.0.",
        see="../how-to/containers.md#addresses")
    model: str = option(
        "", TEXT, "Name of the model, which must be equal on both sides. Empty: vLLM's name.")
    explain: bool = option(
        False, Kind(lambda name, value: check_type(name, value, bool), values="false, true"),
        "Log how each request was fetched; also with `KVPLAN_EXPLAIN=1`.")
    engine: Mapping[str, str] = option(
        {}, Kind(_check_engine, values="object"),
        "Options of the kvplan engine, such as `{\"kvplan.encrypt\": \"1\"}`.",
        see="options.md")
    # fmt: on
    exchange: ExchangeOptions = field(default_factory=ExchangeOptions)

    def __post_init__(self) -> None:
        for row in rows_of(type(self)):
            row.check(getattr(self, row.field))

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> ConnectorOptions:
        """Read a user's `kv_connector_extra_config`."""
        limits = {field.name for field in fields(ExchangeOptions)}
        mine = {field.name for field in fields(cls)} - {"exchange"}
        if unknown := sorted(extra.keys() - limits - mine):
            raise invalid(
                f"kv_connector_extra_config has {shown(unknown[0])}; known are "
                f"{', '.join(sorted(limits | mine))}"
            )
        given = {key: value for key, value in extra.items() if key in mine}
        given.setdefault("explain", os.environ.get("KVPLAN_EXPLAIN", "") not in ("", "0"))
        exchange = ExchangeOptions(**{k: v for k, v in extra.items() if k in limits})
        return cls(**given, exchange=exchange)

    def listen_of(self, worker: int) -> str:
        """Return the address at which a worker listens."""
        return _of_worker(self.listen, worker)

    def advertised_of(self, worker: int) -> str:
        """Return the address that consumers use for a worker; empty: its listener's."""
        has_port = re.search(":[0-9]+$", self.advertise) is not None
        return _of_worker(self.advertise, worker) if has_port else self.advertise


def _of_worker(first: str, worker: int) -> str:
    host, _, port = first.rpartition(":")
    return f"{host}:{int(port) + worker if int(port) else 0}"
