"""LlmDataDist: the public class of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Self

from kvnative._backend import NativeError
from kvnative._signals import Mutex, signals_deferred
from kvplan.engine.cache_api import CacheOperations
from kvplan.engine.engine import Engine, metrics_of, release, released_with
from kvplan.engine.interface import InterfaceOperations
from kvplan.engine.options import Options
from kvplan.engine.records import RecordingOperations, record_if_configured
from kvplan.engine.request_api import LeaseOperations, NotificationOperations
from kvplan.engine.runner import PlanHook
from kvplan.engine.telemetry import EngineMetrics, Metrics, error_text, log_operation
from kvplan.planning.texts import plural
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.system.limits import system_error
from kvplan.types import LlmRole
from kvplan.validation import UINT64_MAX, as_int, check_type, check_width

if TYPE_CHECKING:
    from kvplan.device.device import Device
    from kvplan.engine.queues import Completions
    from kvplan.execution import Transfers
    from kvplan.links import ClusterInfo, LinkResults, LinkStatus, RegisterMemStatus


class LlmDataDist(
    InterfaceOperations,
    LeaseOperations,
    CacheOperations,
    NotificationOperations,
    RecordingOperations,
):
    """An engine: caches of this process, links to other clusters, and transfers between them.

    A process can have any number of engines, and all methods are thread-safe. An engine belongs to
    the process that initialized it: in a forked child its calls raise LLM_FAILED. As a context
    manager it finalizes itself.

    Args:
        cluster_id: id of this engine, unique among all linked engines.
        role: a label, without influence on transfers.
        transfers: executes the copies; None: the executor that the process shares.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: cluster_id is not a uint64.
    """

    def __init__(
        self, cluster_id: int, role: LlmRole, *, transfers: Transfers | None = None
    ) -> None:
        if isinstance(cluster_id, LlmRole):  # an int too; the official class takes the role first
            raise TypeError(
                f"cluster_id={cluster_id} must be int, not LlmRole; the order is "
                "LlmDataDist(cluster_id, role)"
            )
        self._cluster_id = check_width(
            "cluster_id", as_int("cluster_id", cluster_id), 0, UINT64_MAX
        )
        self._role = check_type("role", role, LlmRole)
        self._transfers = transfers
        self._metrics = Metrics()
        self._hooks = {}
        self._engine: Engine | None = None
        self._was_finalized = False
        self._mutex = Mutex()  # held by initialize, finalize and set_role

    @property
    def cluster_id(self) -> int:
        """The id of this engine."""
        return self._cluster_id

    @property
    def listen_address(self) -> str | None:
        """The address that peers link to, such as "127.0.0.1:43121"; None: the engine has none.

        This is the option `kvplan.advertise` if set, otherwise the address of the listener. Peers
        cannot link to a wildcard address (0.0.0.0).
        """
        return None if self._engine is None else self._engine.listen_address

    @property
    def device(self) -> Device | None:
        """The accelerator of caches with Placement.DEVICE, until `finalize`; None: no device."""
        return None if self._engine is None else self._engine.device

    def initialize(self, options: Options | Mapping[str, str] | None = None) -> None:
        """Start the engine, which listens if the options have an address.

        A second call has no effect if it has the same options, or none.

        Args:
            options: typed, or a mapping with the keys of the reference and text values; None:
                defaults.

        Raises:
            TypeError: options of the wrong type.
            ValueError, LLMException: an invalid option (LLM_PARAM_INVALID); too little memory, or
                too few threads or descriptors (LLM_OUT_OF_MEMORY, with the limit); an unavailable
                resource, such as the port to listen on. All resources are released then. A second
                call with other options: LLM_PARAM_INVALID; the engine does not change.
        """
        given = options
        options = Options.of(options)
        with self._mutex, signals_deferred:
            if self._engine is not None:
                running = self._running().options
                if given is not None and options != running:
                    raise invalid(
                        f"cluster {self._cluster_id} is initialized with other options: "
                        f"{options.differences(running)}; finalize() it first"
                    )
                return
            started = perf_counter()
            try:
                engine = Engine(
                    self._cluster_id, self._role, options, self._transfers, self._metrics
                )
            except (OSError, MemoryError, NativeError) as error:
                raise system_error(f"initializing cluster {self._cluster_id}", error) from error
            released_with(self, engine)
            record_if_configured(engine)
            self._engine = engine
            log_operation(
                "initialize",
                perf_counter() - started,
                cluster=self._cluster_id,
                role=self._role.name,
                listen=engine.listen_address,
            )

    def finalize(self) -> None:
        """End transfers and links, release all memory, and refuse calls until `initialize`.

        Idempotent. Waits at most SyncKvCacheWaitTime for transfers in flight, then stops them.
        Notifies peers that can be reached. Does nothing in a forked child.
        """
        with self._mutex:
            engine = self._engine
            if engine is None or engine.inherited:
                return
            started = perf_counter()
            try:
                self._engine, self._was_finalized = None, True
                engine.drain()
            finally:
                with signals_deferred:
                    release(engine)
            log_operation(
                "finalize",
                perf_counter() - started,
                cluster=self._cluster_id,
            )

    def set_role(self, role: LlmRole, options: Options | Mapping[str, str] | None = None) -> None:
        """Change the role and the listening address; the engine must not have links.

        Args:
            role: the new role, or the same.
            options: ListenIpInfo is the new address; without it, the engine stops listening.

        Raises:
            TypeError: an argument of the wrong type.
            LLMException: LLM_EXIST_LINK: the engine has links; LLM_PARAM_INVALID: an option other
                than ListenIpInfo; LLM_FAILED: the address is not available. Nothing changes then.
        """
        check_type("role", role, LlmRole)
        given = Options.of(options)
        if given != replace(Options(), listen_ip_info=given.listen_ip_info):
            raise invalid(f"options={options} of set_role may hold only ListenIpInfo")
        with self._mutex, self._recorded("set_role", role=role.name) as engine:
            if live := engine.links.live():
                raise LLMException(
                    f"cluster {self._cluster_id} has {plural(live, 'link')}; unlink before the "
                    "role changes",
                    status_code=LLMStatusCode.LLM_EXIST_LINK,
                )
            engine.listen(given.listen_ip_info, stacklevel=2)
            engine.role = self._role = role

    def link_clusters(self, clusters: Sequence[ClusterInfo], timeout_ms: int = 1000) -> LinkResults:
        """Link with listening clusters, all at the same time.

        Args:
            clusters: ids and addresses of the clusters.
            timeout_ms: milliseconds, > 0.

        Returns:
            A result for each cluster: LLM_SUCCESS, LLM_ALREADY_LINK, LLM_LINK_FAILED and others.

        Raises:
            TypeError: an argument of the wrong type.
            ValueError: timeout_ms does not fit into 32 bits.
            LLMException: LLM_PARAM_INVALID: no cluster, a cluster without exactly one address, this
                engine's own, or timeout_ms below 1.
        """
        return self._link_clusters(clusters, timeout_ms)

    def _link_clusters(
        self, clusters: Sequence[ClusterInfo], timeout_ms: int, *, logs_failures: bool = True
    ) -> LinkResults:
        started = perf_counter()
        results = self._running().links.link(clusters, timeout_ms)
        took_s = perf_counter() - started
        return self._reported("link_clusters", results, took_s, logs_failures=logs_failures)

    async def link_clusters_async(
        self, clusters: Sequence[ClusterInfo], timeout_ms: int = 1000
    ) -> LinkResults:
        """Link as `link_clusters` does, without blocking the asyncio loop.

        A cancellation ends the handshakes in progress; finished links stay.

        Raises:
            TypeError, ValueError, LLMException: see `link_clusters`.
        """
        started = perf_counter()
        results = await self._running().links.link_async(clusters, timeout_ms)
        return self._reported("link_clusters", results, perf_counter() - started)

    def unlink_clusters(
        self,
        clusters: Sequence[ClusterInfo | int],
        timeout_ms: int = 1000,
        force: bool = False,
    ) -> LinkResults:
        """End links at both ends, after the transfers in flight.

        Args:
            clusters: the clusters, or their ids.
            timeout_ms: milliseconds, > 0.
            force: end the links here at once, despite transfers in flight, and only notify the
                peers.

        Returns:
            A result for each cluster: LLM_SUCCESS, LLM_NOT_YET_LINK, LLM_LINK_BUSY (still linked),
            LLM_UNLINK_FAILED (ended here, but the peer has not confirmed) and others.

        Raises:
            TypeError: an argument of the wrong type.
            ValueError: an id that is not a uint64, or timeout_ms does not fit into 32 bits.
            LLMException: LLM_PARAM_INVALID: no cluster, or timeout_ms below 1.
        """
        started = perf_counter()
        results = self._running().links.unlink(clusters, timeout_ms, force=force)
        return self._reported("unlink_clusters", results, perf_counter() - started)

    def link(
        self, comm_name: str, cluster_rank_info: Mapping[int, int], rank_table: str = ""
    ) -> int:
        """Begin to link all clusters that call this with the same name; they need not listen.

        Args:
            comm_name: name of the communicator, 1 to 127 characters.
            cluster_rank_info: cluster id -> rank, for 2 to 4 clusters including this one.
            rank_table: hosts of the ranks, in the JSON of the reference. Empty: all on this host.

        Returns:
            The id for `query_register_mem_status`; the links are made in the background.

        Raises:
            TypeError, ValueError: an argument of the wrong type or width.
            LLMException: LLM_PARAM_INVALID: also if another member is on this host and the path of
                XDG_RUNTIME_DIR is too long for sockets (set `kvplan.comm_dir`).
        """
        with self._recorded("link", comm=comm_name) as engine:
            return engine.links.comm_link(comm_name, cluster_rank_info, rank_table)

    def unlink(self, comm_id: int) -> None:
        """End a communicator that `link` began.

        Raises:
            TypeError, ValueError: comm_id is not a uint64.
            LLMException: LLM_NOT_YET_LINK: the communicator does not exist; LLM_LINK_BUSY: a
                transfer goes on over one of its links.
        """
        with self._recorded("unlink", comm=comm_id) as engine:
            engine.links.comm_unlink(comm_id)

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """Return the status of a communicator: PREPARING, OK or FAILED.

        Raises:
            TypeError, ValueError: comm_id is not a uint64.
            LLMException: LLM_NOT_YET_LINK: the communicator does not exist.
        """
        return self._running().links.comm_status(comm_id)

    def links(self) -> list[LinkStatus]:
        """Return every link with its state, age, traffic and last error.

        Raises:
            LLMException: LLM_FAILED: not initialized, or in a forked child;
                LLM_ENGINE_FINALIZED.
        """
        return self._running().links.status()

    def completions(self) -> Completions:
        """Return the engine's queue of ended tasks, always the same object.

        Each task submitted after the first call is added once, when its `wait` would not block. A
        transfer with several peers is one task. A layered task whose handle was dropped is not
        added. At most 65536 tasks can wait in the queue; then others are refused.

        Raises:
            LLMException: LLM_FAILED: not initialized, or in a forked child; LLM_ENGINE_FINALIZED.
        """
        return self._running().completion.open_completions()

    def on_plan(self, hook: PlanHook) -> Callable[[], None]:
        """Call `hook` with a PlanEvent before each execution; an exception stops the transfer.

        Returns:
            A function that removes the hook.

        Raises:
            TypeError: hook is not callable.
        """
        if not callable(hook):
            raise TypeError(f"hook={hook!r} must be callable with a PlanEvent")
        token = object()
        self._hooks[token] = hook
        hooks = self._hooks  # not self, so that the function does not keep the engine alive

        def remove() -> None:
            hooks.pop(token, None)

        return remove

    def metrics(self) -> EngineMetrics:
        """Return the counters as plain values by name.

        "operations" (calls by status, bytes, seconds) counts across `finalize` and `initialize`.
        "in_flight" (transfers and notifications), "links" (by state) and "cache_bytes" (by
        placement) are current.

        Raises:
            LLMException: LLM_FAILED: in a forked child.
        """
        return metrics_of(self._cluster_id, self._metrics, self._engine)

    def _reported(
        self, operation: str, results: LinkResults, seconds: float, *, logs_failures: bool = True
    ) -> LinkResults:
        for result in results:
            self._metrics.record(operation, result.status, 0, seconds)
            if self._engine is not None and (recorder := self._engine.recorder) is not None:
                text = "" if result.error is None else error_text(result.error)
                recorder.event(operation, result.status, seconds, text, {"peer": result.cluster_id})
            fields = {"cluster": self._cluster_id, "peer": result.cluster_id}
            if logs_failures or result.error is None:
                log_operation(operation, seconds, result.error, **fields)
        return results

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.finalize()

    def __repr__(self) -> str:
        state = "not initialized" if self._engine is None else "initialized"
        return f"<LlmDataDist of cluster {self._cluster_id}, {self._role.name}: {state}>"
