"""Write the API reference, HTML made of the docstrings, to build/docs: `make docs`.

A module without page, a name that does not resolve, an annotation that cannot be read: each is a
warning of pdoc, and every warning is an error here.
"""

from __future__ import annotations

import argparse
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pdoc
import pdoc.render

ROOT = Path(__file__).parents[1]

PUBLIC = (
    "kvplan",
    "kvplan.cli",
    "kvplan.debug",
    "kvplan.device.ascend",
    "kvplan.device.device",
    "kvplan.device.memory",
    "kvplan.engine.telemetry",
    "kvplan.engine.option_rows",
    "kvplan.engine.prometheus",
    "kvplan.execution",
    "kvplan.llm_datadist",
    "kvplan.llm_datadist.configs",
    "kvplan.llm_datadist.data_type",
    "kvplan.llm_datadist.status",
    "kvplan.llm_datadist.utils.log",
    "kvplan.llm_datadist.utils.utils",
    "kvplan.llm_datadist.v1",
    "kvplan.llm_datadist.v2.cache_manager",
    "kvplan.llm_datadist.v2.llm_datadist",
    "kvplan.llm_datadist.v2.llm_types",
    "kvplan.planning",
    "kvplan.planning.reference",
    "kvplan.run",
    "kvplan.recording",
    "kvplan.serving",
    "kvplan.testing",
    "kvplan.transport.local",
    "kvplan.transport.protocol",
    "kvplan.transport.tcp.transport",
    "kvplan.transport.ucx.library",
)
"""What a program may import; everything else may change with any version."""

BESIDE_ALL = {
    "kvplan.llm_datadist": (
        "install",
        "uninstall",
        "installed",
        "in_use",
        "permit_several_engines",
    ),
}
"""Public names of a module whose `__all__` is that of the official package."""


def write_reference(folder: Path) -> None:
    """Write a page for each public module, an index and a search index to `folder`.

    Raises:
        UserWarning: something public cannot be documented; its text says what.
    """
    import kvplan

    for name in PUBLIC:
        prepare(import_module(name))
    pdoc.render.configure(
        docformat="google",
        footer_text=f"kvplan {kvplan.__version__}",
        show_source=False,
        template_directory=ROOT / "docs/reference",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pdoc.pdoc(*PUBLIC, output_directory=folder)


def prepare(module: ModuleType) -> None:
    """Make a module show what pdoc cannot see.

    Names of `__all__` that a `__getattr__` loads are bound: pdoc reads the module's dict. And what
    Python makes as constructor of a named tuple is told its module, where its annotations are read.
    """
    names = [*getattr(module, "__all__", ()), *BESIDE_ALL.get(module.__name__, ())]
    for name in names:
        vars(module).setdefault(name, getattr(module, name))
    if names:
        vars(module)["__all__"] = names
    for it in vars(module).values():
        if isinstance(it, type) and issubclass(it, tuple) and hasattr(it, "_fields"):
            it.__new__.__module__ = it.__module__


def main() -> None:
    """Write to build/docs, or where the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("folder", type=Path, nargs="?", default=ROOT / "build/docs", help="default: build/docs")
    write_reference(parser.parse_args().folder)


if __name__ == "__main__":
    main()
