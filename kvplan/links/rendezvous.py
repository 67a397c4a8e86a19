"""Links by name: the locations of a communicator's members, and where they meet."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvplan.control.connecting import Server
from kvplan.control.endpoint import PORT_MAX, Endpoint, check_directory
from kvplan.links.handshake import HandshakeInitiator
from kvplan.links.local_engine import LinkOptions, LocalEngine
from kvplan.links.peer_link import PeerLink
from kvplan.links.transitions import Transitions, Unlinker
from kvplan.links.values import LinkState
from kvplan.planning.texts import plural
from kvplan.status import LLMException, LLMStatusCode, invalid, link_failed, message_of, not_linked
from kvplan.system.logs import Log
from kvplan.system.users import check_above, private_directory, runtime_directory
from kvplan.validation import (
    UINT32_MAX,
    UINT64_MAX,
    check_mapping,
    check_type,
    check_width,
    is_unicode,
    shown,
)

if TYPE_CHECKING:
    from kvplan.control.channel import Handler
    from kvplan.control.messages import Hello


VERSIONS = ("1.0", "1.2")
_LOG = Log("kvplan")
_TOTAL_S = 60.0  # for all members, if link_total_time is 0
_ATTEMPT_S = 5.0
_PAUSE_S = (0.01, 0.5)  # between attempts: the first and the longest
_UNLINK_S = 1.0
_OTHER_CONTAINERS = (
    "a member in another container, or of another user, does not see that directory: share one "
    "(kvplan.comm_dir), or give each container its own server_id in the rank table"
)


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a rank. Ranks with equal `server_id` share a host.

    Attributes:
        server_id: Address of the host: its `host_ip` if the table has one, otherwise its
            `server_id`. Empty for the host of this process.
        device_id: Device number on that host.
    """

    server_id: str = ""
    device_id: int = 0


class _Device(msgspec.Struct):
    rank_id: str
    device_id: str = "0"


class _Server(msgspec.Struct):
    server_id: str
    device: list[_Device]
    host_ip: str = ""  # if given, server_id may be any name


class _RankTable(msgspec.Struct):
    version: str
    server_list: list[_Server]


_decoder = msgspec.json.Decoder(_RankTable)


def locate_members(
    cluster_id: int, cluster_rank_info: Mapping[int, int], rank_table: str
) -> dict[int, Location]:
    """Read the location of each member of a communicator, by cluster id."""
    check_mapping("cluster_rank_info", cluster_rank_info)
    for member, rank in cluster_rank_info.items():
        check_width("cluster_rank_info key", member, 0, UINT64_MAX)
        check_width(f"cluster_rank_info[{member}]", rank, 0, UINT32_MAX)
    ranks = list(cluster_rank_info.values())
    if not 2 <= len(ranks) <= 4:
        raise invalid(f"cluster_rank_info has {plural(len(ranks), 'member')}; [2, 4] are allowed")
    if ranks != sorted(ranks):
        raise invalid(f"cluster_rank_info={dict(cluster_rank_info)}: its ranks must not decrease")
    if cluster_id not in cluster_rank_info:
        raise invalid(
            f"cluster_rank_info={dict(cluster_rank_info)} lacks cluster {cluster_id}, which is "
            "this one"
        )
    located = locate(rank_table, set(ranks))
    return {member: located[rank] for member, rank in cluster_rank_info.items()}


def locate(rank_table: str, ranks: set[int]) -> dict[int, Location]:
    """Read the location of each rank in `ranks`."""
    if not check_type("rank_table", rank_table, str):
        return dict.fromkeys(ranks, Location())
    try:
        # str(): msgspec would read the memory of a subclass, such as NumPy's, directly.
        table = _decoder.decode(str(rank_table))
        located = {
            _number(device.rank_id): Location(
                server.host_ip or server.server_id, _number(device.device_id)
            )
            for server in table.server_list
            for device in server.device
        }
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _bad(rank_table, str(error)) from None
    if table.version not in VERSIONS:
        raise _bad(
            rank_table, f"version {shown(table.version)} is not one of {', '.join(VERSIONS)}"
        )
    if missing := sorted(ranks - set(located)):
        raise _bad(rank_table, f"rank {missing[0]} is not in it; there are {sorted(located)}")
    return {rank: located[rank] for rank in ranks}


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) <= UINT32_MAX):
        raise ValueError(f"{text!r} is not the number of a rank or device")
    return int(text)


