"""How Sphinx makes the site of the documents: `make docs`.

The root of the sources is the repository, so that pages may link to whatever lies in it: other
documents become pages, and everything else (examples, headers) goes into the site as a file.
"""

from __future__ import annotations

import gc
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sphinx import addnodes
from sphinx.domains.python import PythonDomain
from sphinx.ext.napoleon import GoogleDocstring

import kvplan

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

# Pages are trees of objects that stay: to look through them for garbage took a third of the time.
gc.set_threshold(100_000, 50, 100)

project = "kvplan"
author = "the authors of kvplan"
copyright = f"{author}. Apache License 2.0"
version = release = kvplan.__version__
root_doc = "docs/index"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = [
    "docs/*.md",
    "docs/**/*.md",
    "examples/README.md",
    "tests/README.md",
    "tests/ascend_sim/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
]
exclude_patterns = [".*", "build", "kvnative", "kvplan"]

# Links to headings are made as GitHub makes them, so that they work there, too.
myst_heading_anchors = 4
myst_links_external_new_tab = False

# Docstrings are Markdown in one respect: `name` is code, and a link where the name is known.
default_role = "py:obj"
# A class is shown with all that it does: LlmDataDist takes most methods from bases without a name
# of their own. What it takes from Python's classes is left out.
autodoc_default_options = {
    "members": True,
    "undoc-members": True,
    "inherited-members": "object,int,str,tuple,Enum,BaseException,Protocol",
}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = True
autodoc_use_type_comments = False  # there are none, and to look for them takes time
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
toc_object_entries_show_parents = "hide"
maximum_signature_line_length = 90
add_module_names = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"kvplan {release}"
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_root"]  # leads from the root of the site to docs/


class Names(PythonDomain):
    """The domain of Python, where a name of several modules is the page's own, or else kvplan's."""

    def find_obj(
        self, env: Any, modname: str | None, classname: str | None, name: str, *rest: Any
    ) -> list[tuple[str, Any]]:
        # Sphinx compares each `name` of a docstring with the end of all names, and most are none.
        if name.removesuffix("()").rpartition(".")[2] not in self.last_parts:
            return []
        found = super().find_obj(env, modname, classname, name, *rest)
        if len(found) > 1:
            of_llm_datadist = (modname or "").startswith("kvplan.llm_datadist")
            preferred = "kvplan.llm_datadist." if of_llm_datadist else "kvplan."
            found.sort(
                key=lambda one: (not one[0].startswith(preferred), one[0].count("."), one[0])
            )
        return found[:1]

    @cached_property
    def last_parts(self) -> frozenset[str]:
        """What is behind the last dot of the names, which all are known when one is looked up."""
        return frozenset(name.rpartition(".")[2] for name in self.objects)


def read_property(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Read a property as any other: Napoleon would take what is before a colon for its type."""
    if what in {"attribute", "data", "property"}:
        docstring = GoogleDocstring(lines, app.config, app, "method", name, obj, options)
        lines[:] = [".. Napoleon takes this line for it", "", *docstring.lines()]


class Titles:
    """The navigation beside each page, made from the titles of pages and not from their headings.

    Furo asks for a tree of titles only. For each page, Sphinx copies all headings and names of all
    pages, and then removes them again: that took a quarter of the time of a build.
    """

    def __init__(self) -> None:
        self._tocs: dict[str, nodes.bullet_list] = {}

    def collect(self, app: Sphinx, env: BuildEnvironment) -> None:
        """Take the titles of all pages, and the pages below them."""
        for page, toc in env.tocs.items():
            self._tocs[page] = toc.deepcopy()
            for entry in self._tocs[page].children:
                if len(entry) > 1:
                    if below := list(entry.findall(addnodes.toctree)):
                        entry[1][:] = below
                    else:
                        entry.pop(1)

    def offer(self, app: Sphinx, page: str, template: str, context: dict[str, Any], _: Any) -> None:
        """Let the theme make trees of titles from these."""
        whole = context["toctree"]

        def toctree(**options: Any) -> str:
            if not options.get("titles_only"):
                return whole(**options)
            tocs, app.env.tocs = app.env.tocs, self._tocs
            try:
                return whole(**options)
            finally:
                app.env.tocs = tocs

        context["toctree"] = toctree


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    titles = Titles()
    app.connect("env-updated", titles.collect)
    app.connect("html-page-context", titles.offer, priority=400)  # before Furo's
    app.add_domain(Names, override=True)
    app.connect("autodoc-process-docstring", read_property, priority=400)  # before Napoleon's
