"""One call of an operation, from its arguments to its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING, NoReturn

from kvplan.engine.engine import PlanEvent
from kvplan.engine.log import level_of, log_operation, logger, status_of
from kvplan.inspection.units import plural
from kvplan.planning.layout import Side, side
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.types import NO_ID, BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from kvplan.validation import mismatch, shown

if TYPE_CHECKING:
    from kvplan.engine.engine import Engine, PlanHook
    from kvplan.engine.peer_tensors import PeerTensors
    from kvplan.execution import TensorMemory
    from kvplan.links import PeerClaim, PeerLink
    from kvplan.planning import Plan
    from kvplan.types import AnyCacheKey, Cache


_OTHER_KIND = {
    f"{verb}_{kind}": f"; {verb}_{other} takes a {takes} one"
    for verb in ("pull", "push", "copy")
    for kind, other, takes in (("cache", "blocks", "paged"), ("blocks", "cache", "contiguous"))
}
"""What takes the other kind of cache than an operation does."""


class Call:
    """What a call has found, and what it holds until its outcome.

    Args:
        moves: False for a call that only plans: it holds nothing, and is not counted.
        may_guess: whether the caller can try again what `guessed`.

    Attributes:
        plan: what is executed; set when it is known.
        link: to the peer that takes part; None inside one process.
        guessed: whether a key is taken to be the cache's that had it, as far as is known here: then
            the transfer says if that was freed, and before it moves a byte of another.
    """

    __slots__ = (
        "__weakref__",
        "_cache_id",
        "_claim",
        "_engine",
        "_may_guess",
        "_moves",
        "_operation",
        "_started",
        "guessed",
        "link",
        "plan",
    )

    def __init__(
        self, engine: Engine, operation: str, *, moves: bool, may_guess: bool = False
    ) -> None:
        self._engine = engine
        self._operation = operation
        self._moves = moves
        self._may_guess = may_guess
        self.guessed = False
        self._cache_id = -1
        self.link: PeerLink | None = None
        self._claim: PeerClaim | None = None
        self.plan: Plan | None = None
        self._started = perf_counter()
        if moves:
            engine.enter(self)

    def own(
        self, argument: str, cache: Cache, *, paged: bool, table: str = ""
    ) -> tuple[Side, TensorMemory]:
        """Return the cache of this process that an argument names, to plan with and to transfer.

        Args:
            table: the argument that would name blocks of it, where the caller might have given it.

        Raises:
            TypeError: no Cache.
            LLMException: LLM_KV_CACHE_NOT_EXIST: there is none; LLM_PARAM_INVALID: it is contiguous
                where a paged one is needed, or the other way round.
        """
        entry = self._engine.registry.resolve(cache, argument)
        if self._cache_id < 0:
            self._cache_id = entry.cache.cache_id
        found = entry.side
        if found is None:  # addresses alone do not say which kind they are
            return side(argument, entry.cache, paged=paged), entry.memory
        if found.paged is not paged:
            self._refuse_kind(argument, found.name, paged, table)
        return found, entry.memory

    def peer(
        self,
        argument: str,
        key: AnyCacheKey,
        kinds: tuple[type[AnyCacheKey], ...],
        *,
        paged: bool,
        writable: bool,
        table: str = "",
    ) -> tuple[Side, int, TensorMemory]:
        """Return the cache and the slot of a peer that an argument names; by CacheKey: claimed.

        Args:
            kinds: of key that the operation takes.
            table: as for `own`.

        Raises:
            TypeError: another kind of key.
            LLMException: LLM_PARAM_INVALID: this engine's own cluster, a key of both or neither
                request and prefix, a slot of a paged cache, or a cache that is not `paged` as
                needed; LLM_NOT_YET_LINK, LLM_LINK_FAILED, LLM_KV_CACHE_NOT_EXIST,
                LLM_REPEAT_REQUEST.
        """
        if not isinstance(key, kinds):
            raise TypeError(f"{argument}={shown(key)} must be {mismatch(key, *kinds)}")
        link = self._link_of(argument, key)
        slot = 0
        if isinstance(key, CacheKeyByIdAndIndex):
            found, slot = link.cache(key, writable=writable), key.batch_index
        elif isinstance(key, BlocksCacheKey):
            found = link.cache(key, writable=writable, guess=self._may_guess)
            self.guessed = self._may_guess
        else:
            _check_names_one(argument, key)
            if self._moves:
                self._claim = claim = link.claim(key)
                found, slot = claim.cache, claim.batch_index
            else:
                found, slot = link.find(key)
        theirs = link.side(found)
        if theirs.paged is not paged:
            self._refuse_kind(argument, str(key), paged, table)
        if slot >= (1 if paged else theirs.count):
            _refuse_slot(argument, key, theirs)
        return theirs, slot, link.memory(found, writable=writable)

    def peer_tensors(
        self, argument: str, given: PeerTensors, stride: int, *, paged: bool
    ) -> tuple[Side, TensorMemory]:
        """Return the memory of a peer that an argument names by addresses, to be written.

        Args:
            stride: bytes of a row, where `given` does not say it.
            paged: whether rows are blocks.

        Raises:
            LLMException: LLM_PARAM_INVALID: this engine's own cluster, addresses of several caches,
                no room for a row, or a cache that must not be written; LLM_KV_CACHE_NOT_EXIST: an
                address that lies in no cache of the peer; LLM_NOT_YET_LINK, LLM_LINK_FAILED.
        """
        link = self._link_of(argument, given)
        return link.tensors(given.addresses, given.stride or stride, paged=paged)

    def guess_no_more(self) -> None:
        """Have the peer asked for what was guessed."""
        self._may_guess = self.guessed = False

    def show(self, hooks: Mapping[object, PlanHook]) -> None:
        """Let the hooks see the plan that is about to be executed."""
        assert self.plan is not None
        event = PlanEvent(self.plan, self._operation, self._cache_id, self._cluster_id)
        for hook in tuple(hooks.values()):
            hook(event)

    def end(self, error: BaseException | None) -> None:
        """Give back what the call holds, and record how it went. Once, whatever it came to."""
        seconds = perf_counter() - self._started
        engine, plan, link = self._engine, self.plan, self.link
        moved = plan if error is None else None  # every byte of it has arrived
        nbytes = 0 if moved is None else moved.nbytes
        try:
            # First: the link stays until its peer knows whether the key is consumed.
            if self._claim is not None:
                self._claim.release(None if moved is None else moved.src_tensors)
        finally:
            engine.metrics.record(self._operation, status_of(error), nbytes, seconds)
            engine.leave(self)
            # Last: whoever has unlinked finds the call counted, and no longer in flight.
            if link is not None:
                pulls = self._operation.startswith("pull")
                link.end(self, nbytes if pulls else 0, 0 if pulls else nbytes, error)
        if logger.logger.isEnabledFor(level_of(error)):
            log_operation(
                self._operation,
                seconds,
                error,
                cluster=engine.cluster_id,
                peer=self._cluster_id,
                cache=self._cache_id,
                kind=plan and plan.kind,
                descriptors=plan and plan.num_descriptors,
                bytes=nbytes,
            )

    def _link_of(self, argument: str, key: AnyCacheKey | PeerTensors) -> PeerLink:
        engine = self._engine
        if key.cluster_id == engine.cluster_id:
            raise invalid(f"{argument}={key} is of this engine's own cluster; copy inside of one")
        link = engine.links.get(key.cluster_id)
        if self._moves and self.link is None:
            self.link = link  # first: what ends has not begun, at worst
            link.begin(self)
        return link

    def _refuse_kind(self, argument: str, name: str, paged: bool, table: str) -> NoReturn:
        found, needed = ("contiguous", "paged") if paged else ("paged", "contiguous")
        if table and not paged:
            raise invalid(f"{argument}={name} is a paged cache; {table} must name blocks of it")
        message = f"{argument}={name} is a {found} cache; {self._operation} needs a {needed} one"
        if table:
            raise invalid(f"{message}, or no {table}: then a slot is moved")
        raise invalid(message + _OTHER_KIND.get(self._operation, ""))

    @property
    def _cluster_id(self) -> int | None:
        return None if self.link is None else self.link.cluster_id


def _refuse_slot(argument: str, key: AnyCacheKey, found: Side) -> NoReturn:
    if found.paged:
        raise invalid(f"{argument}={key} names a slot, and a paged cache has none")
    raise LLMException(
        f"{argument}={key} is out of range: that cache has {plural(found.count, 'slot')}",
        status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
    )


def _check_names_one(argument: str, key: CacheKey) -> None:
    if (key.req_id == NO_ID) is (key.prefix_id == NO_ID):
        raise invalid(f"{argument}={key} must name either a request (req_id) or a prefix")
