"""Public methods of an engine for requests: leases of their blocks, and notifications."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvnative._signals import signals_deferred
from kvplan.engine.leases import OnReleased
from kvplan.engine.notifications import Notification, Notifications
from kvplan.engine.operation import Operation, check_notification, check_tag
from kvplan.engine.runner import OperationRunner
from kvplan.lease import BlockLease
from kvplan.status import invalid
from kvplan.types import Cache
from kvplan.validation import UINT64_MAX, check_timeout, check_type, check_width, shown

if TYPE_CHECKING:
    from kvplan.links import PeerLink
    from kvplan.planning.blocks import Blocks


class LeaseOperations(OperationRunner):
    """Leases: peers reach blocks only while these belong to one request."""

    def lease_blocks(
        self,
        cache: Cache,
        blocks: Blocks,
        *,
        tag: str = "",
        ttl_ms: float | None = None,
        tokens: int | None = None,
    ) -> BlockLease:
        """Lease blocks of a paged cache, or a slot of a contiguous one, to peers that pull or push.

        Send the lease to them (`to_bytes`, `from_bytes`). Several leases may contain the same
        block. A lease ends with `release` or `moved`, at its deadline, or when the cache is freed.

        Args:
            cache: a cache of this engine that peers can reach.
            blocks: in the order of the request, each once; for a contiguous cache `[slot]`.
            tag: name in messages, such as the id of the request: at most 64 characters.
            ttl_ms: milliseconds after which no transfer with the lease succeeds, by this host's
                clock. The check needs no running thread. A thread of this engine then waits for
                peers that write, and calls `on_released`: after that the blocks can belong to
                another request. None: the lease does not expire.
            tokens: number of tokens of the request, from the first block on. A transfer without a
                block table moves that many, and no more. None: whole blocks.

        Raises:
            TypeError: an argument of the wrong type.
            LLMException: LLM_PARAM_INVALID: a block out of range or given twice, several slots,
                a bad tag or ttl_ms, or more tokens than the blocks hold; LLM_KV_CACHE_NOT_EXIST: no
                such cache; LLM_OUT_OF_MEMORY: 131,072 leases are live.
        """
        with signals_deferred:
            return self._running().leases.begin(cache, blocks, tag, ttl_ms, tokens)

    def release(self, lease: BlockLease) -> None:
        """End a lease: after this call its blocks can belong to another request. Idempotent.

        Waits for peers that are writing with the lease. After that no peer writes with it, and no
        transfer with it succeeds.

        Raises:
            TypeError: not a BlockLease.
            LLMException: LLM_PARAM_INVALID: not a lease of this engine; LLM_TIMEOUT: a peer that
                was writing makes no progress (for example it is stopped), and may still write to
                the blocks. The lease has ended; once that peer has continued or died,
                `on_released` is called and a second `release` returns. `finalize` calls
                `on_released`, too, after it has withdrawn the cache from peers.
        """
        if type(lease) is not BlockLease:
            check_type("lease", lease, BlockLease)
        with signals_deferred:
            self._running().leases.end(lease)

    def renew(self, lease: BlockLease, ttl_ms: float) -> float:
        """Set a new deadline of a live lease, `ttl_ms` milliseconds from now; peers keep the lease.

        Returns:
            The deadline, in seconds of `time.monotonic()`.

        Raises:
            TypeError: not a BlockLease, or not a number.
            LLMException: LLM_KV_CACHE_NOT_EXIST: the lease was released or has expired;
                LLM_PARAM_INVALID: not a lease of this engine, a lease without ttl_ms, or ttl_ms
                is not > 0.
        """
        with signals_deferred:
            return self._running().leases.renew(check_type("lease", lease, BlockLease), ttl_ms)

    def moved(
        self,
        where: Cache | BlockLease,
        moves: Mapping[int, int],
        *,
        follow: bool = True,
        copy: Callable[[], object] | None = None,
    ) -> list[BlockLease]:
        """Let leases follow blocks that the program moves, or end the leases.

        After this call no transfer that has read or written an old place with a lease succeeds.
        Transfers in flight fail with LLM_KV_CACHE_NOT_EXIST, or `run` repeats them. Peers keep
        their leases: later transfers use the new places, even if the peer names blocks of the
        lease by their old numbers.

        Args:
            where: a cache, for all its leases; or one lease, in its latest or an earlier value.
            moves: the new block of each moved block, such as {14: 4}; slots of a contiguous cache.
                All moves happen at once, so that {4: 5, 5: 4} is an exchange.
            follow: True: leases name the new blocks. False: leases that name a moved block end,
                with `LeaseEnd.MOVED`.
            copy: copies the bytes of the blocks. It is called when no peer writes the blocks with
                these leases any more, so no push is lost. None: the bytes were copied before, and
                pushes between that copy and this call are lost.

        Returns:
            The leases that name a moved block: their new values, or the leases that ended.

        Raises:
            TypeError: an argument of the wrong type.
            LLMException: LLM_PARAM_INVALID: a block out of range, a lease that would name a block
                twice or is too long to follow, or not a lease of this engine;
                LLM_KV_CACHE_NOT_EXIST: no such cache, or the lease has ended; LLM_TIMEOUT: a peer
                that was writing makes no progress, and `copy` was not called; LLM_OUT_OF_MEMORY:
                131,072 leases are live, including the new values of these. After any error, even
                of `copy`, leases that follow name their old blocks.
        """
        if not isinstance(moves, Mapping):
            raise TypeError(f"moves={shown(moves)} must be a mapping of blocks to blocks")
        if not isinstance(where, BlockLease):
            check_type("where", where, Cache)
        if copy is not None and not callable(copy):
            raise TypeError(f"copy={copy!r} must be callable without arguments")
        engine = self._running()
        with signals_deferred:
            try:
                return engine.leases.move(where, moves, copy, follow=follow)
            finally:
                engine.links.publish_and_confirm(engine.wait_ms / 1000)

    def on_released(self, callback: OnReleased) -> Callable[[], None]:
        """Call `callback(lease, end)` when the blocks of a lease of this engine are free.

        `end` is a `LeaseEnd`. The thread that calls `release` or `moved`, or frees the cache,
        reports those leases before it returns. A thread of the engine reports expired leases, and
        those that a peer has delayed. The callback may lease and release. Exceptions are logged.

        Returns:
            A function that removes the callback.

        Raises:
            LLMException: LLM_FAILED: not initialized, or in a forked child;
                LLM_ENGINE_FINALIZED.
            TypeError: callback is not callable.
        """
        if not callable(callback):
            raise TypeError(f"callback={callback!r} must be callable with (BlockLease, LeaseEnd)")
        return self._running().leases.on_released(callback)

    def leases(self) -> list[BlockLease]:
        """Return the leases of this engine that have not ended, the oldest first.

        Raises:
            LLMException: LLM_FAILED: not initialized, or in a forked child;
                LLM_ENGINE_FINALIZED.
        """
        return self._running().leases.live()


class NotificationOperations(OperationRunner):
    """Notifications to peers, and from them."""

    def notify(
        self, cluster_id: int, data: bytes, *, timeout_ms: float | None = None, tag: str = ""
    ) -> None:
        """Send a notification; after this call the peer's program can read it.

        Delivery is at most once. After LLM_TIMEOUT or LLM_LINK_FAILED the peer may have the
        notification; after any other error it does not.

        Args:
            cluster_id: id of the peer.
            data: 1 to 4096 bytes.
            timeout_ms: milliseconds, > 0; None: SyncKvCacheWaitTime.
            tag: name in logs and recordings, such as the id of a request.

        Raises:
            TypeError: an argument of the wrong type.
            ValueError: cluster_id is not a uint64; timeout_ms is not > 0.
            LLMException: LLM_PARAM_INVALID: no or too many bytes, a bad tag, or this engine's own
                cluster; LLM_NOT_YET_LINK; LLM_LINK_FAILED: the link is broken, or broke meanwhile;
                LLM_LINK_BUSY: too many unread notifications at the peer; LLM_TIMEOUT.
        """
        with self._notice(cluster_id, data, timeout_ms, tag) as operation:
            _linked(operation, cluster_id).notify(data, timeout_ms)

    async def notify_async(
        self, cluster_id: int, data: bytes, *, timeout_ms: float | None = None, tag: str = ""
    ) -> None:
        """Notify as `notify` does, without blocking the asyncio loop.

        Notifications that one thread sends to a peer, by either method, arrive in the order of the
        calls. After a cancellation the notification may have been delivered.

        Raises:
            TypeError, ValueError, LLMException: see `notify`.
        """
        with self._notice(cluster_id, data, timeout_ms, tag) as operation:
            await _linked(operation, cluster_id).notify_async(data, timeout_ms)

    def _notice(
        self, cluster_id: int, data: bytes, timeout_ms: float | None, tag: str
    ) -> Operation:
        """Check the arguments and return the operation that sends a notification."""
        check_width("cluster_id", cluster_id, 0, UINT64_MAX)
        check_notification("data", data)
        check_tag(tag)
        check_timeout(timeout_ms, positive=True)
        return Operation(self._running(), "notify", tag=tag)

    def notifications(self) -> Notifications:
        """Return the engine's queue of unread notifications, always the same object.

        Raises:
            LLMException: LLM_FAILED: not initialized, or in a forked child;
                LLM_ENGINE_FINALIZED.
        """
        return self._running().notifications

    def on_notification(self, callback: Callable[[Notification], object]) -> Callable[[], None]:
        """Call `callback` with each notification from now on, in a thread of the engine.

        Exceptions of the callback are logged. Callbacks read `notifications()`, so no other reader
        gets these notifications.

        Returns:
            A function that removes the callback.

        Raises:
            LLMException: LLM_FAILED: not initialized, or in a forked child;
                LLM_ENGINE_FINALIZED.
            TypeError: callback is not callable.
        """
        if not callable(callback):
            raise TypeError(f"callback={callback!r} must be callable with a Notification")
        return self._running().callbacks.add(callback)


def _linked(operation: Operation, cluster_id: int) -> PeerLink:
    """Return the link of a notification, and keep it until the operation ends."""
    engine = operation.engine
    if cluster_id == engine.cluster_id:
        raise invalid(f"cluster_id={cluster_id} is this engine's own")
    link = engine.links.peers.get(cluster_id) or engine.links.get(cluster_id)
    operation.hold(link)
    return link
