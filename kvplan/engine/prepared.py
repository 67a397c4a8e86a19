"""Prepared transfers: two caches are named and checked once, and rows are moved many times.

`engine.prepare_pull_blocks(src, dst)` returns an object whose `run`, `submit` and `plan` are
`pull_blocks`, `submit_pull_blocks` and `plan_pull_blocks` between these two: they do the same, and
refuse the same in the same words, after a new link, too, or when caches were made again with the
same names. What engines remember between calls serves the plain calls as well; a prepared pull
saves what it takes to look at the other arguments again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict, Unpack

from kvplan.engine.layer_transfers import LayerOperations
from kvplan.engine.local_transfers import LocalOperations
from kvplan.engine.pulls import PullOperations
from kvplan.engine.pushes import PushOperations
from kvplan.planning.layers import ALL_LAYERS
from kvplan.types import BlocksCacheKey, CacheIndex
from kvplan.validation import mismatch, shown

if TYPE_CHECKING:
    from kvplan.execution import ComputeEvent, LayerTask, TransferTask
    from kvplan.planning import Plan
    from kvplan.planning.blocks import Blocks
    from kvplan.types import Cache, KvCacheExtParam


class Tokens(TypedDict, total=False):
    """Which tokens of block tables are moved, as for `pull_blocks`."""

    num_tokens: int | None
    src_token: int
    dst_token: int


class Messages(TypedDict, total=False):
    """What is said of a transfer, as for `pull_blocks`."""

    notify: bytes | None
    notify_failure: bytes | None
    tag: str


class SubmitLayers(Tokens, Messages, total=False):
    """What the submission of block tables layer by layer takes besides them."""


class SubmitBlocks(SubmitLayers, total=False):
    """What the submission of block tables takes besides them."""

    after: ComputeEvent | None


class SubmitSlots(Messages, total=False):
    """What the submission of slots takes besides them."""

    after: ComputeEvent | None


class RunBlocks(SubmitLayers, total=False):
    """What a call with block tables takes besides them."""

    timeout_ms: float | None


class RunSlots(Messages, total=False):
    """What a call with slots takes besides them."""

    timeout_ms: float | None


class RunCopy(TypedDict, total=False):
    """What a copy inside this process takes besides its rows."""

    timeout_ms: float | None
    tag: str


@dataclass(frozen=True, slots=True)
class PreparedPullBlocks:
    """`pull_blocks` between two paged caches; made by `prepare_pull_blocks`.

    Attributes:
        engine, src, dst, ext_param, reinterpret: as given.
    """

    engine: PullOperations
    src: CacheIndex | BlocksCacheKey
    dst: Cache
    ext_param: KvCacheExtParam
    reinterpret: bool

    def run(self, src_blocks: Blocks, dst_blocks: Blocks, **how: Unpack[RunBlocks]) -> None:
        """See `pull_blocks`.

        Raises:
            TypeError, ValueError, LLMException: as `pull_blocks`.
        """
        if (
            how
            or self.reinterpret
            or not self.engine._move_now(
                "pull_blocks", self.src, self.dst, src_blocks, dst_blocks, self.ext_param
            )
        ):
            self.engine.pull_blocks(
                self.src, self.dst, src_blocks, dst_blocks, self.ext_param,
                reinterpret=self.reinterpret, **how,
            )  # fmt: skip

    def submit(
        self, src_blocks: Blocks, dst_blocks: Blocks, **how: Unpack[SubmitBlocks]
    ) -> TransferTask:
        """See `submit_pull_blocks`.

        Raises:
            TypeError, ValueError, LLMException: as `submit_pull_blocks`.
        """
        return self.engine.submit_pull_blocks(
            self.src, self.dst, src_blocks, dst_blocks, self.ext_param,
            reinterpret=self.reinterpret, **how,
        )  # fmt: skip

    def plan(self, src_blocks: Blocks, dst_blocks: Blocks, **how: Unpack[Tokens]) -> Plan:
        """See `plan_pull_blocks`.

        Raises:
            TypeError, ValueError, LLMException: as `plan_pull_blocks`.
        """
        return self.engine.plan_pull_blocks(
            self.src, self.dst, src_blocks, dst_blocks, self.ext_param,
            reinterpret=self.reinterpret, **how,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PreparedPullCache:
    """`pull_cache` between two contiguous caches; made by `prepare_pull_cache`.

    Attributes:
        engine, src, dst, ext_param, reinterpret: as given.
    """

    engine: PullOperations
    src: CacheIndex
    dst: Cache
    ext_param: KvCacheExtParam
    reinterpret: bool

    def run(self, src_slot: int, dst_slot: int, **how: Unpack[RunSlots]) -> None:
        """See `pull_cache`.

        Raises:
            TypeError, ValueError, LLMException: as `pull_cache`.
        """
        if (
            how
            or self.reinterpret
            or not self.engine._move_now(
                "pull_cache", self.src, self.dst, (src_slot,), (dst_slot,), self.ext_param
            )
        ):
            self.engine.pull_cache(
                self._at(src_slot), self.dst, dst_slot, -1, self.ext_param,
                reinterpret=self.reinterpret, **how,
            )  # fmt: skip

    def submit(self, src_slot: int, dst_slot: int, **how: Unpack[SubmitSlots]) -> TransferTask:
        """See `submit_pull_cache`.

        Raises:
            TypeError, ValueError, LLMException: as `submit_pull_cache`.
        """
        return self.engine.submit_pull_cache(
            self._at(src_slot), self.dst, dst_slot, -1, self.ext_param,
            reinterpret=self.reinterpret, **how,
        )  # fmt: skip

    def plan(self, src_slot: int, dst_slot: int) -> Plan:
        """See `plan_pull_cache`.

        Raises:
            TypeError, ValueError, LLMException: as `plan_pull_cache`.
        """
        return self.engine.plan_pull_cache(
            self._at(src_slot), self.dst, dst_slot, -1, self.ext_param,
            reinterpret=self.reinterpret,
        )  # fmt: skip

    def _at(self, slot: int) -> CacheIndex:
        return replace(self.src, batch_index=slot)


@dataclass(frozen=True, slots=True)
class PreparedPushBlocks:
    """`push_blocks` between two paged caches; made by `prepare_push_blocks`.

    Attributes:
        engine, src, dst, ext_param, reinterpret: as given.
    """

    engine: PushOperations
    src: Cache
    dst: CacheIndex | BlocksCacheKey
    ext_param: KvCacheExtParam
    reinterpret: bool

    def run(self, src_blocks: Blocks, dst_blocks: Blocks, **how: Unpack[RunBlocks]) -> None:
        """See `push_blocks`.

        Raises:
            TypeError, ValueError, LLMException: as `push_blocks`.
        """
        if (
            how
            or self.reinterpret
            or not self.engine._move_now(
                "push_blocks", self.dst, self.src, src_blocks, dst_blocks, self.ext_param
            )
        ):
            self.engine.push_blocks(
                self.src, self.dst, src_blocks, dst_blocks, self.ext_param,
                reinterpret=self.reinterpret, **how,
            )  # fmt: skip

    def submit(
        self, src_blocks: Blocks, dst_blocks: Blocks, **how: Unpack[SubmitBlocks]
    ) -> TransferTask:
        """See `submit_push_blocks`.

        Raises:
            TypeError, ValueError, LLMException: as `submit_push_blocks`.
        """
        return self.engine.submit_push_blocks(
            self.src, self.dst, src_blocks, dst_blocks, self.ext_param,
            reinterpret=self.reinterpret, **how,
        )  # fmt: skip

    def plan(self, src_blocks: Blocks, dst_blocks: Blocks, **how: Unpack[Tokens]) -> Plan:
        """See `plan_push_blocks`.

        Raises:
            TypeError, ValueError, LLMException: as `plan_push_blocks`.
        """
        return self.engine.plan_push_blocks(
            self.src, self.dst, src_blocks, dst_blocks, self.ext_param,
            reinterpret=self.reinterpret, **how,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PreparedPushCache:
    """`push_cache` between two contiguous caches; made by `prepare_push_cache`.

    Attributes:
        engine, src, dst, ext_param, reinterpret: as given.
    """

    engine: PushOperations
    src: Cache
    dst: CacheIndex
    ext_param: KvCacheExtParam
    reinterpret: bool

    def run(self, src_slot: int, dst_slot: int, **how: Unpack[RunSlots]) -> None:
        """See `push_cache`.

        Raises:
            TypeError, ValueError, LLMException: as `push_cache`.
        """
        if (
            how
            or self.reinterpret
            or not self.engine._move_now(
                "push_cache", self.dst, self.src, (src_slot,), (dst_slot,), self.ext_param
            )
        ):
            self.engine.push_cache(
                self.src, self._at(dst_slot), src_slot, -1, self.ext_param,
                reinterpret=self.reinterpret, **how,
            )  # fmt: skip

    def submit(self, src_slot: int, dst_slot: int, **how: Unpack[SubmitSlots]) -> TransferTask:
        """See `submit_push_cache`.

        Raises:
            TypeError, ValueError, LLMException: as `submit_push_cache`.
        """
        return self.engine.submit_push_cache(
            self.src, self._at(dst_slot), src_slot, -1, self.ext_param,
            reinterpret=self.reinterpret, **how,
        )  # fmt: skip

    def plan(self, src_slot: int, dst_slot: int) -> Plan:
        """See `plan_push_cache`.

        Raises:
            TypeError, ValueError, LLMException: as `plan_push_cache`.
        """
        return self.engine.plan_push_cache(
            self.src, self._at(dst_slot), src_slot, -1, self.ext_param,
            reinterpret=self.reinterpret,
        )  # fmt: skip

    def _at(self, slot: int) -> CacheIndex:
        return replace(self.dst, batch_index=slot)


@dataclass(frozen=True, slots=True)
class PreparedPushLayers:
    """`push_layers` between two paged caches; made by `prepare_push_layers`.

    Attributes:
        engine, src, dst, ext_param, reinterpret: as given.
    """

    engine: LayerOperations
    src: Cache
    dst: CacheIndex | BlocksCacheKey
    ext_param: KvCacheExtParam
    reinterpret: bool

    def submit(
        self, src_blocks: Blocks, dst_blocks: Blocks, **how: Unpack[SubmitLayers]
    ) -> LayerTask:
        """See `push_layers`.

        Raises:
            TypeError, ValueError, LLMException: as `push_layers`.
        """
        return self.engine.push_layers(
            self.src, self.dst, src_blocks=src_blocks, dst_blocks=dst_blocks,
            ext_param=self.ext_param, reinterpret=self.reinterpret, **how,
        )  # fmt: skip

    def plan(self, src_blocks: Blocks, dst_blocks: Blocks, **how: Unpack[Tokens]) -> Plan:
        """See `plan_push_layers`.

        Raises:
            TypeError, ValueError, LLMException: as `plan_push_layers`.
        """
        return self.engine.plan_push_layers(
            self.src, self.dst, src_blocks=src_blocks, dst_blocks=dst_blocks,
            ext_param=self.ext_param, reinterpret=self.reinterpret, **how,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PreparedCopyBlocks:
    """`copy_blocks` of a paged cache; made by `prepare_copy_blocks`.

    Attributes:
        engine, cache: as given.
    """

    engine: LocalOperations
    cache: Cache

    def run(self, blocks: Mapping[int, Sequence[int]], **how: Unpack[RunCopy]) -> None:
        """See `copy_blocks`.

        Raises:
            TypeError, ValueError, LLMException: as `copy_blocks`.
        """
        self.engine.copy_blocks(self.cache, blocks, **how)

    def submit(
        self,
        blocks: Mapping[int, Sequence[int]],
        tag: str = "",
        after: ComputeEvent | None = None,
    ) -> TransferTask:
        """See `submit_copy_blocks`.

        Raises:
            TypeError, ValueError, LLMException: as `submit_copy_blocks`.
        """
        return self.engine.submit_copy_blocks(self.cache, blocks, tag=tag, after=after)

    def plan(self, blocks: Mapping[int, Sequence[int]]) -> Plan:
        """See `plan_copy_blocks`.

        Raises:
            TypeError, ValueError, LLMException: as `plan_copy_blocks`.
        """
        return self.engine.plan_copy_blocks(self.cache, blocks)


class PrepareOperations(PullOperations, PushOperations, LayerOperations, LocalOperations):
    """Each looks at both caches now: what it raises, every call would raise."""

    def prepare_pull_blocks(
        self,
        src: CacheIndex | BlocksCacheKey,
        dst: Cache,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        reinterpret: bool = False,
    ) -> PreparedPullBlocks:
        """Prepare `pull_blocks` from a paged cache of a peer into one of this process.

        Args:
            src: the remote cache.
            dst: the local cache.
            ext_param: the layers.
            reinterpret: copy bytes as they are, whatever the two caches say that they mean.

        Raises:
            TypeError: an argument of another type, or a key that is of one request: those are
                pulled once, by the plain calls.
            LLMException: as `plan_pull_blocks`.
        """
        _check_names_cache("src", src, CacheIndex, BlocksCacheKey)
        prepared = PreparedPullBlocks(self, src, dst, ext_param, reinterpret)
        prepared.plan([0], [0])
        return prepared

    def prepare_pull_cache(
        self,
        src: CacheIndex,
        dst: Cache,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        reinterpret: bool = False,
    ) -> PreparedPullCache:
        """Prepare `pull_cache` of whole rows; the slot that `src` names is not used.

        Args:
            src: the remote cache.
            dst: the local cache.
            ext_param: the layers.
            reinterpret: copy bytes as they are, whatever the two caches say that they mean.

        Raises:
            TypeError: an argument of another type, or a key that is of one request: those are
                pulled once, by the plain calls.
            LLMException: as `plan_pull_cache`.
        """
        _check_names_cache("src", src, CacheIndex)
        prepared = PreparedPullCache(self, src, dst, ext_param, reinterpret)
        prepared.plan(0, 0)
        return prepared

    def prepare_push_blocks(
        self,
        src: Cache,
        dst: CacheIndex | BlocksCacheKey,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        reinterpret: bool = False,
    ) -> PreparedPushBlocks:
        """Prepare `push_blocks` from a paged cache of this process into one of a peer.

        Args:
            src: the local cache.
            dst: the remote cache.
            ext_param: the layers.
            reinterpret: copy bytes as they are, whatever the two caches say that they mean.

        Raises:
            TypeError: an argument of another type.
            LLMException: as `plan_push_blocks`.
        """
        _check_names_cache("dst", dst, CacheIndex, BlocksCacheKey)
        prepared = PreparedPushBlocks(self, src, dst, ext_param, reinterpret)
        prepared.plan([0], [0])
        return prepared

    def prepare_push_cache(
        self,
        src: Cache,
        dst: CacheIndex,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        reinterpret: bool = False,
    ) -> PreparedPushCache:
        """Prepare `push_cache` of whole rows; the slot that `dst` names is not used.

        Args:
            src: the local cache.
            dst: the remote cache.
            ext_param: the layers.
            reinterpret: copy bytes as they are, whatever the two caches say that they mean.

        Raises:
            TypeError: an argument of another type.
            LLMException: as `plan_push_cache`.
        """
        _check_names_cache("dst", dst, CacheIndex)
        prepared = PreparedPushCache(self, src, dst, ext_param, reinterpret)
        prepared.plan(0, 0)
        return prepared

    def prepare_push_layers(
        self,
        src: Cache,
        dst: CacheIndex | BlocksCacheKey,
        ext_param: KvCacheExtParam = ALL_LAYERS,
        *,
        reinterpret: bool = False,
    ) -> PreparedPushLayers:
        """Prepare `push_layers` from a paged cache of this process into one of a peer.

        Args:
            src: the local cache.
            dst: the remote cache.
            ext_param: the layers.
            reinterpret: copy bytes as they are, whatever the two caches say that they mean.

        Raises:
            TypeError: an argument of another type.
            LLMException: as `plan_push_layers`.
        """
        _check_names_cache("dst", dst, CacheIndex, BlocksCacheKey)
        prepared = PreparedPushLayers(self, src, dst, ext_param, reinterpret)
        prepared.plan([0], [0])
        return prepared

    def prepare_copy_blocks(self, cache: Cache) -> PreparedCopyBlocks:
        """Prepare `copy_blocks` of a paged cache.

        Args:
            cache: a cache of this engine.

        Raises:
            TypeError, LLMException: as `plan_copy_blocks`.
        """
        prepared = PreparedCopyBlocks(self, cache)
        prepared.plan({0: [0]})
        return prepared


def _check_names_cache(name: str, key: object, *kinds: type) -> None:
    """Refuse what names no cache, or one request's part of it."""
    if not isinstance(key, kinds):
        raise TypeError(f"{name}={shown(key)} must be {mismatch(key, *kinds)}")
