"""`link(comm_name, ...)`: members that know only a name and each other's ids find each other.

Of each two members the one with the lower cluster id waits, and the other calls it, again and again
until it is there. Which member begins, and when, makes no difference.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from kvplan.control.server import Server
from kvplan.links.calling import Caller
from kvplan.links.local_engine import LocalEngine, link_failed
from kvplan.links.peer_link import PeerLink
from kvplan.links.rank_table import Location
from kvplan.links.rendezvous_address import meeting_point
from kvplan.links.state import LinkState
from kvplan.links.transitions import Transitions
from kvplan.links.unlinking import Unlinker
from kvplan.logs import Log
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.validation import UINT64_MAX, check_type, check_width

if TYPE_CHECKING:
    from kvplan.control.endpoint import Endpoint
    from kvplan.control.messages import Hello
    from kvplan.links.peer_handler import PeerHandler

_LOG = Log("kvplan")
_PATIENCE_S = 60.0  # for all members, where link_total_time says nothing
_ATTEMPT_S = 5.0
_PAUSE_S = (0.01, 0.5)  # between attempts: the first, and the longest
_UNLINK_S = 1.0


class RegisterMemStatus(Enum):
    """How far a communicator is; names and values are the reference's."""

    OK = 0
    PREPARING = 1
    FAILED = 2


class Communicator:
    """Members that are, or will be, linked with each other.

    Attributes:
        comm_id: of this engine's own count.
        name: that all members use.
        members: where each runs, by cluster id.
        arrived: set for each member that has linked with this one.
        preparing: what makes the links.
        status: how far that is.
    """

    def __init__(self, comm_id: int, name: str, members: Mapping[int, Location]) -> None:
        self.comm_id = comm_id
        self.name = name
        self.members = dict(members)
        self.arrived = {cluster_id: asyncio.Event() for cluster_id in members}
        self.servers: list[Server] = []
        self.preparing: asyncio.Task[None] | None = None
        self.status = RegisterMemStatus.PREPARING

    def is_linked_by(self, link: PeerLink) -> bool:
        """Whether `link` stands, and belongs to this communicator."""
        linked = (LinkState.LINKED, LinkState.UNLINKING)
        return link.comm_id == self.comm_id and link.state in linked


