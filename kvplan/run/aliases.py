"""Environment variables that make kvplan act as `nixl` or `mooncake.engine`, or observe libraries.

The launcher sets them for `--as` and `--observe`. Operators of vLLM and SGLang can set them too:
both load this module as a plugin. The search path of modules does not change.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib.machinery import PathFinder
from typing import Final

from kvplan.llm_datadist.installation import AliasFinder

AS: Final = "KVPLAN_AS"
"""Environment variable: comma-separated names of interfaces."""

OBSERVE: Final = "KVPLAN_OBSERVE"
"""Environment variable: libraries to observe, such as `nixl`, or `nixl,mooncake=/folder`."""

OBSERVE_PID: Final = "KVPLAN_OBSERVE_PID"
"""Environment variable: the process of the launcher, which becomes the program."""

OBSERVABLE: Final = ("nixl", "mooncake", "hixl", "sums")
"""Names in the value of `OBSERVE`: libraries, and `sums` of the blocks that they move."""

INTERFACES: Final = {
    "nixl": dict.fromkeys(("nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm"), "kvplan.nixl"),
    "mooncake": {"mooncake": "kvplan.mooncake"},
}
"""The modules of each interface, by the names that programs import."""

_logger = logging.getLogger("kvplan")


def asked(text: str) -> dict[str, str]:
    """Return alias and module for each interface in `text`, a value of `KVPLAN_AS`."""
    names = [name for part in text.split(",") if (name := part.strip())]
    if unknown := [name for name in names if name not in INTERFACES]:
        raise ValueError(f"{AS}={text!r}: {unknown[0]!r} must be one of {sorted(INTERFACES)}")
    return {alias: real for name in names for alias, real in INTERFACES[name].items()}


finder = AliasFinder({})
"""The finder that `install` puts on `sys.meta_path`."""


def install() -> AliasFinder:
    """Let imports of the names in the environment return kvplan's modules; idempotent.

    A package that was imported by one of these names stays; logger `kvplan` warns about it.
    """
    finder.roots = roots = asked(os.environ.get(AS, ""))
    for name, real in roots.items():
        module = sys.modules.get(name)
        if module is not None and module.__name__ != real:
            _logger.warning("%s=%s comes too late: %s is imported", AS, name, module.__file__)
    if roots and finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)
    return finder


def installed(interface: str, path: list[str]) -> list[str]:
    """Return the files of installed packages that an interface replaces."""
    specs = (PathFinder.find_spec(name, path) for name in INTERFACES[interface])
    return [spec.origin for spec in specs if spec is not None and spec.origin]


def plugin() -> None:
    """Apply both environment variables, as a plugin of vLLM or SGLang; idempotent."""
    if os.environ.get(AS):
        install()
    if what := os.environ.get(OBSERVE):
        from kvplan.observe import install_from  # slow, and few processes need it

        install_from(what)
