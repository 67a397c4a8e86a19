"""An `End`: transports, caches and links, as an engine has them, and a log to wait for."""

from __future__ import annotations

import logging
import queue
import re
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from kvplan import CacheDesc, DataType, LlmRole, LLMStatusCode
from kvplan.control.auth import Keys
from kvplan.control.endpoint import Endpoint
from kvplan.control.notifying import Inbox
from kvplan.engine.options import Options
from kvplan.engine.registry import CacheRegistry
from kvplan.links import ClusterInfo, Links, LinkState, LinkStatus, RegisterMemStatus
from kvplan.transport.local import LocalTransport
from kvplan.transport.transport import Transport

DESC = CacheDesc(2, (4, 16), DataType.DT_FLOAT)
DEADLINE_S = 20.0  # for events that happen at once, on a machine that stalls


class End:
    """Links of an engine, without the engine."""

    def __init__(
        self,
        cluster_id: int,
        *,
        listen: str = "127.0.0.1:0",
        transports: Sequence[Transport] | None = None,
        keyless: bool = False,
        inbox: Inbox | None = None,
        **options: Any,
    ) -> None:
        self.cluster_id = cluster_id
        self.transports = (LocalTransport(),) if transports is None else tuple(transports)
        given = Options(**options)
        self.registry = CacheRegistry(self.transports, given, self._changed)
        self.log = _Log(cluster_id)
        self.links = Links(
            cluster_id, lambda: LlmRole.MIX, given, self.registry, self.transports, inbox=inbox
        )
        if keyless:  # as for an address of the network
            object.__setattr__(self.links._engine, "keys", Keys())
        self.links.start()
        if listen:
            self.links.listen(Endpoint.parse(listen))
        self.address = str(self.links.endpoint) if listen else ""

    def _changed(self) -> None:
        self.links.publish_soon()

    @property
    def cluster(self) -> ClusterInfo:
        """Return the address of this side, for a peer."""
        return ClusterInfo(self.cluster_id, self.address)

    def link(self, *clusters: ClusterInfo, timeout_ms: int = 5000) -> None:
        """Link with all clusters, and raise the first failure."""
        self.links.link(clusters, timeout_ms).raise_for_status()

    def check_link_fails(self, cluster: ClusterInfo, status: LLMStatusCode, message: str) -> None:
        """Expect that linking fails with `status` and `message`."""
        (result,) = self.links.link([cluster], 5000)
        assert result.status is status, result
        assert re.search(message, str(result.error)), result

    def show_instance(self, instance: str) -> None:
        """Pretend to be another engine, as a program other than kvplan can."""
        object.__setattr__(self.links._engine, "instance", bytes.fromhex(instance))

    def state(self, cluster_id: int) -> LinkState | None:
        return next(
            (state.state for state in self.links.status() if state.cluster_id == cluster_id), None
        )

    def status(self, cluster_id: int) -> LinkStatus:
        return self.links.get(cluster_id).status()

    def wait_until(self, cluster_id: int, state: LinkState | None) -> None:
        """Wait for a state that a link enters without a line in the log."""
        deadline = time.monotonic() + DEADLINE_S
        while self.state(cluster_id) is not state:
            assert time.monotonic() < deadline, f"{self.state(cluster_id)} is not {state}"

    def wait_for(self, cluster_id: int, state: str) -> str:
        """Wait until a link enters a state, and return the level and the line of the log."""
        return self.log.wait_for_line(f"peer={cluster_id} state={state} ")

    def close(self) -> None:
        self.log.close()
        self.links.close()
        self.registry.close()
        for transport in self.transports:
            transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def settle(end: End, comm_id: int) -> RegisterMemStatus:
    """Wait until a communicator is prepared or has failed, and return its status."""
    end.log.wait_for_line(f"comm cluster={end.cluster_id} comm_id={comm_id} ")
    return end.links.comm_status(comm_id)


class _Log(logging.Handler):
    """The log of one engine."""

    def __init__(self, cluster_id: int) -> None:
        super().__init__()
        self._mine = f" cluster={cluster_id} "
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        logging.getLogger("kvplan").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if self._mine in line:
            self._lines.put(f"{record.levelname} {line}")

    def next_line(self) -> str:
        """Return the next line that is logged already.

        Raises:
            queue.Empty: no line is left.
        """
        return self._lines.get_nowait()

    def wait_for_line(self, part: str) -> str:
        deadline = time.monotonic() + DEADLINE_S
        seen = []
        while (left := deadline - time.monotonic()) > 0:
            try:
                seen.append(self._lines.get(timeout=left))
            except queue.Empty:
                break
            if part in seen[-1]:
                return seen[-1]
        raise AssertionError(f"{part!r} was not logged, but {seen}")

    def close(self) -> None:
        logging.getLogger("kvplan").removeHandler(self)
        super().close()
