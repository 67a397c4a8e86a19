"""Make `import llm_datadist`, and every path below it, mean this package; it can be undone.

A finder, first on `sys.meta_path`, answers for `llm_datadist` and `llm_datadist_v1` with the
modules of `kvplan.llm_datadist` themselves, not with copies: a class is one class by either name,
and its pickles are read where nothing was installed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Final

OURS: Final = __name__.rpartition(".")[0]
"""The package that is installed."""

STUBS: Final = str(Path(__file__).parents[1] / "run" / "path")
"""What `python -m kvplan.run` puts into PYTHONPATH: modules of these names that lead to us."""

ROOTS: Final = {"llm_datadist": OURS, "llm_datadist_v1": f"{OURS}.v1"}
"""The names that a program imports, and the modules that it gets; that of version 1 refuses."""

SEVERAL_ENGINES: Final = "KVPLAN_SEVERAL_ENGINES"
"""Environment variable: "1" lets a process have several engines; the launcher sets it."""

_logger = logging.getLogger("kvplan")


def install(*, quiet: bool = False) -> None:
    """Make `import llm_datadist` and its submodules mean this package.

    An import of `llm_datadist_v1` is refused. From here on, in this process and in what it forks; a
    second time: nothing. An official package that could be imported as well is not touched, and a
    warning on the logger `kvplan` names it.

    Args:
        quiet: leave the warning out.

    Raises:
        ImportError: an official package was imported before: its classes are in use.
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
    """Undo `install`; modules that were imported stay what they are to those who hold them."""
    with _mutex:
        if installed():
            sys.meta_path.remove(finder)
            _forget()


def installed() -> bool:
    """Whether `install` is in force."""
    return finder in sys.meta_path


def in_use(official: str | None = None) -> str:
    """Say in a line which package `import llm_datadist` gives, and where the others are.

    Args:
        official: where the official one is; None: it is looked for.
    """
    ours = f"kvplan's, {Path(__file__).parent}"
    imported = sys.modules.get("llm_datadist")
    if imported is not None and not _is_ours(imported):
        return f"llm_datadist is {_file_of(imported)}, already imported; {ours}, is {OURS}"
    official = official or official_path()
    if installed() or STUBS in sys.path:  # the launcher's processes install when it is imported
        unused = "" if official is None else f"; {official} is importable too, and not used"
        return f"llm_datadist is {ours}{unused}"
    found = "nothing that can be imported" if official is None else official
    return f"llm_datadist is {found}; {ours}, is {OURS}"


def official_path(path: Sequence[str] | None = None) -> str | None:
    """Return the file of an llm_datadist that is not this one and could be imported."""
    for spec in _specs("llm_datadist", sys.path if path is None else path, path is None):
        # A folder without __init__.py is a namespace package, not an installation.
        if spec.origin is not None and spec.has_location:
            return spec.origin
    return None


class AliasFinder(MetaPathFinder, Loader):
    """Finds the modules of this package themselves as `llm_datadist[.x]`, `llm_datadist_v1[.x]`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Answer for our names only, and only where we have such a module."""
        name = real_name(fullname)
        if name is None:
            return None
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
        # The import system puts the spec of the alias into the module; another thread may have just
        # done so for another alias.
        while own is not None and own.loader is self:
            own = own.loader_state
        spec.loader_state = own
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back; it was executed under its own name."""
        alias = module.__spec__
        assert alias is not None
        module.__spec__ = alias.loader_state


def real_name(alias: str) -> str | None:
    """Return the name of our module for `llm_datadist.x` or `llm_datadist_v1.x`; None: not ours."""
    root, _, rest = alias.partition(".")
    if root not in ROOTS:
        return None
    return f"{ROOTS[root]}.{rest}" if rest else ROOTS[root]


finder = AliasFinder()
"""The one that `install` puts on `sys.meta_path`."""

_mutex = Lock()
_STUBS = Path(STUBS)


def _specs(name: str, path: Sequence[str], everywhere: bool) -> Iterator[ModuleSpec]:
    for other in sys.meta_path if everywhere else [PathFinder]:
        if other is finder or not hasattr(other, "find_spec"):
            continue
        if getattr(other, "__module__", None) == "kvplan_hook":
            continue  # the launcher's: it would install
        # Our own folder in the path would hide what is behind it.
        folders = [it for it in path if it != STUBS] if other is PathFinder else None
        if (spec := other.find_spec(name, folders)) is not None:
            yield spec


def _is_ours(module: ModuleType) -> bool:
    if module.__name__.partition(".")[0] == __name__.partition(".")[0]:
        return True
    return module.__file__ is not None and Path(module.__file__).parent == _STUBS


def _file_of(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or repr(module)


def _forget() -> None:
    for name in [it for it in sys.modules if it.partition(".")[0] in ROOTS]:
        del sys.modules[name]