class Rendezvous:
    """All communicators of one engine; used by the control thread.

    Args:
        engine: this one.
        transitions: of its links.
        caller: begins handshakes.
        unlinker: ends links.
        handler: makes what answers peers, from what says whether they may link.
    """

    def __init__(
        self,
        engine: LocalEngine,
        transitions: Transitions,
        caller: Caller,
        unlinker: Unlinker,
        handler: Callable[[Callable[[Hello], int | None]], PeerHandler],
    ) -> None:
        self._engine = engine
        self._steps = transitions
        self._caller = caller
        self._unlinker = unlinker
        self._handler = handler(self._admit)
        self._communicators: dict[int, Communicator] = {}
        self._listening = asyncio.Lock()
        self._last_id = 0

    async def link(self, comm_name: str, members: Mapping[int, Location]) -> int:
        """Begin to link all members, this engine among them; returns the communicator's id.

        Raises:
            TypeError: comm_name is no str.
            LLMException: LLM_PARAM_INVALID.
        """
        if not 1 <= len(check_type("comm_name", comm_name, str)) <= 127:
            raise invalid(f"comm_name has {len(comm_name)} characters; [1, 127] are allowed")
        for other in self._communicators.values():
            if other.name == comm_name:
                raise invalid(f"comm_name={comm_name!r} is linked already: {other.comm_id}")
        self._last_id += 1
        comm = self._communicators[self._last_id] = Communicator(self._last_id, comm_name, members)
        comm.preparing = asyncio.create_task(self._prepare(comm))
        return comm.comm_id

    async def unlink(self, comm_id: int) -> None:
        """End the links of a communicator, or stop making them.

        Raises:
            LLMException: LLM_NOT_YET_LINK: there is none of this id; LLM_LINK_BUSY: transfers are
                in flight, and it stays.
        """
        comm = self._get(comm_id)
        assert comm.preparing is not None
        comm.preparing.cancel()
        await asyncio.wait((comm.preparing,))
        links = [self._steps.links.get(cluster_id) for cluster_id in comm.members]
        ours = [it for it in links if it is not None and it.comm_id == comm_id]
        ends = (self._unlinker.unlink(it.cluster_id, _UNLINK_S, force=False) for it in ours)
        for outcome in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(outcome, LLMException):
                if outcome.status_code is LLMStatusCode.LLM_LINK_BUSY:
                    raise outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        self._forget(self._get(comm_id))  # another call, or the engine's end, may have been first

    def status(self, comm_id: int) -> RegisterMemStatus:
        """How far a communicator is; FAILED also where a link has broken since.

        One that a member has unlinked stays OK: a program that asks now and then may ask too late.

        Raises:
            LLMException: LLM_NOT_YET_LINK: there is none of this id.
        """
        comm = self._get(comm_id)
        if comm.status is not RegisterMemStatus.OK:
            return comm.status
        links = [self._steps.links.get(cluster_id) for cluster_id in comm.members]
        is_lost = any(link is not None and not comm.is_linked_by(link) for link in links)
        return RegisterMemStatus.FAILED if is_lost else RegisterMemStatus.OK

    def linked(self, link: PeerLink) -> None:
        """A peer has linked with this engine."""
        comm = self._communicators.get(link.comm_id or 0)
        if comm is not None:
            comm.arrived[link.cluster_id].set()

    def close(self) -> None:
        """End all communicators; their links end by themselves."""
        for comm in tuple(self._communicators.values()):
            if comm.preparing is not None:
                comm.preparing.cancel()
            self._forget(comm)

    def _admit(self, hello: Hello) -> int:
        for comm in self._communicators.values():
            if comm.name == hello.comm and hello.cluster_id in comm.members:
                return comm.comm_id
        raise link_failed(
            f"cluster {self._engine.cluster_id} is not linking communicator {hello.comm!r} with "
            f"cluster {hello.cluster_id}"
        )

    async def _prepare(self, comm: Communicator) -> None:
        patience_s = self._engine.options.link_total_time or _PATIENCE_S
        others = sorted(set(comm.members) - {self._engine.cluster_id})
        pairs: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(patience_s):
                await self._listen(comm, filter(self._waits, others))
                pairs = [asyncio.create_task(self._pair(comm, it)) for it in others]
                await asyncio.gather(*pairs)
        except TimeoutError:
            missing = [it for it in others if not comm.arrived[it].is_set()]
            tries = "; ".join(str(e.args[0]) for it in missing if (e := self._steps.errors.get(it)))
            reason = f"clusters {missing} have not linked within {patience_s:g} s"
            self._conclude(comm, f"{reason}: {tries}" if tries else reason)
        except LLMException as error:
            self._conclude(comm, str(error.args[0]))
        else:
            self._conclude(comm)
        finally:
            for pair in pairs:
                pair.cancel()

    async def _pair(self, comm: Communicator, cluster_id: int) -> None:
        """Link with one member, however long it takes to be there."""
        link = self._steps.links.get(cluster_id)
        if link is not None and link.is_live and not comm.is_linked_by(link):
            raise link_failed(f"cluster {cluster_id} is linked already, but not by this name")
        if self._waits(cluster_id):
            await comm.arrived[cluster_id].wait()
            return
        endpoint = self._meet(comm, cluster_id)
        pause_s, longest_s = _PAUSE_S
        while not await self._call(comm, cluster_id, endpoint):
            await asyncio.sleep(pause_s)  # until it is there; nothing tells when
            pause_s = min(2 * pause_s, longest_s)
        comm.arrived[cluster_id].set()

    async def _call(self, comm: Communicator, cluster_id: int, endpoint: Endpoint) -> bool:
        """Try to link with a member; returns whether it was there."""
        if endpoint.path and not Path(endpoint.path).exists():
            return False
        try:
            link = await self._caller.link(
                cluster_id, endpoint, self._handler, _ATTEMPT_S, comm.name
            )
        except LLMException as error:
            if error.status_code is LLMStatusCode.LLM_ALREADY_LINK:
                raise
            return False
        link.comm_id = comm.comm_id
        return link.comm == comm.name

    def _waits(self, cluster_id: int) -> bool:
        """Whether this engine waits for `cluster_id`, which calls it."""
        return self._engine.cluster_id < cluster_id

    def _meet(self, comm: Communicator, cluster_id: int) -> Endpoint:
        """Where this engine and another member meet."""
        called, calls = sorted((self._engine.cluster_id, cluster_id))
        here, there = comm.members[calls], comm.members[called]
        return meeting_point(here, there, comm.name, called, self._engine.options)

    async def _listen(self, comm: Communicator, callers: Iterable[int]) -> None:
        """Listen where other members will call; a port may serve several communicators."""
        engine = self._engine
        for endpoint in {self._meet(comm, it) for it in callers}:
            async with self._listening:
                servers = (it for other in self._communicators.values() for it in other.servers)
                server = next((it for it in servers if it.endpoint == endpoint), None)
                comm.servers.append(
                    server
                    or await Server.listen(engine.control, endpoint, self._handler, engine.keys)
                )

    def _forget(self, comm: Communicator) -> None:
        del self._communicators[comm.comm_id]
        still_used = {it for other in self._communicators.values() for it in other.servers}
        for server in set(comm.servers) - still_used:
            server.close()

    def _get(self, comm_id: int) -> Communicator:
        check_width("comm_id", comm_id, 0, UINT64_MAX)
        if (comm := self._communicators.get(comm_id)) is None:
            raise LLMException(
                f"comm_id={comm_id} is not linked; there are {sorted(self._communicators)}",
                status_code=LLMStatusCode.LLM_NOT_YET_LINK,
            )
        return comm

    def _conclude(self, comm: Communicator, failure: str = "") -> None:
        comm.status = RegisterMemStatus.FAILED if failure else RegisterMemStatus.OK
        unlinked = set(comm.members) - self._steps.live() - {self._engine.cluster_id}
        for cluster_id in unlinked if failure else ():
            why = link_failed(f"communicator {comm.name!r}: {failure}")
            self._steps.note_error(cluster_id, why)
        _LOG.log(
            logging.WARNING if failure else logging.INFO,
            "comm cluster=%d comm_id=%d name=%r state=%s%s",
            self._engine.cluster_id,
            comm.comm_id,
            comm.name,
            comm.status.name,
            f" reason={failure!r}" if failure else "",
        )
