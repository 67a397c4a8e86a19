"""Recordings of what an engine does: `record`, and the environment variable KVPLAN_RECORD."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvnative._signals import signals_deferred
from kvplan.engine.runner import OperationRunner
from kvplan.engine.telemetry import logger
from kvplan.links import LinkState
from kvplan.status import LLMException, LLMStatusCode, invalid

if TYPE_CHECKING:
    from kvplan.engine.engine import Engine
    from kvplan.lease import BlockLease, LeaseEnd
    from kvplan.links import PeerLink
    from kvplan.recording.writer import Recorder

RECORD: Final = "KVPLAN_RECORD"
"""The environment variable that names a directory; each engine records to its own file there."""

SUFFIX: Final = ".kvrec"

_DEFAULT_MAX_BYTES: Final = 64 << 20
_DEFAULT_FILES: Final = 2


class RecordingOperations(OperationRunner):
    """Recordings of an engine in files: see docs/how-to/recording.md."""

    def record(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int = _DEFAULT_MAX_BYTES,
        files: int = _DEFAULT_FILES,
    ) -> Recorder:
        """Record transfers with their plans and outcomes, links, leases and caches, from now on.

        `kvplan trace` and `kvplan.recording.read` can read the file while it is written. A full
        file, or an earlier recording, is renamed to `path.1`, and so on. A full disk ends the
        recording with a warning in the log; transfers go on.

        Args:
            path: file to write.
            max_bytes: size of a file, at least 65536.
            files: number of files to keep, 1 to 1000.

        Returns:
            The recorder, which records until its `close`, the end of its `with` block, or
            `finalize`.

        Raises:
            TypeError: an argument of the wrong type.
            OSError: the file cannot be created.
            LLMException: LLM_PARAM_INVALID: a number out of range, this engine is being recorded,
                another engine records to the file, or it is not a recording; LLM_OUT_OF_MEMORY: no
                thread left; LLM_FAILED: not initialized; LLM_ENGINE_FINALIZED.
        """
        return _record(self._running(), path, max_bytes=max_bytes, files=files)


def record_if_configured(engine: Engine) -> None:
    """Record a new engine if the environment names a directory.

    If the directory cannot be written, log a warning and do not record.
    """
    if not (given := os.environ.get(RECORD)):
        return
    now = time.time()
    when = time.strftime("%Y%m%dT%H%M%S", time.localtime(now)) + f"{now % 1:.6f}"[1:]
    path = Path(given) / f"kvplan-{engine.cluster_id}-{engine.pid}-{when}{SUFFIX}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _record(engine, path)
    except (OSError, LLMException) as error:
        logger.warning(
            "%s=%s: cluster %d is not recorded: %s", RECORD, given, engine.cluster_id, error
        )


def _record(
    engine: Engine,
    path: str | os.PathLike[str],
    *,
    max_bytes: int = _DEFAULT_MAX_BYTES,
    files: int = _DEFAULT_FILES,
) -> Recorder:
    from kvplan.recording.writer import Recorder  # here: only recordings need it

    before = engine.recorder
    if before is not None and not before.ended:
        raise invalid(
            f"path={os.fspath(path)}: cluster {engine.cluster_id} is being recorded to "
            f"{before.path}; close that recording first ({RECORD} may have begun it)"
        )
    recorder = None
    try:
        with signals_deferred:
            recorder = engine.recorder = Recorder(
                path, engine.cluster_id, engine.role.name, max_bytes=max_bytes, files=files
            )
            engine.leases.observer = partial(_record_lease, recorder)
            engine.links.observe(partial(_record_link, recorder))
            for link in list(engine.links.peers.values()):
                _record_link(recorder, link)
    except BaseException:  # an interrupt: the caller has no recorder to close
        if recorder is not None:
            recorder.close()
        raise
    return recorder


def _record_lease(recorder: Recorder, lease: BlockLease, end: LeaseEnd | None) -> None:
    fields = {
        "lease": lease.lease_id,
        "cache": lease.cache_id,
        "blocks": lease.blocks,
        "tag": lease.tag,
        "tokens": lease.tokens,
    }
    operation = "lease_moved" if lease.moves else "lease"
    if end is not None:
        operation, fields["end"] = "release", end.value
    recorder.event(operation, LLMStatusCode.LLM_SUCCESS, 0.0, "", fields)


def _record_link(recorder: Recorder, link: PeerLink) -> None:
    fields = {
        "peer": link.cluster_id,
        "state": link.state.name,
        "transport": link.transport,
        "way": link.way,
        "address": link.address,
    }
    broken = link.state is LinkState.BROKEN
    status = LLMStatusCode.LLM_LINK_FAILED if broken else LLMStatusCode.LLM_SUCCESS
    recorder.event("link_state", status, 0.0, link.reason, fields)
