"""Builds the native modules; everything that is only metadata stands in pyproject.toml.

Every ``kvnative/*.pyx`` becomes an extension module. The C sources in ``kvnative/src`` are compiled
once, into a static archive, and each module links the members that it calls: a new source file or
module needs no change here. A member that two modules link exists twice at run time, so such a
source keeps no writable file-scope state (tests/project holds that).

Switches, as environment variables; each combination has its own build directory:

KVPLAN_DEBUG=1          -O0 -g, asserts on, Cython checks bounds
KVPLAN_ANNOTATE=1       Cython writes its annotated HTML next to the generated C in build/
KVPLAN_SANITIZE=a,b     compiles and links with -fsanitize=a,b; the first finding is fatal
KVPLAN_LIMITED_API=0    builds for this Python alone instead of one abi3 wheel for 3.11 and later
KVPLAN_WERROR=1         warnings of the C compiler in our own sources are errors (CI sets it)
"""

import os
import sysconfig
from pathlib import Path

from Cython.Build import cythonize
from Cython.Compiler import Options
from setuptools import Extension, find_packages, setup
from setuptools.command.build_clib import build_clib
from setuptools.command.build_ext import build_ext


def switch(name: str, default: str = "0") -> bool:
    value = os.environ.get(name, default)
    if value not in ("0", "1"):
        raise SystemExit(f"{name} is {value!r}; it must be 0 or 1")
    return value == "1"


DEBUG = switch("KVPLAN_DEBUG")
ANNOTATE = switch("KVPLAN_ANNOTATE")
WERROR = switch("KVPLAN_WERROR")
SANITIZE = os.environ.get("KVPLAN_SANITIZE", "")
# The free-threaded build of Python has no stable ABI yet.
LIMITED_API = switch("KVPLAN_LIMITED_API", "1") and not sysconfig.get_config_var("Py_GIL_DISABLED")

CHECKED = DEBUG or bool(SANITIZE)
FLAVOUR = "-".join(
    [
        "debug" if DEBUG else "release",
        *(["abi3"] if LIMITED_API else []),
        *SANITIZE.split(",") * bool(SANITIZE),
    ]
)
BUILD = f"build/{FLAVOUR}"

sanitizer = [f"-fsanitize={SANITIZE}"] if SANITIZE else []
common_flags = [
    # CPython's own flags carry NDEBUG and -g, Debian's also FORTIFY, which -O0 cannot have.
    # A sanitizer's report needs names and lines, not variables: -g1 takes two thirds of the time.
    "-g1" if SANITIZE else "-g" if DEBUG else "-g0",
    *(["-UNDEBUG", "-U_FORTIFY_SOURCE", "-fno-omit-frame-pointer"] if CHECKED else []),
    "-std=c11",
    "-fvisibility=hidden",
    "-pthread",
    *sanitizer,
    *(["-fno-sanitize-recover=all"] if SANITIZE else []),
]
own_flags = ["-O0" if DEBUG else "-O1" if SANITIZE else "-O3"]
# Most of what is compiled; checked builds are made for each change, and run it a few times.
cython_flags = ["-O0" if CHECKED else "-O3"]
# Our own sources hold the strict line; Cython's output is not ours to lint.
strict_flags = ["-fPIC", "-Wall", "-Wextra", *(["-Werror"] if WERROR else [])]

include_dirs = ["include", "kvnative/src"]
c_sources = sorted(map(str, Path("kvnative/src").rglob("*.c")))
headers = sorted(map(str, [*Path("include").rglob("*.h"), *Path("kvnative/src").rglob("*.h")]))
macros: list[tuple[str, str | None]] = [("_GNU_SOURCE", None)]
abi_macros = [("Py_LIMITED_API", "0x030B0000")] if LIMITED_API else []

modules = [
    Extension(
        f"kvnative.{source.stem}",
        [str(source)],
        include_dirs=include_dirs,
        define_macros=[*macros, *abi_macros],
        depends=[*c_sources, *headers, "setup.py"],  # relinks when the archive changes
        extra_compile_args=[*common_flags, *cython_flags],
        extra_link_args=["-pthread", *sanitizer],
        py_limited_api=LIMITED_API,
    )
    for source in sorted(Path("kvnative").glob("*.pyx"))
]

Options.warning_errors = True


class BuildArchive(build_clib):
    """build_clib whose archive keeps nothing of a source that is gone."""

    def run(self) -> None:
        Path(self.build_clib, "libkvn.a").unlink(missing_ok=True)
        super().run()


class BuildNative(build_ext):
    """build_ext that makes the archive first, also when it is called alone (--inplace)."""

    def run(self) -> None:
        self.run_command("build_clib")
        super().run()


setup(
    packages=[
        *find_packages(include=["kvplan", "kvplan.*", "kvnative"]),
        # The public C headers travel inside the package: kvnative.get_include() finds them.
        "kvnative.include",
        "kvnative.include.kvnative",
    ],
    package_dir={"kvnative.include": "include"},
    libraries=[
        (
            "kvn",
            {
                "sources": c_sources,
                "obj_deps": {"": [*headers, "setup.py"]},
                "include_dirs": include_dirs,
                "macros": macros,
                "cflags": [*common_flags, *own_flags, *strict_flags],
            },
        )
    ]
    if c_sources
    else [],
    ext_modules=cythonize(
        modules,
        build_dir=f"{BUILD}/cython",
        annotate=ANNOTATE,
        language_level=3,
        compiler_directives={
            "boundscheck": CHECKED,
            "wraparound": False,
            "embedsignature": True,
            "embedsignature.format": "clinic",
        },
    )
    if modules
    else [],
    cmdclass={"build_clib": BuildArchive, "build_ext": BuildNative},
    options={
        "build": {"build_base": BUILD},
        "build_ext": {"parallel": os.cpu_count()},
        "bdist_wheel": {"py_limited_api": "cp311"} if LIMITED_API else {},
    },
)
