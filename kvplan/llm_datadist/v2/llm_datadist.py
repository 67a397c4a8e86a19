"""LLMDataDist of the original over `kvplan.LlmDataDist`: it checks, converts and delegates."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING, ClassVar

from kvplan.engine.datadist import LlmDataDist
from kvplan.engine.option_rows import LISTENING
from kvplan.engine.options import unknown_key
from kvplan.llm_datadist.configs import LLMRole
from kvplan.llm_datadist.utils import log
from kvplan.llm_datadist.utils.utils import check_isinstance, check_uint64
from kvplan.llm_datadist.v2.cache_manager import CacheManager
from kvplan.llm_datadist.v2.engine_options import (
    BACKEND,
    CACHE_MANAGER,
    LISTEN,
    check_listen,
    completed,
    engine_options,
    is_known,
)
from kvplan.llm_datadist.v2.link_codes import OwnLinks
from kvplan.llm_datadist.v2.linking import Linking
from kvplan.llm_datadist.v2.one_engine import SEATS
from kvplan.status import LLMException, invalid
from kvplan.types import LlmRole

if TYPE_CHECKING:
    from kvplan.llm_datadist.v1.kv_cache_manager import KvCacheManager

__all__ = ["LLMDataDist"]


class LLMDataDist(Linking):
    """An engine: its caches, and its links to other clusters.

    A process has one that is initialized (`kvplan.llm_datadist.permit_several_engines` lifts that);
    what is still initialized when the process ends is finalized then.

    Args:
        role: PROMPT, DECODER or MIX.
        cluster_id: of this engine; unique among all that are linked.

    Raises:
        TypeError: an argument of another type.
        ValueError: cluster_id is no uint64.
    """

    llm_engine_instance: ClassVar[LLMDataDist | None] = None
    """The one that is initialized; the latest, where there are several."""

    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        check_isinstance("role", role, LLMRole, allow_none=False)
        check_uint64("cluster_id", cluster_id)
        super().__init__()
        self._role = role
        self._cluster_id = int(cluster_id)
        self._kv_cache_manager: KvCacheManager | None = None

    @property
    def cluster_id(self) -> int:
        """As given."""
        return self._cluster_id

    @property
    def cache_manager(self) -> CacheManager:
        """The caches of this engine.

        Raises:
            RuntimeError: not initialized.
            LLMException: LLM_PARAM_INVALID: without llm.EnableCacheManager there is
                `kv_cache_manager` instead.
        """
        self._running()
        self._check_mode("cache_manager", cache_manager=True)
        assert self._cache_manager is not None
        return self._cache_manager

    @property
    def kv_cache_manager(self) -> KvCacheManager:
        """The caches of this engine, as version 1 of the original has them.

        Raises:
            RuntimeError: not initialized.
            LLMException: LLM_PARAM_INVALID: with llm.EnableCacheManager there is `cache_manager`.
        """
        self._running()
        self._check_mode("kv_cache_manager", cache_manager=False)
        assert self._kv_cache_manager is not None
        return self._kv_cache_manager

    def init(self, options: dict[str, str]) -> None:
        """Begin to take calls; a second time: nothing.

        Args:
            options: as `LLMConfig.generate_options` returns them; `kvplan.` options work too.

        Raises:
            TypeError: options of another type, or a value that is no text.
            LLMException: LLM_FAILED: another engine is initialized, or the port cannot be had;
                LLM_PARAM_INVALID: an option that cannot be; LLM_OUT_OF_MEMORY: no memory for a
                pool.
        """
        with SEATS.mutex:
            if self._is_initialized:
                return
            SEATS.check_free(LLMDataDist.llm_engine_instance)
            check_isinstance("options", options, dict)
            own = completed(options, self._role_to_str(self._role))
            engine = LlmDataDist(self._cluster_id, LlmRole(self._role))
            self._enable_cache_mgr = own.get(CACHE_MANAGER) == "1"
            if self._enable_cache_mgr:
                engine.initialize(engine_options(own))
                self._cache_manager = CacheManager(engine, own)
            else:
                from kvplan.llm_datadist.v1.kv_cache_manager import KvCacheManager

                engine.initialize(engine_options(own))
                self._kv_cache_manager = KvCacheManager(engine, self._role, own)
            self._engine_options = own
            self._own_links = OwnLinks() if BACKEND in own else None
            self._llm_datadist = engine
            self._is_initialized = True
            LLMDataDist.llm_engine_instance = self
            SEATS.take(self)
        log.info("cluster %s is initialized, options = %s", self._cluster_id, own)

    def finalize(self) -> None:
        """End transfers and links, release all memory, take no more calls; idempotent."""
        with SEATS.mutex:
            if not self._is_initialized:
                return
            assert self._llm_datadist is not None
            for manager in (self._cache_manager, self._kv_cache_manager):
                if manager is not None:
                    manager._initialized = False
            self._is_initialized = False
            SEATS.leave(self)
            if LLMDataDist.llm_engine_instance is self:
                LLMDataDist.llm_engine_instance = SEATS.latest
            self._llm_datadist.finalize()

    def switch_role(self, role: LLMRole, switch_options: dict[str, str] | None = None) -> None:
        """Change the role, and where this engine listens; only while nobody is linked.

        Args:
            role: the new one, or (with llm.EnableCacheManager) the same.
            switch_options: with llm.listenIpInfo: listen there from now on; without: no longer.
                Without llm.EnableCacheManager PROMPT needs it.

        Raises:
            TypeError: an argument of another type.
            RuntimeError: not initialized.
            LLMException: LLM_EXIST_LINK: links live; LLM_PARAM_INVALID: no such address, or a key
                that is nearly llm.listenIpInfo; LLM_FAILED: it cannot be had. Nothing changes then.
        """
        engine = self._running()
        check_isinstance("role", role, LLMRole, allow_none=False)
        check_isinstance("switch_options", switch_options, dict)
        options = switch_options or {}
        if not self._enable_cache_mgr:
            if role == self._role:
                raise invalid(f"role={role} is the role already")
            if role == LLMRole.PROMPT and not LISTENING & options.keys():
                raise invalid(f"role={role} needs {LISTEN}")
        for key, text in options.items():
            check_isinstance(f"switch_options[{key!r}]", text, str, allow_none=False)
            if not is_known(key):
                log.warn(unknown_key(key))
        listen = {key: text for key, text in options.items() if key in LISTENING}
        for address in listen.values():
            check_listen(address)
        engine.set_role(LlmRole(role), listen)
        if self._kv_cache_manager is not None:
            self._kv_cache_manager._switch_role(role)
        log.info("cluster %s: %s -> %s", self._cluster_id, self._role.name, role.name)
        self._role = role

    def _replace_engine(self, engine: LlmDataDist) -> None:
        assert self._llm_datadist is not None
        assert self._kv_cache_manager is not None
        self._llm_datadist.finalize()
        self._llm_datadist = self._kv_cache_manager._datadist = engine

    @staticmethod
    def _role_to_str(role: LLMRole) -> str:
        return role.name.capitalize()

    def __repr__(self) -> str:
        state = "initialized" if self._is_initialized else "not initialized"
        return f"<LLMDataDist of cluster {self._cluster_id}, {self._role.name}: {state}>"


def _shutdown_handler() -> None:
    for engine in SEATS.taken:
        try:
            engine.finalize()
        except LLMException as error:
            log.warn("cluster %s is not finalized: %s", engine.cluster_id, error)


def _forget_all() -> None:
    SEATS.forget()
    LLMDataDist.llm_engine_instance = None


atexit.register(_shutdown_handler)
os.register_at_fork(after_in_child=_forget_all)
