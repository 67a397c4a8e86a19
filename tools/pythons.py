"""Run a selection of the tests on each Python that kvplan supports and this machine can get.

    python tools/pythons.py [--all] [--tests PATH ...] [NAME ...]

Names are `oldest` (Python 3.11 with the oldest NumPy, pyzmq, msgspec, click and rich that
pyproject.toml admits), `3.12`, `3.13`, `3.14` with the newest releases on PyPI, and `3.14t`, the
build without a GIL (msgspec does not support 3.13t). Interpreters come from PATH, from pyenv, or
from Debian: unpacked in build/pythons and run there by chroot, which needs root. 3.14t is compiled
from Debian's source. Interpreters with a GIL run the modules that are built in place, which use the
stable ABI. 3.14t has its own build, in a copy of the tree.

Prints one line for each at the end. Exits with 1 if a test failed, or if a Python that was named
could not be tried.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "pythons"
PIP = [sys.executable, "-m", "pip"]
FREE_THREADED = "3.14t"
NAMES = ("oldest", "3.12", "3.13", "3.14", FREE_THREADED)
TESTS = (
    *("native", "execution", "engine", "control", "links", "tcp", "datadist", "recording"),
    *("cuda", "cuda_sim"),
)
"""Tests of behaviour that differs between Pythons: compiled code, threads, loops, processes."""

MIRROR = "http://deb.debian.org/debian"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
SUITES = {"3.13": "trixie", "3.14": "sid", FREE_THREADED: "sid"}
"""The release of Debian that has each version."""

PROBE = """
import importlib, pkgutil, platform, sys, sysconfig
import click, msgspec, numpy, zmq
import kvnative, kvplan, kvplan.engine, kvplan.vllm.options, kvplan.cli
for it in pkgutil.iter_modules(kvnative.__path__):
    importlib.import_module("kvnative." + it.name)
gil = ""
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    gil = ", GIL ON" if sys._is_gil_enabled() else ", GIL off"
print(f"Python {platform.python_version()}{gil}, NumPy {numpy.__version__}, pyzmq"
      f" {zmq.__version__}, msgspec {msgspec.__version__}")
