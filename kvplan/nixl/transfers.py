"""`nixlAgent`: transfers between descriptors that were found in registered memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvnative._ranges import choose, first_overlap
from kvnative._signals import Mutex
from kvplan.addressed.connections import check_message
from kvplan.addressed.engine import REFUSALS, Request
from kvplan.engine.ranges import AddressRanges
from kvplan.execution import TransferTask
from kvplan.nixl.agent import GONE, LOG, Agent, text_of
from kvplan.nixl.lists import Rows, nixlXferDList, rows_of_array
from kvplan.nixl.metadata import Regions
from kvplan.nixl.values import (
    nixl_mem_t,
    nixl_status_t,
    nixl_xfer_op_t,
    nixlAgentConfig,
    nixlBackendError,
    nixlInvalidParamError,
    nixlNoTelemetryError,
    nixlNotPostedError,
    nixlRemoteDisconnectError,
    nixlRepostActiveError,
    nixlXferTelemetry,
)
from kvplan.planning.ranges import span_text
from kvplan.planning.texts import plural
from kvplan.status import LLMException, link_failed, message_of, without_frames
from kvplan.tensors.strided import pieces_of
from kvplan.validation import as_bytes, check_type, shown

Column = NDArray[np.uint64]
Indices = NDArray[np.integer[Any]]

_PREPARED: Final = ("agent_name", "mem_type", "descs", "array", "backend")
"""Arguments of `prepXferDlist` in their order."""

_SUCCESS: Final = nixl_status_t.NIXL_SUCCESS
_IN_PROGRESS: Final = nixl_status_t.NIXL_IN_PROG


class _Side(NamedTuple):
    """One side of transfers: descriptors that were found in registered memory."""

    agent: str  # as given; empty: this agent
    instance: int  # the agent's process: the cluster id of its engine
    is_local: bool
    kind: nixl_mem_t
    rows: Rows


@dataclass(eq=False)
class _Transfer:
    """A request: ranges, and its last post."""

    agent: str
    instance: int  # the agent's process: the cluster id of its engine
    operation: nixl_xfer_op_t
    local: Column
    remote: Column
    sizes: Column
    nbytes: int
    message: bytes
    status: nixl_status_t | None = None  # None: not posted
    error: LLMException | None = None
    request: Request | None = None
    began: float = 0.0  # monotonic time of the last post, in seconds
    posted: float = 0.0
    ended: float = 0.0
    ranges: AddressRanges | None = None  # None: not posted
    posting: Mutex = field(default_factory=Mutex)  # held by a post, which a release waits for

    @property
    def text(self) -> str:
        """The name of the transfer in the log."""
        return f"{self.operation.name} of {plural(len(self.sizes), 'descriptor')}"


class nixlAgent(Agent):  # noqa: N801 - a name of the original, as those of the methods
    """An agent. `releaseXferReq` and `invalidateRemoteMD` stop transfers before they return."""

    def __init__(self, name: str, config: nixlAgentConfig) -> None:
        self._sides: dict[int, _Side] = {}
        self._transfers: dict[int, _Transfer] = {}
        super().__init__(name, config)  # last: a peer may ask its listening thread at once

    def prepXferDlist(self, *given: Any, **named: Any) -> int:  # noqa: N802
        """Find descriptors in registered memory, and return a handle for `makeXferReq`.

        Called with (agent_name, descs, backend=[]), (descs, backend=[]), or
        (agent_name, mem_type, array, backend=[]), whose array has 3 columns, or 5 with a stride
        and a count.
        """
        if unknown := named.keys() - set(_PREPARED):
            raise TypeError(f"prepXferDlist has no arguments {sorted(unknown)}")
        agents = [named.pop("agent_name")] if "agent_name" in named else []
        values = [*agents, *given, *(named[name] for name in _PREPARED if name in named)]
        has_agent = bool(values) and isinstance(values[0], str | bytes)
        agent = text_of("agent_name", values.pop(0)) if has_agent else ""
        if values and isinstance(values[0], nixlXferDList):
            kind, rows = values[0].getType(), values[0].rows.copy()  # the program may change it
        elif len(values) > 1:
            kind, rows = nixl_mem_t(values[0]), _expanded(values[1])
        else:
            raise TypeError("prepXferDlist needs descs, or mem_type and array")
        agent = "" if agent == "NIXL_INIT_AGENT" else agent
        is_local = agent in ("", self.name)
        instance, regions = self._memory_of(agent or self.name)
        self._check(regions, "local" if is_local else "remote", kind, rows)
        number = next(self._numbers)
        self._sides[number] = _Side(agent, instance, is_local, kind, rows)
        return number

    def _memory_of(self, agent: str) -> tuple[int, Regions]:
        """Return the process of an agent that is known, or of this one, and its memory."""
        if agent == self.name:
            return self.engine.datadist.cluster_id, self._local
        remote = self._remote(agent)
        return remote.instance, remote.regions

    def releasedDlistH(self, handle: int) -> nixl_status_t:  # noqa: N802
        """Forget a prepared list; idempotent."""
        self._sides.pop(handle, None)
        return _SUCCESS

    def makeXferReq(  # noqa: N802
        self, operation: nixl_xfer_op_t, local_side: int, local_indices: Any, remote_side: int,
        remote_indices: Any, notif_msg: bytes | str = b"", backend: Sequence[int] = (),
        skip_desc_merge: bool = False,
    ) -> int:  # fmt: skip
        """Return the handle of a transfer between descriptors of two prepared lists."""
        check_type("operation", operation, nixl_xfer_op_t)
        local, remote = self._sides.get(local_side), self._sides.get(remote_side)
        if local is None or remote is None:
            raise nixlInvalidParamError("a prepared list was released")
        if not local.is_local or not remote.agent:
            raise nixlInvalidParamError("local_side must be a local list, remote_side a remote one")
        return self._add(
            operation, remote.agent, remote.instance, local.rows, remote.rows, notif_msg,
            _indices("local_indices", local_indices), _indices("remote_indices", remote_indices),
        )  # fmt: skip

    def createXferReq(  # noqa: N802
        self, operation: nixl_xfer_op_t, local_descs: nixlXferDList, remote_descs: nixlXferDList,
        remote_agent: str | bytes, notif_msg: bytes | str = b"", backend: Sequence[int] = (),
    ) -> int:  # fmt: skip
        """Return the handle of a transfer between two lists of descriptors."""
        check_type("operation", operation, nixl_xfer_op_t)
        local = check_type("local_descs", local_descs, nixlXferDList).rows
        remote = check_type("remote_descs", remote_descs, nixlXferDList).rows
        agent = text_of("remote_agent", remote_agent)
        instance, regions = self._memory_of(agent)
        self._check(self._local, "local", local_descs.getType(), local)
        self._check(regions, "remote", remote_descs.getType(), remote)
        return self._add(operation, agent, instance, local, remote, notif_msg)

    def _add(
        self, operation: nixl_xfer_op_t, agent: str, instance: int, local: Rows, remote: Rows,
        message: bytes | str, mine: Indices | None = None, theirs: Indices | None = None,
    ) -> int:  # fmt: skip
        """Add a transfer between all or the chosen rows of two lists."""
        counts = [len(local if mine is None else mine), len(remote if theirs is None else theirs)]
        if counts[0] != counts[1] or not counts[0]:
            raise nixlInvalidParamError(
                f"{counts[0]} local and {counts[1]} remote descriptors; a transfer has equally "
                "many of both, and at least one"
            )
        here, there, sizes, nbytes, wrong = choose(local, remote, mine, theirs)
        if wrong >= 0:
            raise _unlike(wrong, local, remote, mine, theirs)
        written = here if operation is nixl_xfer_op_t.NIXL_READ else there
        if len(sizes) > 1 and (clash := first_overlap(written, sizes)) is not None:
            texts = [span_text(int(written[at]), int(sizes[at])) for at in sorted(clash)]
            raise self._logged("transfer", ValueError(f"{' and '.join(texts)} overlap"))
        number = next(self._numbers)
        self._transfers[number] = _Transfer(
            agent, instance, operation, here, there, sizes, nbytes, as_bytes("notif_msg", message)
        )
        return number

    def postXferReq(self, reqh: int, notif_msg: bytes | str = b"") -> nixl_status_t:  # noqa: N802
        """Begin a transfer, or begin it again after its end."""
        transfer = self._transfer(reqh)
        with transfer.posting:
            try:
                return self._posted(reqh, transfer, notif_msg)
            finally:  # removed by another thread, or released by a signal handler
                is_known = transfer.agent == self.name or transfer.agent in self._remotes
                if reqh not in self._transfers or not is_known:
                    self._stop(transfer, "the transfer was released, or its agent removed")

    def _posted(self, reqh: int, transfer: _Transfer, notif_msg: bytes | str) -> nixl_status_t:
        """Begin a transfer, and return its state."""
        self._transfer(reqh)  # again: another thread may have released the transfer
        if transfer.status is _IN_PROGRESS and self.getXferStatus(reqh) is _IN_PROGRESS:
            raise nixlRepostActiveError(f"transfer {reqh} is still in flight")
        if notif_msg:
            transfer.message = as_bytes("notif_msg", notif_msg)
        transfer.began, transfer.error, transfer.request = monotonic(), None, None
        transfer.status = _IN_PROGRESS  # other threads may ask from here on
        try:
            self._post(transfer)
        except REFUSALS as error:
            self._failed(transfer, error)
            found = self._logged(f"{transfer.text} with {transfer.agent}", error)
            try:
                if not isinstance(found, nixlBackendError):
                    raise found from error
            finally:
                del found  # it has this frame
        except BaseException:
            if transfer.request is None:
                transfer.status = None
            raise
        transfer.posted = monotonic()
        return _SUCCESS if transfer.status is _SUCCESS else self.getXferStatus(reqh)

    def _post(self, transfer: _Transfer) -> None:
        datadist, agent = self.engine.datadist, transfer.agent
        is_loop = agent == self.name
        try:
            cluster = datadist.cluster_id if is_loop else self._linked(agent)
        except LLMException as error:
            raise link_failed(message_of(error)) from error  # the agent is gone
        if cluster != transfer.instance:  # its addresses are those of the process before
            raise link_failed(
                f"agent {agent!r} is another process now: make the transfer again, from lists that "
                "are prepared again"
            )
        ranges = transfer.ranges
        if ranges is None:
            is_read = transfer.operation is nixl_xfer_op_t.NIXL_READ
            direction: Literal["pull", "push"] = "pull" if is_read else "push"
            columns = transfer.local, transfer.remote, transfer.sizes
            ranges = transfer.ranges = AddressRanges(cluster, *columns, direction)
        frames: list[bytes] = []
        if transfer.message and is_loop:  # `_succeeded` keeps the message
            check_message(self.name.encode(), transfer.message)
        elif transfer.message:
            frames = self.engine.connections.frames(self.name.encode(), transfer.message)
        for frame in frames[:-1]:
            datadist.notify(cluster, frame)
        last = frames[-1] if frames else None

        def keep(task: TransferTask) -> None:
            transfer.request = Request(task, ranges, agent, transfer.text)

        if not self.engine.begin(ranges, transfer.nbytes, keep, notify=last):
            self._succeeded(transfer)

    def getXferStatus(self, reqh: int) -> nixl_status_t:  # noqa: N802
        """Return the state of a transfer. The log has the reason of NIXL_ERR_BACKEND.

        Raises:
            nixlRemoteDisconnectError: the transfer failed because the remote agent is gone.
            nixlNotPostedError, nixlInvalidParamError: the transfer was not posted, or was released.
        """
        transfer = self._transfer(reqh)
        if transfer.status is None:
            raise nixlNotPostedError(f"transfer {reqh} was not posted")
        request = transfer.request
        if request is not None and transfer.status is _IN_PROGRESS and request.has_ended():
            with self._mutex:
                if transfer.request is request:  # no other thread was faster
                    error = request.error(LOG, reqh)
                    self._succeeded(transfer) if error is None else self._failed(transfer, error)
        if transfer.error is not None and transfer.error.status_code in GONE:
            raise nixlRemoteDisconnectError(str(transfer.error))
        return transfer.status

    def _succeeded(self, transfer: _Transfer) -> None:
        if transfer.message and transfer.agent == self.name:
            self._looped.append(transfer.message)
        transfer.ended = monotonic()
        transfer.request, transfer.status = None, _SUCCESS

    def _failed(self, transfer: _Transfer, error: BaseException) -> None:
        transfer.request, transfer.status = None, nixl_status_t.NIXL_ERR_BACKEND
        transfer.error = (
            without_frames(error) if isinstance(error, LLMException) else LLMException(str(error))
        )

    def releaseXferReq(self, reqh: int) -> nixl_status_t:  # noqa: N802
        """Stop and forget a transfer; on return none of its bytes moves. Idempotent."""
        if (transfer := self._transfers.get(reqh)) is not None:
            with transfer.posting:
                self._stop(transfer, "the transfer was released")
                self._transfers.pop(reqh, None)  # last: until then others find it, and wait
        return _SUCCESS

    def _stop(self, transfer: _Transfer, reason: str) -> None:
        if (request := transfer.request) is not None:
            request.task.cancel(LLMException(reason))

    def _transfer(self, reqh: int) -> _Transfer:
        transfer = self._transfers.get(reqh)
        if transfer is None:
            raise nixlInvalidParamError(f"transfer {reqh} does not exist, or was released")
        return transfer

    def invalidateRemoteMD(self, name: str | bytes) -> nixl_status_t:  # noqa: N802
        """Stop all transfers with a remote agent, and forget the agent; idempotent."""
        name = text_of("name", name)
        reason = f"agent {name!r} was removed"
        for transfer in self._transfers_with(name):  # first: ending the link waits for them
            self._stop(transfer, reason)
        super().invalidateRemoteMD(name)
        for transfer in self._transfers_with(name):  # a post that knew the agent may still begin
            with transfer.posting:
                self._stop(transfer, reason)
        return _SUCCESS

    def _transfers_with(self, name: str) -> list[_Transfer]:
        return [each for each in list(self._transfers.values()) if each.agent == name]

    def getXferTelemetry(self, reqh: int) -> nixlXferTelemetry:  # noqa: N802
        """Return the times of a transfer that is done."""
        transfer = self._transfer(reqh)
        if not self._config.captureTelemetry:
            raise nixlNoTelemetryError("captureTelemetry is False")
        if transfer.status is not _SUCCESS:
            raise nixlNotPostedError(f"transfer {reqh} is not done")
        post, whole = (at - transfer.began for at in (transfer.posted, transfer.ended))
        return nixlXferTelemetry(
            startTime=int(transfer.began * 1e6), postDuration=int(post * 1e6),
            xferDuration=int(max(post, whole) * 1e6), totalBytes=transfer.nbytes,
            descCount=len(transfer.sizes),
        )  # fmt: skip

    def estimateXferCost(self, req_handle: int) -> tuple[int, int, int]:  # noqa: N802
        """Return duration 0, error 0 and method -1: kvplan does not estimate."""
        self._transfer(req_handle)
        return 0, 0, -1

    def queryXferBackend(self, reqh: int) -> int:  # noqa: N802
        """Return the backend of a transfer."""
        self._transfer(reqh)
        return next(iter(self._backends.values()))

    def prepMemView(self, dlist: Any, backends: Sequence[int] = ()) -> int:  # noqa: N802
        """Refuse: views of memory are for GPU kernels."""
        raise nixlBackendError("views of memory are for GPU kernels, which kvplan does not have")

    def releaseMemView(self, mvh: int) -> None:  # noqa: N802
        """Do nothing: kvplan makes no views."""


def _expanded(array: Any) -> Rows:
    """Return rows of an array with 3 columns, or with a stride and a count for each row."""
    if array.ndim != 2 or array.shape[1] not in (3, 5):
        raise TypeError(f"an array of shape {array.shape} must have 3 or 5 columns")
    if array.shape[1] == 3:
        return rows_of_array(array)
    rows, form = rows_of_array(array[:, :3]), array[:, 3:].astype(np.uint64)
    if not form[:, 1].sum() <= 1 << 28:
        raise nixlInvalidParamError(f"the counts have a sum of {form[:, 1].sum()}, above 2**28")
    return pieces_of(np.hstack((rows, form)))


def _indices(name: str, indices: Any) -> Indices:
    """Return a list or an array of indices as integers; floats are truncated, as in NIXL."""
    try:
        chosen = np.asarray(indices)
        is_native = chosen.dtype.kind in "iu" and chosen.dtype.isnative
        len(chosen)
        return chosen if is_native else chosen.astype(np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        text = f"{name}={shown(indices)} must be a list or an array of integers: {error}"
        raise TypeError(text) from None


def _unlike(
    at: int, local: Rows, remote: Rows, mine: Indices | None, theirs: Indices | None
) -> nixlInvalidParamError:
    """Return the error of a chosen pair: a row does not exist, or the sizes differ."""
    a, b = (at if chosen is None else int(chosen[at]) for chosen in (mine, theirs))
    for name, index, rows in (("local_indices", a, local), ("remote_indices", b, remote)):
        if not 0 <= index < len(rows):
            return nixlInvalidParamError(f"{name}[{at}]={index} must be in [0, {len(rows)})")
    return nixlInvalidParamError(
        f"descriptor {at} has {local[a, 1]} bytes here and {remote[b, 1]} there"
    )
