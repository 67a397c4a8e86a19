"""The options in `kv_connector_extra_config`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvplan.serving import ExchangeOptions
from kvplan.status import invalid
from kvplan.validation import check_type, shown

_PORT_MAX = 65535


@dataclass(frozen=True)
class ConnectorOptions:
    """The keys of `kv_connector_extra_config`, besides those of `ExchangeOptions`.

    Attributes:
        mode: "pull": the consumer fetches finished requests; "push": the producer sends each layer
            while it computes the next, to consumers of this mode.
        listen: "ip:port" at which the first worker of a producer listens; the others, those of
            other stages and replicas included, use the next ports. Port 0: any.
        model: the model name, which must be equal on both sides; empty: vLLM's name.
        explain: True to log how each request was fetched; also KVPLAN_EXPLAIN=1.
        engine: options of the kvplan engine, such as {"kvplan.cluster_key_file": "..."}.
        exchange: time limits.
    """

    mode: str = "pull"
    listen: str = "127.0.0.1:0"
    model: str = ""
    explain: bool = False
    engine: Mapping[str, str] = field(default_factory=dict)
    exchange: ExchangeOptions = field(default_factory=ExchangeOptions)

    def __post_init__(self) -> None:
        if check_type("mode", self.mode, str) not in ("pull", "push"):
            raise invalid(f'mode={shown(self.mode)} must be "pull" or "push"')
        _, _, port = check_type("listen", self.listen, str).rpartition(":")
        if not port.isdecimal() or int(port) > _PORT_MAX:
            raise invalid(f'listen={shown(self.listen)} must be "ip:port"')
        check_type("model", self.model, str)
        check_type("explain", self.explain, bool)
        for key, value in self.engine.items():
            check_type("a key of engine", key, str)
            check_type(f"engine[{key!r}]", value, str)

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
        host, _, port = self.listen.rpartition(":")
        return f"{host}:{int(port) + worker if int(port) else 0}"
