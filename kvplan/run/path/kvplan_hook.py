"""Installs kvplan's modules and observers when a program first imports one of their names.

Every Python process under the launcher runs this module at its start, so it uses little of the
standard library. A Python older than 3.7 prints an error and continues.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing costs 3 ms
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import MetaPathFinder
    from importlib.machinery import ModuleSpec
    from logging import Handler

OBSERVE = "KVPLAN_OBSERVE"  # as in kvplan.run.aliases, which is loaded only on demand
OBSERVE_PID = "KVPLAN_OBSERVE_PID"  # as in kvplan.run.aliases: the process of the launcher
OBSERVABLE = (
    *("nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm", "rixl", "mooncake", "hixl"),
    *("kvplan.nixl", "kvplan.mooncake", "kvplan.hixl"),
)
HANDLER = "kvplan.run"  # name of the handler of warnings
FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120


class Hook:
    """A finder for our names and their submodules, first on `sys.meta_path`."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: None = None
    ) -> ModuleSpec | None:
        """Install kvplan's finder for this name, and return its result."""
        root = name.partition(".")[0]
        if name in OBSERVABLE:
            observe(os.environ.get(OBSERVE, ""))
        if root in ("llm_datadist", "llm_datadist_v1"):
            return install().find_spec(name, path, target)
        if os.environ.get("KVPLAN_AS") and (root == "mooncake" or root.startswith("nixl")):
            find_kvplan()
            from kvplan.run import aliases

            return aliases.install().find_spec(name, path, target)
        return None


def observe(what: str) -> None:
    """Observe libraries that the program is about to import; `what` is the value of `OBSERVE`."""
    if not what:
        return
    find_kvplan()
    from kvplan.observe import install_from

    install_from(what)


def report_at_exit() -> None:
    """Let the launched program, not its children, say at its end if nothing was recorded."""
    what, pid = os.environ.get(OBSERVE, ""), os.getpid()
    if not what or os.environ.get(OBSERVE_PID) != str(pid):
        return
    import atexit
    import time

    names, _, folder = what.partition("=")
    atexit.register(report_nothing, names, folder, time.time(), pid)


def report_nothing(names: str, folder: str, begin: float, pid: int) -> None:
    """Write a line to standard error if no process has recorded to `folder` since `begin`."""
    if os.getpid() != pid:
        return
    try:
        files = [file for file in os.scandir(folder) if file.name.endswith(".kvrec")]
        made = any(file.stat().st_mtime >= begin for file in files)
    except OSError:  # the folder was not made, or a file was deleted
        made = False
    if not made:
        sys.stderr.write(f"kvplan.run: --observe {names}: no recording was made in {folder}\n")


def find_kvplan() -> None:
    """Make kvplan importable, even if it is not installed, and show its warnings.

    The program does not know kvplan's loggers. If it configures no logging, warnings go to standard
    error, as those of most libraries do.
    """
    import logging

    logger = logging.getLogger("kvplan")
    if logging.lastResort is not None and not any(map(is_ours, logger.handlers)):
        handler = logging.StreamHandler()
        handler.name = HANDLER
        handler.setLevel(logging.WARNING)
        handler.addFilter(is_last_resort)
        logger.addHandler(handler)
    try:
        import kvplan  # noqa: F401 - is it installed?
    except ModuleNotFoundError:
        # kvplan runs from a source tree, and the program was started in another folder.
        sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(FOLDER))))  # noqa: PTH120


def is_ours(handler: Handler) -> bool:
    """Return whether a handler of the logger `kvplan` is the one for its last resort."""
    return handler.name == HANDLER


def is_last_resort(_record: object) -> bool:
    """Return whether the program has configured no logging of kvplan so far."""
    import logging

    return not logging.root.handlers and all(
        is_ours(handler) or isinstance(handler, logging.NullHandler)
        for handler in logging.getLogger("kvplan").handlers
    )


def install() -> MetaPathFinder:
    """Call kvplan's own `install`, and return its finder."""
    find_kvplan()
    from kvplan.llm_datadist import installation

    installation.install(quiet=True)  # the launcher has warned already
    return installation.finder
