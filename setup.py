"""Builds the native modules; everything that is only metadata stands in pyproject.toml.

Every ``kvnative/*.pyx`` becomes an extension module. The C sources in ``kvnative/src`` become one
shared library, which each module finds from its own place (``$ORIGIN``): a new source file or
module needs no change here.

A build in place (`build_ext --inplace`, `pip install -e`) also makes the module of the tests, which
puts failures around backends; no wheel has it.

Switches, as environment variables; each combination has its own build directory:

KVPLAN_DEBUG=1          -O0 -g, asserts on
KVPLAN_ANNOTATE=1       Cython writes its annotated HTML next to the generated C in build/
KVPLAN_SANITIZE=a,b     compiles and links with -fsanitize=a,b; the first finding is fatal
KVPLAN_LIMITED_API=0    builds for this Python alone instead of one abi3 wheel for 3.11 and later
KVPLAN_FREE_THREADED=1  says to a Python without a GIL that none is needed: to try that
KVPLAN_WERROR=1         warnings of the C compiler in our own sources are errors (CI sets it)
KVPLAN_BUILD_CACHE=d    Cython and the C compiler take what they made of the same sources from
                        this folder; Cython removes what was not used for long above 100 MB
"""

import filecmp
import hashlib
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from Cython.Build import cythonize
from Cython.Compiler import Options
from setuptools import Extension, find_packages, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

Compile = Callable[..., None]


def switch(name: str, default: str = "0") -> bool:
    value = os.environ.get(name, default)
    if value not in ("0", "1"):
        raise SystemExit(f"{name} is {value!r}; it must be 0 or 1")
    return value == "1"


DEBUG = switch("KVPLAN_DEBUG")
ANNOTATE = switch("KVPLAN_ANNOTATE")
WERROR = switch("KVPLAN_WERROR")
FREE_THREADED = switch("KVPLAN_FREE_THREADED")
SANITIZE = os.environ.get("KVPLAN_SANITIZE", "")
CACHE = os.environ.get("KVPLAN_BUILD_CACHE")
# The free-threaded builds of Python 3.13 and 3.14 have no stable ABI.
LIMITED_API = switch("KVPLAN_LIMITED_API", "1") and not sysconfig.get_config_var("Py_GIL_DISABLED")

