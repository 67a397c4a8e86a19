"""Installation of this package under the name `llm_datadist`, until `uninstall`.

A finder, first on `sys.meta_path`, returns the modules of `kvplan.llm_datadist` for `llm_datadist`
and `llm_datadist_v1`. They are not copies: a class is the same by either name, and its pickles can
be read without an installation.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Final

OURS: Final = __name__.rpartition(".")[0]
"""Name of the package that is installed."""

STUBS: Final = str(Path(__file__).parents[1] / "run" / "path")
"""Folder that `python -m kvplan.run` adds to PYTHONPATH; its llm_datadist installs this package."""

ROOTS: Final = {"llm_datadist": OURS, "llm_datadist_v1": f"{OURS}.v1"}
"""Modules by the names that programs import; the module of version 1 raises on import."""

SEVERAL_ENGINES: Final = "KVPLAN_SEVERAL_ENGINES"
"""Environment variable: "1" permits several engines in a process (--several-engines sets it)."""

_logger = logging.getLogger("kvplan")


def install(*, quiet: bool = False) -> None:
    """Let imports of `llm_datadist` and its submodules return those of this package; idempotent.

    Applies to this process and its forked children. An import of `llm_datadist_v1` raises. An
    official package is not changed; if one could be imported, logger `kvplan` warns with its
    path.

    Args:
        quiet: True to omit the warning.

    Raises:
        ImportError: an official package was already imported, so its classes are in use.
    """
    with _mutex:
        if installed():
            return
        for name in ROOTS:
            module = sys.modules.get(name)
            if module is not None and not _is_ours(module):
                raise ImportError(
                    f"{name} is already imported, from {_file_of(module)}; call "
                    f"{OURS}.install() before anything imports it",
                    name=name,
                    path=module.__file__,
                )
        _forget()
        sys.meta_path.insert(0, finder)
    if not quiet and (official := official_path()) is not None:
        _logger.warning("%s", in_use(official))


def uninstall() -> None:
    """Undo `install`. References to imported modules stay valid."""
    with _mutex:
        if installed():
            sys.meta_path.remove(finder)
            _forget()


def installed() -> bool:
    """Return True after `install`, until `uninstall`."""
    return finder in sys.meta_path


def in_use(official: str | None = None) -> str:
    """Describe in one line which package `import llm_datadist` returns, and where others are.

    Args:
        official: file of the official package; None to search for it.
    """
    ours = f"kvplan's, {Path(__file__).parent}"
    imported = sys.modules.get("llm_datadist")
    if imported is not None and not _is_ours(imported):
        return f"llm_datadist is {_file_of(imported)}, already imported; {ours}, is {OURS}"
    official = official or official_path()
    if installed() or STUBS in sys.path:  # the launcher's stubs install it on import
        unused = "" if official is None else f"; {official} could be imported too, and is not used"
        return f"llm_datadist is {ours}{unused}"
    found = "not importable" if official is None else official
    return f"llm_datadist is {found}; {ours}, is {OURS}"


def official_path(path: Sequence[str] | None = None) -> str | None:
    """Return the file of another llm_datadist that could be imported; None if none exists."""
    for spec in _specs("llm_datadist", sys.path if path is None else path, path is None):
        # A folder without __init__.py is a namespace package, not an installation.
        if spec.origin is not None and spec.has_location:
            return spec.origin
    return None


class AliasFinder(MetaPathFinder, Loader):
    """A finder of modules by the names that programs import.

    Args:
        roots: the real name of each root; submodules are found below the real name.
    """

    def __init__(self, roots: Mapping[str, str]) -> None:
        self.roots = roots

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec if the name is an alias of an existing module, otherwise None."""
        root, _, rest = fullname.partition(".")
        if root not in self.roots:
            return None
        name = f"{self.roots[root]}.{rest}" if rest else self.roots[root]
        found = find_spec(name)
        if found is None:
            return None
        spec = ModuleSpec(fullname, self, origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        spec.loader_state = name
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module itself, imported under its own name."""
        module = import_module(spec.loader_state)
        own = module.__spec__
        # The import system puts the spec of the alias into the module. Another thread may have just
        # done that for another alias.
        while own is not None and own.loader is self:
            own = own.loader_state
        spec.loader_state = own
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec of the module, which was executed under its own name."""
        alias = module.__spec__
        assert alias is not None
        module.__spec__ = alias.loader_state


finder = AliasFinder(ROOTS)
"""The finder that `install` puts on `sys.meta_path`."""

_mutex = Lock()
_STUBS = Path(STUBS)


def _specs(name: str, path: Sequence[str], everywhere: bool) -> Iterator[ModuleSpec]:
    for other in sys.meta_path if everywhere else [PathFinder]:
        if other is finder or not hasattr(other, "find_spec"):
            continue
        if getattr(other, "__module__", None) == "kvplan_hook":
            continue  # the launcher's finder would install this package
        # Our own folder in the path would hide the official package.
        folders = [folder for folder in path if folder != STUBS] if other is PathFinder else None
        if (spec := other.find_spec(name, folders)) is not None:
            yield spec


def _is_ours(module: ModuleType) -> bool:
    if module.__name__.partition(".")[0] == __name__.partition(".")[0]:
        return True
    return module.__file__ is not None and Path(module.__file__).parent == _STUBS


def _file_of(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or repr(module)


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ROOTS]:
        del sys.modules[name]