"""

WHICH = """
import sys, sysconfig
free = sysconfig.get_config_var("Py_GIL_DISABLED")
print("%d.%d" % sys.version_info[:2] + ("t" if free else ""))
"""


class MissingPythonError(Exception):
    """A Python is not available here; the message has the reason."""


class Interpreter(NamedTuple):
    """A Python to run, and its origin."""

    python: Path
    origin: str
    root: Path | None = None

    def command(self, python: Path | None = None) -> list[str]:
        """Return the command that runs it, or `python` of its environment, in this folder."""
        if self.root is None:
            return [str(python or self.python)]
        inside = "import os, sys; os.chdir(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"
        shared = f"for it in /proc /sys /dev /tmp {ROOT}"
        mounts = f"{shared}; do mkdir -p $0$it; mount --rbind $it $0$it; done"
        return [
            *("unshare", "--mount", "sh", "-ec", f'{mounts}; exec chroot $0 "$@"', str(self.root)),
            *(str(self.python), "-c", inside, str(ROOT), str(python or self.python)),
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="all tests, not the quick selection")
    parser.add_argument("--tests", nargs="+", help=f"default: {' '.join(TESTS)}")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {' '.join(NAMES)}")
    arguments = parser.parse_args()
    for item in arguments.names:
        if item not in NAMES:
            parser.error(f"NAME is {item!r}; it must be one of {', '.join(NAMES)}")
    tests = arguments.tests or [f"tests/{case}" for case in TESTS]
    selected = ["tests"] if arguments.all else [*tests, "-m", "not slow"]
    table, failed = [], False
    for name in arguments.names or NAMES:
        try:
            outcome, passed = attempt(name, selected)
        except MissingPythonError as error:
            outcome, passed = f"not tried: {error}", name not in arguments.names
        except subprocess.CalledProcessError as error:
            command = " ".join(map(str, error.cmd))
            outcome, passed = f"failed: `{command}` ended with {error.returncode}", False
        failed |= not passed
        table.append(f"{name:8} {outcome}")
        print(f"=== {table[-1]}", flush=True)
    print("\n".join(["", *table]))
    return int(failed)


def attempt(name: str, selected: list[str]) -> tuple[str, bool]:
    """Run the tests on one Python; return the outcome, and True if they passed."""
    interpreter = find("3.11" if name == "oldest" else name)
    print(f"=== {name}: {interpreter.origin}", flush=True)
    environment = make_environment(name, interpreter)
    tree, variables = ROOT, dict(os.environ)
    python = interpreter.command(environment / "bin" / "python")
    if name == FREE_THREADED:
        tree = copy_tree(name)
        variables["KVPLAN_FREE_THREADED"] = "1"
        build = [*python, "setup.py", "-q", "egg_info", "build_ext", "--inplace"]
        subprocess.run(build, cwd=tree, env=variables, check=True)
    about = subprocess.run(
        [*python, "-W", "error", "-c", PROBE],
        cwd=tree,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if about.returncode != 0:
        return "kvplan cannot be imported", False
    print(about.stdout, end="", flush=True)
    if "GIL ON" in about.stdout:
        return f"{about.stdout.strip()}: importing kvplan enabled the GIL", False
    # With some versions of NumPy, Hypothesis warns about its own use of the random state.
    quiet = ("-W", "ignore:It looks like `register_random`")
    options = ("-p", "no:cacheprovider", "--timeout", "300", *quiet)
    began = time.monotonic()
    log = PLACE / f"{name}.log"
    with log.open("w") as out:
        done = subprocess.run(
            [*python, "-m", "pytest", "-q", *options, "-n", "2", "--dist", "loadfile", *selected],
            cwd=tree,
            stdout=out,
            stderr=subprocess.STDOUT,
            check=False,
            env=variables | {"PYTHONPATH": str(tree)},
        )
    lines = log.read_text().splitlines() or [""]
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            print(line, flush=True)
    seconds = time.monotonic() - began
    return (
        f"{about.stdout.strip()}: {lines[-1].strip('= ')[:100]} ({seconds:.0f} s, {log})",
        done.returncode == 0,
    )


# ---- interpreters


def find(name: str) -> Interpreter:
    """Find an interpreter; raise MissingPythonError if this machine cannot get it."""
    version = name.removesuffix("t")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = [shutil.which(f"python{name}"), *sorted(pyenv.glob(f"{version}.*/bin/python{name}"))]
    for value in [sys.executable, *filter(None, found)]:
        if is_python(value, name):
            return Interpreter(Path(value), str(value))
    if name not in SUITES:
        raise MissingPythonError(f"no python{name} on PATH or of pyenv, and Debian has none")
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise MissingPythonError(f"no python{name}; Debian's needs root and apt-get")
    return compiled(name) if name == FREE_THREADED else unpacked(name)


def is_python(python: str | Path, name: str) -> bool:
    """Return True if `python` works (a shim of pyenv may not) and is the Python `name`."""
    done = subprocess.run([python, "-c", WHICH], capture_output=True, text=True, check=False)
    return done.stdout.strip() == name


def apt(place: Path, suite: str, *command: str) -> None:
    """Run apt with its own state: it ignores and changes no package of this machine."""
    for name in ("lists/partial", "archives/partial"):
        (place / "apt" / name).mkdir(parents=True, exist_ok=True)
    sources = place / "apt" / "sources.list"
    where = f"[signed-by={KEYRING}] {MIRROR} {suite} main\n"
    sources.write_text(f"deb {where}deb-src {where}")
    (place / "apt" / "status").touch()
    options = {
        "Dir::State": place / "apt",
        "Dir::State::status": place / "apt" / "status",
        "Dir::Cache": place / "apt",
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "-",
        "APT::Sandbox::User": "root",
        "APT::Install-Recommends": "0",
        "APT::Update::Error-Mode": "any",  # else `update` succeeds without a network
    }
    given = [f"-o{key}={value}" for key, value in options.items()]
    done = subprocess.run(
        ["apt-get", "-q", *given, *command], cwd=place, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        reason = next(
            (line for line in done.stderr.splitlines() if line.startswith("E:")), done.stderr
        )
        raise MissingPythonError(f"apt-get {' '.join(command)} from Debian {suite}: {reason}")


def unpacked(name: str) -> Interpreter:
    """Unpack Debian's packages of a Python and their dependencies as the root of a file system."""
    place = PLACE / f"debian-{name}"
    root, suite = place / "root", SUITES[name]
    if not (place / "ready").exists():
        shutil.rmtree(place, ignore_errors=True)
        root.mkdir(parents=True)
        apt(place, suite, "update")
        wanted = (f"python{name}", "base-files", "dash", "coreutils", "libstdc++6", "procps")
        apt(place, suite, "install", "--yes", "--download-only", *wanted)
        for package in sorted((place / "apt/archives").glob("*.deb")):
            subprocess.run(["dpkg", "-x", package, root], check=True)
        for item in ("passwd", "group", "hosts", "nsswitch.conf"):
            shutil.copy(Path("/etc", item), root / "etc")
        (place / "ready").touch()
    return Interpreter(Path("/usr/bin", f"python{name}"), f"Debian {suite}, in {root}", root)