CHECKED = DEBUG or bool(SANITIZE)
FLAVOUR = "-".join(
    [
        "debug" if DEBUG else "release",
        *(["abi3"] if LIMITED_API else []),
        *(["nogil"] if FREE_THREADED else []),
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
    "-pthread",
    *sanitizer,
    *(["-fno-sanitize-recover=all"] if SANITIZE else []),
]
own_flags = ["-O0" if DEBUG else "-O1" if SANITIZE else "-O3"]
# Most of what is compiled; checked builds are made for each change, and run it a few times.
cython_flags = ["-O0" if CHECKED else "-O3"]
# Our own sources hold the strict line; Cython's output is not ours to lint.
strict_flags = ["-fPIC", "-Wall", "-Wextra", *(["-Werror"] if WERROR else [])]
if "thread" in SANITIZE:
    strict_flags += ["-Wno-tsan"]  # it says that it does not know fences

# In a folder of its own: beside the modules it would be taken for one.
LIBRARY = Path("kvnative/lib/libkvn.so")
include_dirs = ["include", "kvnative/src"]
c_sources = sorted(Path("kvnative/src").rglob("*.c"))
c_folders = [str(item) for item in Path("kvnative/src").rglob("*") if item.is_dir()] + [
    "kvnative/src"
]
# Files that a C source takes in by .incbin.
embedded = sorted(Path("kvnative/src").rglob("*.ptx"))
headers = [*Path("include").rglob("*.h"), *Path("kvnative/src").rglob("*.h")]
headers = sorted([*headers, *embedded])
# zig's cache of objects does not see them but by the command.
digest = hashlib.sha256(b"".join(path.read_bytes() for path in embedded)).hexdigest()
macros: list[tuple[str, str | None]] = [("_GNU_SOURCE", None), ("KVN_EMBEDDED_SHA256", digest)]
abi_macros = [("Py_LIMITED_API", "0x030B0000")] if LIMITED_API else []

# Failures around backends, for the tests: built in place only.
tests = Path("tests/support")
test_sources = sorted(tests.glob("native/*.c"))
test_headers = sorted(tests.glob("native/*.h"))


def module(source: Path, depends: list[Path], *folders: Path) -> Extension:
    """Return the module of one Cython source, which finds libkvn.so from its own place.

    Headers are found in `folders` too, and not only in those that all have.
    """
    origin = os.path.relpath(LIBRARY.parent, source.parent)
    return Extension(
        ".".join([*source.parent.parts, source.stem]),
        [str(source)],
        include_dirs=[*include_dirs, *map(str, folders)],
        define_macros=[*macros, *abi_macros],
        depends=[*map(str, depends), "setup.py"],
        extra_compile_args=["-fvisibility=hidden", *common_flags, *cython_flags],
        libraries=["kvn"],
        extra_link_args=["-pthread", f"-Wl,-rpath,$ORIGIN/{origin}", *sanitizer],
        py_limited_api=LIMITED_API,
    )


modules = [module(source, headers) for source in sorted(Path("kvnative").glob("*.pyx"))]
modules += [
    module(source, [*headers, *test_headers, *test_sources], tests / "native")
    for source in tests.glob("*.pyx")
]

Options.warning_errors = True


class BuildNative(build_ext):
    """build_ext that makes libkvn.so first."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or True  # one module for each core at once
        if not self.inplace:
            self.extensions = [
                extension for extension in self.extensions if extension.name.startswith("kvnative.")
            ]

    def build_extensions(self) -> None:
        self.check_tools()
        self.make_c()
        if CACHE:
            self.compiler._compile = self.reusing(self.compiler._compile, Path(CACHE))
        library = self.built()
        library.parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor() as threads:
            objects = list(threads.map(self.compiled, c_sources))
        # A folder is newer when a source is gone. The compiler looks at the objects alone.
        if self.force or newer_group([*objects, *c_folders, "setup.py"], str(library)):
            library.unlink(missing_ok=True)
            self.compiler.link_shared_object(
                objects,
                str(library),
                # It calls itself by the shortest way, and shows its own names alone.
                extra_postargs=["-pthread", "-Wl,-soname,libkvn.so,-Bsymbolic,-z,defs", *sanitizer],
                libraries=["dl"],
            )
        self.compiler.add_library_dir(str(library.parent))
        for extension in self.extensions:
            if not extension.name.startswith("kvnative."):
                extension.extra_objects = [
                    self.compiled(source, test_headers, tests / "native") for source in test_sources
                ]
        super().build_extensions()

    def check_tools(self) -> None:
        """End with one line that says what a build needs and is not here."""
        compiler = self.compiler.compiler[0]
        header = Path(sysconfig.get_path("include"), "Python.h")
        missing = []
        if shutil.which(compiler) is None:
            missing.append(f"a C compiler ({compiler} is not on PATH; Debian: apt install gcc)")
        if not header.exists():
            missing.append(
                f"Python's headers ({header} is not there; Debian: apt install python3-dev)"
            )
        if missing:
            raise SystemExit(
                f"error: to build kvplan from source needs {' and '.join(missing)}; its wheels need"
                " neither"
            )

    def make_c(self) -> None:
        """Let Cython write the C sources of the modules.

        Only here, since pip also runs this file to ask for requirements and metadata.
        """
        made = cythonize(
            self.extensions,
            build_dir=f"{BUILD}/cython",
            annotate=ANNOTATE,
            cache=CACHE or False,
            language_level=3,
            compiler_directives={
                # As Cython's default, bounds are checked: all flavours compile the same C then.
                "wraparound": False,
                "embedsignature": True,
                "embedsignature.format": "clinic",
                # See docs/internals/adr/0009: prepared, and not promised yet.
                "freethreading_compatible": FREE_THREADED,
            },
        )
        sources = {extension.name: extension.sources for extension in made}
        for extension in self.extensions:
            extension.sources = sources[extension.name]

    def reusing(self, compile_one: Compile, cache: Path) -> Compile:
        """Return `compile_one`, but for what is in the cache: the object file is copied then.

        setuptools makes an editable installation and a wheel in a new folder: without a cache it
        compiles all that it has compiled before.
        """
        compiler = self.compiler.compiler_so
        said = subprocess.run([*compiler, "-v"], capture_output=True, check=True)
        included = [path.read_bytes() for path in (*headers, *test_headers)]
        cache.mkdir(parents=True, exist_ok=True)

        def reuse_or_compile(
            target: str,
            source: str,
            kind: str,
            first: list[str],
            last: list[str],
            options: list[str],
        ) -> None:
            command = "\n".join([*compiler, *first, *last, *options])
            parts = [said.stderr, command.encode(), Path(source).read_bytes(), *included]
            digests = b"".join(hashlib.sha256(part).digest() for part in parts)
            key = hashlib.sha256(digests).hexdigest()
            kept = cache / f"{Path(source).stem}-{key}.o"
            if kept.exists():
                shutil.copyfile(kept, target)
                os.utime(kept)
                return
            compile_one(target, source, kind, first, last, options)
            partial = cache / f"{key}.{os.getpid()}.tmp"
            shutil.copyfile(target, partial)
            partial.replace(kept)

        return reuse_or_compile

    def compiled(self, source: Path, own_headers: Sequence[Path] = (), *folders: Path) -> str:
        """Return the object file of `source`: compiled again if what it may include is newer."""
        (name,) = self.compiler.object_filenames([str(source)], output_dir=self.build_temp)
        included = map(str, [*headers, *own_headers])
        if self.force or newer_group([str(source), *included, "setup.py"], name):
            self.compiler.compile(
                [str(source)],
                output_dir=self.build_temp,
                macros=macros,
                include_dirs=[*include_dirs, *map(str, folders)],
                extra_postargs=[*common_flags, *own_flags, *strict_flags],
            )
        return name

    def built(self) -> Path:
        """Return where libkvn.so is linked."""
        return Path(self.build_lib, LIBRARY)

    def copy_extensions_to_source(self) -> None:
        # What is in place, of another flavour say, is not copied over where it is newer.
        for built, placed in self.get_output_mapping().items():
            if Path(placed).exists() and not filecmp.cmp(built, placed):
                Path(placed).unlink()
        super().copy_extensions_to_source()
        LIBRARY.parent.mkdir(exist_ok=True)
        self.copy_file(str(self.built()), str(LIBRARY))

    def get_outputs(self) -> list[str]:
        # In place they are the keys of the mapping, which has it.
        return [*super().get_outputs(), *([] if self.inplace else [str(self.built())])]

    def get_output_mapping(self) -> dict[str, str]:
        mapping = super().get_output_mapping()
        if self.inplace:
            mapping[str(self.built())] = str(LIBRARY)
        return mapping


class Build(build):
    """build of a wheel, without what earlier builds have left in the same folder.

    Modules that were deleted, and modules of the tests from a build in place, would get into it.
    """

    def run(self) -> None:
        super().run()
        kept = {Path(path).resolve() for path in self.get_outputs()}
        for path in Path(self.build_lib).rglob("*"):
            if path.is_file() and path.resolve() not in kept:
                path.unlink()

    def get_outputs(self) -> list[str]:
        return [
            path
            for name in self.get_sub_commands()
            for path in self.get_finalized_command(name).get_outputs()
        ]


setup(
    packages=[
        *find_packages(include=["kvplan", "kvplan.*", "kvnative"]),
        # The public C headers travel inside the package: kvnative.get_include() finds them.
        "kvnative.include",
        "kvnative.include.kvnative",
    ],
    package_dir={"kvnative.include": "include"},
    # Not in the package: whoever runs pytest would import kvplan and NumPy.
    py_modules=["pytest_kvplan"],
    ext_modules=modules,
    cmdclass={"build": Build, "build_ext": BuildNative},
    options={
        "build": {"build_base": BUILD},
        "build_ext": {"parallel": os.cpu_count()},
        "bdist_wheel": {"py_limited_api": "cp311"} if LIMITED_API else {},
    },
)
