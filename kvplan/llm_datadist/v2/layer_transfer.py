"""`transfer_cache_async`: a layered task for each destination, and one thread for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from time import monotonic
from traceback import format_exc
from typing import TYPE_CHECKING, Final, Self
from weakref import WeakSet

import kvplan
from kvplan.engine.datadist import LlmDataDist
from kvplan.engine.interface import PARAMETERS
from kvplan.execution import LayerTask
from kvplan.llm_datadist.conversion import TENSORS_PER_LAYER, Indices, indices_of, key_of, last_wins
from kvplan.llm_datadist.utils import log
from kvplan.llm_datadist.utils.utils import check_isinstance, check_uint64
from kvplan.llm_datadist.v2.link_codes import about
from kvplan.llm_datadist.v2.llm_types import (
    CacheTask,
    LayerSynchronizer,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from kvplan.planning.texts import rename
from kvplan.planning.transfer import PeerTensors, Rows, Transfer
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.system.limits import start_thread
from kvplan.types import BlocksCacheKey, CacheIndex, KvCacheExtParam
from kvplan.validation import shown

if TYPE_CHECKING:
    from threading import Thread

Config = TransferConfig | TransferWithCacheKeyConfig
Configs = Sequence[Config]

_DROP_S: Final = 5.0  # for a thread that no synchronizer holds
_feeds: Final[WeakSet[LayerFeed]] = WeakSet()  # with their threads


def wait_for_feeds() -> None:
    """Wait until threads have dropped ended pushes: at exit, these would keep device streams."""
    for feed in list(_feeds):
        feed.wait_for_thread()


@dataclass(frozen=True, slots=True)
class LayerSource:
    """The source of a `transfer_cache_async` call, which all destinations share."""

    cache: kvplan.Cache  # the local one
    is_blocks: bool  # True if it is paged
    src_blocks: list[int]  # empty: the config names a row
    dst_blocks: list[int]  # the same at each destination; empty: a row
    dst_block_nbytes: int  # 0: that of a source block

    @classmethod
    def of(
        cls,
        cache: kvplan.Cache,
        is_blocks: bool,
        src_block_indices: Indices | None,
        dst_block_indices: Indices | None,
        dst_block_memory_size: int | None,
    ) -> Self:
        """Check the arguments that all destinations share."""
        src = indices_of("src_block_indices", src_block_indices, ValueError)
        dst = indices_of("dst_block_indices", dst_block_indices, ValueError)
        if dst_block_memory_size is not None:
            check_uint64("dst_block_memory_size", dst_block_memory_size)
        nbytes = int(dst_block_memory_size or 0)
        if src and not is_blocks:
            raise invalid(f"src_block_indices={shown(src)} must be empty: src_cache is contiguous")
        if is_blocks and dst and not src:
            raise invalid("src_block_indices is empty; src_cache and the destinations are paged")
        if src and len(src) != len(dst):
            raise invalid(
                f"src_block_indices has {len(src)} blocks and dst_block_indices {len(dst)}; they "
                "must be of equal length"
            )
        if nbytes and not dst:
            raise invalid(f"dst_block_memory_size={nbytes} must be 0 without dst_block_indices")
        if dst and not src and not nbytes:
            raise invalid("dst_block_memory_size must be given to push a slot to blocks")
        if src and max(src) >= (num_blocks := cache.cache_desc.batch_size):
            raise invalid(f"src_block_indices holds {max(src)}, out of range [0, {num_blocks})")
        if (num_tensors := cache.cache_desc.num_tensors) % TENSORS_PER_LAYER:
            raise invalid(f"num_tensors={num_tensors} must be even: a layer has two tensors")
        return cls(cache, is_blocks, *(last_wins(src, dst) if src else (src, dst)), nbytes)

    @property
    def num_layers(self) -> int:
        """The number of layers of the cache."""
        return self.cache.cache_desc.num_tensors // TENSORS_PER_LAYER


@dataclass(frozen=True)
class _Push:
    """A transfer config, converted to arguments of the engine."""

    to: CacheIndex | BlocksCacheKey | PeerTensors
    src_batch_index: int
    src_blocks: list[int] | None
    dst_blocks: list[int] | None
    layers: KvCacheExtParam

    @classmethod
    def of(
        cls,
        source: LayerSource,
        to: CacheIndex | BlocksCacheKey | PeerTensors,
        row: int,
        layers: KvCacheExtParam,
    ) -> Self:
        """Return a push of the source's blocks or, if there are none, of `row`.

        A row of a paged source is a block, and is pushed to a block only. The original copies such
        a row to a row of any kind.
        """
        src, dst = source.src_blocks, source.dst_blocks
        if source.is_blocks and not src:
            src, dst = [row], [to.batch_index if isinstance(to, CacheIndex) else 0]
            log.warn("src_block_indices is empty: only block %d of src_cache is pushed", row)
            if isinstance(to, CacheIndex):
                to = replace(to, batch_index=0)  # the only index of a paged cache
        return cls(to, 0 if source.is_blocks else row, src or None, dst or None, layers)


def transfer_layers(
    engine: LlmDataDist,
    source: LayerSource,
    configs: Configs,
    synchronizer: LayerSynchronizer,
    finish_ms: float,
    *,
    remote_mode: bool,
    running_status: LLMStatusCode = LLMStatusCode.LLM_TIMEOUT,
) -> CacheTask:
    """Begin to push to each destination, and start the thread that marks layers ready."""
    destinations = destinations_of(engine, source, configs, remote_mode=remote_mode)
    feed = LayerFeed(destinations, synchronizer, finish_ms, running_status)
    feed.start()
    return CacheTask(feed)


def destinations_of(
    engine: LlmDataDist, source: LayerSource, configs: Configs, *, remote_mode: bool
) -> list[Destination]:
    """Begin a push to each destination. A push that cannot begin has the status of its failure."""
    kind = TransferWithCacheKeyConfig if remote_mode else TransferConfig
    check_isinstance("transfer_configs", configs, [list, tuple], kind, allow_none=False)
    pushes = [_push_of(source, config) for config in configs]
    with ExitStack() as begun:
        destinations = []
        for push in pushes:
            destination = _begin(engine, source, push)
            destinations.append(destination)
            begun.callback(destination.give_up, LLMException("another push could not begin"))
        begun.pop_all()
        return destinations


def _push_of(source: LayerSource, config: Config) -> _Push:
    layers = config.src_layer_range
    layers = range(source.num_layers) if layers is None else layers
    if layers.stop > source.num_layers:
        raise invalid(f"src_layer_range={layers} is out of range [0, {source.num_layers})")
    slot = int(config.src_batch_index)
    if source.src_blocks and slot != 0:
        raise invalid(f"src_batch_index={slot} must be 0: src_cache is paged")
    if slot >= (num_rows := source.cache.cache_desc.batch_size):
        raise invalid(f"src_batch_index={slot} is out of range [0, {num_rows}) of src_cache")
    if isinstance(config, TransferWithCacheKeyConfig):
        targets = config.dst_layer_range
        targets = layers if targets is None else targets
        if len(targets) != len(layers):
            raise invalid(
                f"src_layer_range={layers} and dst_layer_range={targets} must be of equal length"
            )
        ext_param = KvCacheExtParam(layers, targets, TENSORS_PER_LAYER)
        return _Push.of(source, key_of(config.cache_key), slot, ext_param)
    if len(config.dst_addrs) != (needed := len(layers) * TENSORS_PER_LAYER):
        raise invalid(
            f"dst_addrs has {len(config.dst_addrs)} addresses; the {len(layers)} layers of "
            f"src_layer_range={layers} need {needed}"
        )
    addresses = tuple(map(int, config.dst_addrs))
    stride = source.dst_block_nbytes or None
    to = PeerTensors(int(config.dst_cluster_id), addresses, stride)
    return _Push.of(source, to, slot, KvCacheExtParam(layers, None, TENSORS_PER_LAYER))


def _begin(engine: LlmDataDist, source: LayerSource, push: _Push) -> Destination:
    name = f"cluster {push.to.cluster_id}"
    nbytes = source.dst_block_nbytes
    try:
        slot = push.src_batch_index if push.src_blocks is None else None
        transfer = Transfer(
            Rows(source.cache, push.src_blocks, slot),
            Rows(push.to, push.dst_blocks),
            layers=push.layers,
        )
        task = engine.layered(transfer)
        assert isinstance(task, LayerTask)  # of one cache
    except LLMException as error:
        if error.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED:
            raise  # the engine is finalized for all destinations
        rename(error, PARAMETERS)
        log.error("%s", about(name, error))
        return Destination(name, None, error.status_code)
    begun = Destination(name, task)
    if nbytes and nbytes != (theirs := task.plan.part.dst.stride):
        reason = f"dst_block_memory_size={nbytes}; destination blocks have {theirs} bytes"
        log.error("%s: %s", name, reason)
        begun.give_up(invalid(reason))
    return begun


class Destination:
    """A push to a peer. If `task` is None, it could not begin, and `refusal` is its status."""

    def __init__(
        self,
        name: str,
        task: LayerTask | None,
        refusal: LLMStatusCode = LLMStatusCode.LLM_FAILED,
    ) -> None:
        self._name = name
        self._task = task
        self._refusal = refusal
        self._layers: Sequence[int] = () if task is None else task.layers
        self._ready_at = monotonic()  # s, when the last layer was ready

    @property
    def layers(self) -> Sequence[int]:
        """The source layers that the push needs."""
        return self._layers

    @property
    def ended(self) -> bool:
        """True if the push has an outcome."""
        return self._task is None or self._task.done

    def needs(self, layer: int) -> bool:
        """Return True if the push needs `layer` and has no outcome yet."""
        return layer in self._layers and not self.ended

    def ready(self, layer: int) -> None:
        """Mark `layer` as ready: it holds its final values."""
        if self._task is not None:
            self._ready_at = monotonic()
            self._task.ready(layer)

    def give_up(self, reason: LLMException) -> None:
        """Stop the push with `reason`, unless it has an outcome. On return no byte moves."""
        if self._task is not None:
            self._task.cancel(reason)

    def finish(self, timeout_ms: float) -> None:
        """Wait for the outcome; stop the push `timeout_ms` after its last layer was ready."""
        if self._task is not None:
            left_ms = timeout_ms - (monotonic() - self._ready_at) * 1000
            try:
                self._task.wait(max(0.0, left_ms))
            except LLMException as error:
                if self._task.settled:  # otherwise only a verification goes on
                    log.error("%s: %s", self._name, error)

    def status(self, timeout_s: float | None) -> LLMStatusCode | None:
        """Wait up to `timeout_s` seconds (None: forever); return the status, or None."""
        task = self._task
        if task is None:
            return self._refusal
        with suppress(LLMException):
            task.wait(None if timeout_s is None else timeout_s * 1000, stop=False)
        if not task.settled:
            return None
        try:
            task.wait()  # raises the failure of an ended task
        except LLMException as error:
            return error.status_code
        return LLMStatusCode.LLM_SUCCESS


class LayerFeed:
    """The destinations of one call, and the thread that marks their layers ready.

    The thread calls the synchronizer for each needed layer, in ascending order, until a call
    returns False or raises. After its last layer a destination may take `finish_ms` milliseconds.
    """

    def __init__(
        self,
        destinations: Sequence[Destination],
        synchronizer: LayerSynchronizer,
        finish_ms: float,
        running_status: LLMStatusCode = LLMStatusCode.LLM_TIMEOUT,
    ) -> None:
        self._destinations = tuple(destinations)
        self._synchronizer = synchronizer
        self._finish_ms = finish_ms
        self._thread: Thread | None = None
        self._in_synchronizer = False
        self.running_status = running_status

    def start(self) -> None:
        """Start the thread; if it cannot start, stop all pushes and raise."""
        # A daemon: a synchronizer that never returns must not keep the process from ending.
        try:
            self._thread = start_thread("kvplan-layers", self._run)
        except LLMException as error:
            self._give_up(error)
            raise
        _feeds.add(self)

    def wait_for_thread(self) -> None:
        """Wait for the end of the thread, unless the thread is in the synchronizer."""
        if self._thread is not None and not self._in_synchronizer:
            self._thread.join(_DROP_S)

    def statuses(self, timeout_s: float | None) -> list[LLMStatusCode | None]:
        """Wait up to `timeout_s` seconds; return each status (None: no outcome yet)."""
        deadline = None if timeout_s is None else monotonic() + timeout_s
        return [
            destination.status(None if deadline is None else max(0.0, deadline - monotonic()))
            for destination in self._destinations
        ]

    def _run(self) -> None:
        try:
            self._feed()
            for destination in self._destinations:
                destination.finish(self._finish_ms)
        finally:
            # Without this thread the pushes would never end.
            self._give_up(LLMException("the thread that waits for layers has ended"))

    def _feed(self) -> None:
        layers = {layer for destination in self._destinations for layer in destination.layers}
        for layer in sorted(layers):
            waiting = [each for each in self._destinations if each.needs(layer)]
            if not waiting:
                continue
            failure = self._await(layer)
            if failure is not None:
                for destination in self._destinations:
                    if destination.layers and destination.layers[-1] >= layer:
                        destination.give_up(failure)
                return
            for destination in waiting:
                destination.ready(layer)

    def _await(self, layer: int) -> LLMException | None:
        """Wait for a layer; return the reason if it is not ready, otherwise None."""
        called = f"synchronize_layer({layer})"
        self._in_synchronizer = True
        try:
            if self._synchronizer.synchronize_layer(layer, None):
                return None
        except BaseException as error:  # also SystemExit: it must not end this thread
            log.error("%s raised:\n%s", called, format_exc())
            return LLMException(f"{called} raised {type(error).__name__}")
        finally:
            self._in_synchronizer = False
        log.error("%s returned False", called)
        return invalid(f"{called} returned False")

    def _give_up(self, reason: LLMException) -> None:
        for destination in self._destinations:
            destination.give_up(reason)