def _bad(rank_table: str, why: str) -> LLMException:
    return invalid(f"rank_table={shown(rank_table)}: {why}")


class RegisterMemStatus(Enum):
    """The status of a communicator, with the names and values of the reference."""

    OK = 0
    PREPARING = 1
    FAILED = 2


class Communicator:
    """Members that are, or will be, linked with each other.

    Attributes:
        comm_id: Id that this engine has assigned.
        name: The name that all members use.
        members: Location of each member by cluster id.
        arrived: For each member, an event that is set once it has linked with this engine.
        preparing: The task that makes the links.
        status: Status of that task.
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
        """Return True if `link` is up and belongs to this communicator."""
        linked = (LinkState.LINKED, LinkState.UNLINKING)
        return link.comm_id == self.comm_id and link.state in linked


class Rendezvous:
    """All communicators of one engine. Only `status` may be called outside the control thread."""

    def __init__(
        self,
        engine: LocalEngine,
        transitions: Transitions,
        initiator: HandshakeInitiator,
        unlinker: Unlinker,
        make_handler: Callable[[Callable[[Hello], int | None]], Handler],
    ) -> None:
        self._engine = engine
        self._transitions = transitions
        self._initiator = initiator
        self._unlinker = unlinker
        self._handler = make_handler(self._admit)
        self._communicators: dict[int, Communicator] = {}
        self._listening = asyncio.Lock()
        self._last_id = 0

    async def link(self, comm_name: str, members: Mapping[int, Location]) -> int:
        """Begin to link all members, including this engine, and return the communicator's id."""
        if not 1 <= len(check_type("comm_name", comm_name, str)) <= 127:
            raise invalid(f"comm_name has {len(comm_name)} characters; [1, 127] are allowed")
        if not is_unicode(comm_name):
            raise invalid(f"comm_name={shown(comm_name)} is not Unicode text")
        for other in self._communicators.values():
            if other.name == comm_name:
                raise invalid(f"comm_name={comm_name!r} is linked already: {other.comm_id}")
        here = members[self._engine.cluster_id].server_id
        on_host = [member for member in members.values() if member.server_id == here]
        if len(on_host) > 1 and self._engine.options.comm_dir is None:
            path, remedy = str(runtime_directory()), ": set kvplan.comm_dir"
            check_directory("XDG_RUNTIME_DIR/kvplan", path, remedy)
        self._last_id += 1
        comm = self._communicators[self._last_id] = Communicator(self._last_id, comm_name, members)
        comm.preparing = asyncio.create_task(self._prepare(comm))
        return comm.comm_id

    async def unlink(self, comm_id: int) -> None:
        """End this engine's links of a communicator, or stop making them."""
        comm = self._get(comm_id)
        assert comm.preparing is not None
        comm.preparing.cancel()
        if comm.status is RegisterMemStatus.PREPARING:
            comm.status = RegisterMemStatus.FAILED  # which stays if this call does not end
        await asyncio.wait((comm.preparing,))
        tried: set[PeerLink] = set()
        links = self._transitions.links
        # Repeated, as a peer may complete a link meanwhile.
        while ours := {link for link in links.values() if link.comm == comm.name} - tried:
            tried |= ours
            ends = (self._unlinker.unlink(link.cluster_id, _UNLINK_S, force=False) for link in ours)
            for error in filter(None, await asyncio.gather(*ends, return_exceptions=True)):
                code = error.status_code if isinstance(error, LLMException) else None
                if code in {None, LLMStatusCode.LLM_LINK_BUSY}:
                    raise error
        self._forget(self._get(comm_id))  # another call, or `close`, may have been faster
        for link in (*self._transitions.accepting.values(), *links.values()):
            if link.comm == comm.name:  # a peer has begun it, or refuses to unlink
                self._transitions.unlinked(link, f"communicator {comm.name!r} was unlinked")

    def status(self, comm_id: int) -> RegisterMemStatus:
        """Return the status of a communicator, which a lost link changes from OK to FAILED.

        A communicator that another member has unlinked stays OK, because this program may poll
        it for the first time after that.
        """
        comm = self._get(comm_id)
        if comm.status is not RegisterMemStatus.OK:
            return comm.status
        links = [self._transitions.links.get(cluster_id) for cluster_id in comm.members]
        is_lost = any(link is not None and not comm.is_linked_by(link) for link in links)
        return RegisterMemStatus.FAILED if is_lost else RegisterMemStatus.OK

    def linked(self, link: PeerLink) -> None:
        """Record that a peer has linked with this engine."""
        comm = self._communicators.get(link.comm_id or 0)
        if comm is not None:
            comm.arrived[link.cluster_id].set()

    def close(self) -> None:
        """Close all communicators."""
        for comm in list(self._communicators.values()):
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
        total_s = self._engine.options.link_total_time or _TOTAL_S
        others = sorted(set(comm.members) - {self._engine.cluster_id})
        pairs: list[asyncio.Task[None]] = []
        try:
            try:
                async with asyncio.timeout(total_s):
                    await self._listen(comm, filter(self._listens_for, others))
                    pairs = [asyncio.create_task(self._pair(comm, member)) for member in others]
                    await asyncio.gather(*pairs)
            except TimeoutError:
                missing = [member for member in others if not comm.arrived[member].is_set()]
                reasons = [self._waited_for(comm, member) for member in missing]
                known = map(self._transitions.errors.get, missing)
                reasons += [message_of(error) for error in known if error is not None]
                if any(self._meeting_point(comm, member).path for member in missing):
                    reasons.append(_OTHER_CONTAINERS)
                reason = f"clusters {missing} have not linked within {total_s:g} s"
                raise link_failed(f"{reason}: {'; '.join(reasons)}") from None
        except Exception as error:  # of any kind: PREPARING must end
            reason = message_of(error) if isinstance(error, LLMException) else ""
            self._conclude(comm, reason or repr(error))
        else:
            self._conclude(comm)
        finally:
            for pair in pairs:
                pair.cancel()

    def _waited_for(self, comm: Communicator, cluster_id: int) -> str:
        endpoint = self._meeting_point(comm, cluster_id)
        if self._listens_for(cluster_id):
            return f"cluster {cluster_id} has not connected to {endpoint}"
        return f"cluster {cluster_id} has not listened at {endpoint}"

    async def _pair(self, comm: Communicator, cluster_id: int) -> None:
        """Link with one member: wait for its handshake, or repeat the handshake of this side."""
        link = self._transitions.links.get(cluster_id)
        if link is not None and link.is_live and not comm.is_linked_by(link):
            raise link_failed(f"cluster {cluster_id} is linked already, but not by this name")
        if self._listens_for(cluster_id):
            await comm.arrived[cluster_id].wait()
            return
        endpoint = self._meeting_point(comm, cluster_id)
        pause_s, longest_s = _PAUSE_S
        while not await self._try_link(comm, cluster_id, endpoint):
            await asyncio.sleep(pause_s)  # a peer does not signal that it listens
            pause_s = min(2 * pause_s, longest_s)
        comm.arrived[cluster_id].set()

    async def _try_link(self, comm: Communicator, cluster_id: int, endpoint: Endpoint) -> bool:
        """Try to link with a member by the communicator's name, and return True on success."""
        if endpoint.path and not Path(endpoint.path).exists():
            return False
        try:
            link = await self._initiator.link(
                cluster_id, endpoint, self._handler, _ATTEMPT_S, comm.name
            )
        except LLMException as error:
            if error.status_code is LLMStatusCode.LLM_ALREADY_LINK:
                raise
            return False
        if link.comm == comm.name:  # otherwise the peer has made it meanwhile, in another way
            link.comm_id = comm.comm_id
        return link.comm == comm.name

    def _listens_for(self, cluster_id: int) -> bool:
        """Return True if this engine listens and `cluster_id` connects."""
        return self._engine.cluster_id < cluster_id

    def _meeting_point(self, comm: Communicator, cluster_id: int) -> Endpoint:
        """Return the address at which one of the two engines listens for the other."""
        listening, connecting = sorted((self._engine.cluster_id, cluster_id))
        here, there = comm.members[connecting], comm.members[listening]
        return meeting_point(here, there, comm.name, listening, self._engine.options)

    async def _listen(self, comm: Communicator, others: Iterable[int]) -> None:
        """Listen where `others` will connect. A port may serve several communicators."""
        engine = self._engine
        for endpoint in {self._meeting_point(comm, member) for member in others}:
            async with self._listening:
                servers = (
                    server for other in self._communicators.values() for server in other.servers
                )
                server = next((server for server in servers if server.endpoint == endpoint), None)
                if server is None:
                    handler, keys = self._handler, engine.keys
                    server = await Server.listen(engine.control, endpoint, handler, keys)
                comm.servers.append(server)

    def _forget(self, comm: Communicator) -> None:
        del self._communicators[comm.comm_id]
        still_used = {server for other in self._communicators.values() for server in other.servers}
        for server in set(comm.servers) - still_used:
            server.close()

    def _get(self, comm_id: int) -> Communicator:
        check_width("comm_id", comm_id, 0, UINT64_MAX)
        if (comm := self._communicators.get(comm_id)) is None:
            raise not_linked(
                f"comm_id={comm_id} is not linked; there are {sorted(self._communicators)}"
            )
        return comm

    def _conclude(self, comm: Communicator, failure: str = "") -> None:
        comm.status = RegisterMemStatus.FAILED if failure else RegisterMemStatus.OK
        unlinked = set(comm.members) - self._transitions.live() - {self._engine.cluster_id}
        for cluster_id in unlinked if failure else ():
            why = link_failed(f"communicator {comm.name!r}: {failure}")
            self._transitions.note_error(cluster_id, why)
        _LOG.log(
            logging.WARNING if failure else logging.INFO,
            "comm cluster=%d comm_id=%d name=%r state=%s%s",
            self._engine.cluster_id,
            comm.comm_id,
            comm.name,
            comm.status.name,
            f" reason={failure!r}" if failure else "",
        )