def compiled(name: str) -> Interpreter:
    """Compile a Python without a GIL from Debian's source package."""
    place = PLACE / f"compiled-{name}"
    python = place / "installed" / "bin" / f"python{name}"
    if not (place / "ready").exists():
        shutil.rmtree(place, ignore_errors=True)
        (place / "source").mkdir(parents=True)
        apt(place, SUITES[name], "update")
        apt(place, SUITES[name], "source", "--download-only", f"python{name.removesuffix('t')}")
        (archive,) = place.glob("*.orig.tar.*[!c]")
        with tarfile.open(archive) as sources:
            sources.extractall(place, filter="tar")
        (source,) = [path for path in place.iterdir() if (path / "configure").exists()]
        prefix = f"--prefix={place / 'installed'}"
        for step in (
            ["./configure", "-q", "--disable-gil", "--without-ensurepip", prefix],
            ["make", "-s", f"-j{os.cpu_count()}"],
            ["make", "-s", "install"],
        ):
            with (place / "log").open("a") as log:
                subprocess.run(step, cwd=source, stdout=log, stderr=log, check=True)
        shutil.rmtree(source)
        (place / "ready").touch()
    return Interpreter(python, f"compiled from Debian {SUITES[name]}'s source, in {place}")


# ---- what they need


def requirements(name: str) -> list[str]:
    """Return the dependencies of kvplan and its tests; for `oldest`, the oldest versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    running = project["project"]["dependencies"]
    if name == "oldest":
        running = [item.replace(">=", "==") for item in running]
    testing = [
        value
        for value in [*extras["test"], *extras["prometheus"], *extras["otel"], *extras["ucx"]]
        if not value.startswith(("kvplan", "selenium"))
    ]
    building = project["build-system"]["requires"] if name == FREE_THREADED else []
    return [*running, *testing, *building]


def make_environment(name: str, interpreter: Interpreter) -> Path:
    place = PLACE / f"environment-{name}"
    stamp = place / "ready"
    wanted = requirements(name)
    if stamp.exists() and stamp.read_text() == "\n".join(wanted):
        return place
    shutil.rmtree(place, ignore_errors=True)
    # Several packages have wheels for a Python without a GIL only in some versions.
    binary = ["--prefer-binary"] if name == FREE_THREADED else []
    bare = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}
    if interpreter.root is None:
        # With its own pip: an older pip would install wheels that need a GIL.
        subprocess.run([interpreter.python, "-m", "venv", place], check=True)
        command = [str(place / "bin/python"), "-m", "pip", "install", "-q", *binary, *wanted]
    else:
        (place / "bin").mkdir(parents=True)
        (place / "bin/python").symlink_to(interpreter.python)
        (place / "pyvenv.cfg").write_text(f"home = {interpreter.python.parent}\n")
        target = place / "lib" / f"python{name}" / "site-packages"
        glibcs = ("_2_28", "_2_27", "_2_26", "_2_17", "2014")
        platforms = [f"--platform=manylinux{glibc}_{os.uname().machine}" for glibc in glibcs]
        command = [*PIP, "install", "-q", "--target", str(target), "--only-binary=:all:"]
        # pip would check the version of this Python instead of that one.
        command += ["--ignore-requires-python", "--python-version", name, *platforms, *wanted]
    subprocess.run(command, env=bare, check=True)
    stamp.write_text("\n".join(wanted))
    return place


def copy_tree(name: str) -> Path:
    """Copy the files that git tracks, for a separate build; unchanged files keep their objects."""
    tree = PLACE / f"tree-{name}"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for word in filter(None, listed.stdout.split("\0")):
        source, copy = ROOT / word, tree / word
        if not source.is_file():
            continue
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)
    return tree


if __name__ == "__main__":
    sys.exit(main())
