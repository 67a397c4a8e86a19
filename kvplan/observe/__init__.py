"""Recordings of transfers of other libraries: NIXL, Mooncake's transfer engine and HIXL.

`install` wraps their classes as soon as the program imports them. The program gets the same results
and the same exceptions (docs/how-to/observing.md). This room must not import engines or transports.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from kvplan.observe.observer import Observer
from kvplan.observe.surfaces import wrap_hixl, wrap_mooncake, wrap_nixl
from kvplan.status import invalid
from kvplan.validation import shown

__all__ = ["Observer", "install", "sums"]

SUMS: Final = "sums"
"""The name in `KVPLAN_OBSERVE` that turns on sums of blocks."""

_Wrap = Callable[[ModuleType, Observer], None]
_MODULES: Final[dict[str, tuple[tuple[str, ...], _Wrap]]] = {
    "nixl": (
        (
            *(f"nixl{kind}._api" for kind in ("", "_cu12", "_cu13", "_rocm")),
            "rixl._api",
            "kvplan.nixl._api",
        ),
        wrap_nixl,
    ),
    "mooncake": (("mooncake.engine", "kvplan.mooncake.engine"), wrap_mooncake),
    "hixl": (("hixl", "kvplan.hixl"), wrap_hixl),
}


_installed: list[Observer] = []


def install(
    names: Sequence[str], folder: str | os.PathLike[str] = "", *, sums: bool = False
) -> Observer:
    """Observe these libraries, even those that are already imported.

    Args:
        names: "nixl", "mooncake", "hixl".
        folder: the folder for the recording of each agent or engine; empty: the current folder.
        sums: True to record sums of transferred blocks in host memory, for `kvplan trace --sums`.

    Raises:
        LLMException: LLM_PARAM_INVALID: an unknown name.
    """
    for name in names:
        if name not in _MODULES:
            raise invalid(f"names={shown([*names])} must be of {[*_MODULES]}")
    observer = Observer(folder, sums=sums)
    _installed.append(observer)
    wanted = {
        module: wrap for modules, wrap in (_MODULES[name] for name in names) for module in modules
    }
    for module, wrap in wanted.items():
        if module in sys.modules:
            observer.guarded(wrap, sys.modules[module], observer)
    sys.meta_path.insert(0, _Finder(wanted, observer))
    return observer


@cache
def install_from(text: str) -> Observer:
    """Observe the libraries in the value of `KVPLAN_OBSERVE`: `nixl`, or `nixl,mooncake=/folder`.

    A repeated value has no effect.
    """
    listed, _, folder = text.partition("=")
    names = [name.strip() for name in listed.split(",") if name.strip()]
    chosen = [name for name in names if name != SUMS]
    return install(chosen, folder, sums=SUMS in names)


def sums(tag: str, descriptors: Any) -> None:
    """Record sums of the present content of a request's memory; no effect without `sums=True`.

    Call this when peers may begin to pull the request, or have pushed it. `kvplan trace --sums`
    compares these sums with those of transfers of the same tag.

    Args:
        tag: the request, as in the notifications of its transfers.
        descriptors: registered host memory in the order of those transfers, as for NIXL's
            `get_xfer_descs`: for example (address, nbytes, device) of each block.
    """
    for observer in _installed:
        observer.guarded(observer.sum, tag, descriptors)


class _Finder(MetaPathFinder):
    """A finder that wraps the classes of each wanted module after its execution."""

    def __init__(self, wanted: dict[str, _Wrap], observer: Observer) -> None:
        self._wanted = wanted
        self._observer = observer

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        wrap = self._wanted.get(name)
        if wrap is None:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                # `AliasFinder` is its own loader; its modules are wrapped under their real names.
                loader: Any = spec.loader
                if loader is not finder and loader is not None:
                    execute = partial(self._execute, loader.exec_module, wrap)
                    vars(loader)["exec_module"] = execute  # each module has its own loader
                return spec
        return None

    def _execute(
        self, execute: Callable[[ModuleType], None], wrap: _Wrap, module: ModuleType
    ) -> None:
        execute(module)
        self._observer.guarded(wrap, module, self._observer)