def meeting_point(
    here: Location, there: Location, comm_name: str, cluster_id: int, options: LinkOptions
) -> Endpoint:
    """Return where `cluster_id` at location `there` listens for a member at location `here`."""
    if here.server_id == there.server_id:
        # Names and ids may be long, but the path of a socket must be short: see MAX_DIRECTORY.
        name = hashlib.sha256(f"{cluster_id} {comm_name}".encode()).hexdigest()[:18]
        return Endpoint(path=str(socket_directory(options.comm_dir) / name))
    return Endpoint(there.server_id, options.comm_port + there.device_id)


def exposed_point(
    cluster_id: int, members: Mapping[int, Location], options: LinkOptions
) -> Endpoint | None:
    """Return where `cluster_id` listens for members on other hosts, or None."""
    # Of two members on different hosts, the one with the lower cluster id listens.
    exposed = {
        member
        for member, at in members.items()
        if any(above > member and at.server_id != members[above].server_id for above in members)
    }
    highest = max((members[member].device_id for member in exposed), default=0)
    max_device_id = PORT_MAX - options.comm_port
    if highest > max_device_id:
        raise invalid(
            f"rank_table: device_id={highest} is out of range [0, {max_device_id}]: members on "
            f"other hosts meet at port comm_port={options.comm_port} + device_id"
        )
    here = members[cluster_id]
    is_exposed = cluster_id in exposed
    return Endpoint(here.server_id, options.comm_port + here.device_id) if is_exposed else None


def socket_directory(comm_dir: str | None) -> Path:
    """Return the private directory of the user's sockets, and create it if needed."""
    directory = runtime_directory() if comm_dir is None else Path(comm_dir)
    private_directory(directory, "comm_dir")
    check_above(directory, "comm_dir")
    return directory
