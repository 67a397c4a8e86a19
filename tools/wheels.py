"""Build the wheels of a release for Linux, check them, and try each.

    python tools/wheels.py [--out DIRECTORY] [ARCHITECTURE ...]

zig, itself a wheel, compiles against glibc 2.28 for x86-64 and aarch64, on either. Each wheel is
built from the sdist. auditwheel determines its manylinux tag; then the glibc version that each of
its files needs is read from the file. tools/try_wheel.py uses the wheel in a new environment, out
of reach of this project. A wheel for aarch64 is tried on the emulated machine of `make arm64`, if
that was set up.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "wheels"
GLIBC = (2, 28)
"""The oldest glibc that wheels support: that of RHEL 8, and of NumPy's and pyzmq's wheels."""

ARCHITECTURES = ("x86_64", "aarch64")
PYTHON = (3, 11)
"""The oldest Python that kvplan supports; wheels use its stable ABI."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "dist",
        help="folder of the results; they replace files of the same version",
    )
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE", help="default: both")
    arguments = parser.parse_args()
    wanted = arguments.architectures or ARCHITECTURES
    for item in wanted:
        if item not in ARCHITECTURES:
            parser.error(f"ARCHITECTURE is {item!r}; it must be one of {', '.join(ARCHITECTURES)}")
    if sys.version_info[:2] != PYTHON:
        parser.error(
            f"this is Python {platform.python_version()}; it must be 3.11: its headers count"
        )
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(PLACE, ignore_errors=True)
    print("building the source archive ...", flush=True)
    sdist = make_sdist(out)
    print(f"{sdist.name}: {sdist.stat().st_size:,} bytes", flush=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(PLACE / "source", filter="data")
    (tree,) = (PLACE / "source").iterdir()
    for architecture in wanted:
        print(f"\ncompiling for {architecture}, one to two minutes ...", flush=True)
        wheel = build(tree, architecture, out)
        print(f"{wheel.name}: {wheel.stat().st_size:,} bytes")
        for name, version in needed(wheel):
            print(f"  {name} needs glibc {version[0]}.{version[1]}")
        sys.stdout.flush()
        attempt(wheel, architecture)


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> None:
    """Run a command; show its output only if it fails."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=bare() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(
            f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}"
        )


def bare() -> dict[str, str]:
    """Return the environment variables without those that leak this environment; keep patchelf."""
    hidden = ("PYTHONPATH", "PIP_CONSTRAINT")
    kept = {name: text for name, text in os.environ.items() if name not in hidden}
    return kept | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def show(*command: str | Path, cwd: Path, **variables: str) -> None:
    """Run a command, and show its output."""
    done = subprocess.run(command, cwd=cwd, env=bare() | variables, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}")


def make_sdist(out: Path) -> Path:
    """Build the sdist in `out`; replace files of this version, and keep those of others."""
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", PLACE, ROOT)
    (sdist,) = PLACE.glob("kvplan-*.tar.gz")
    for old in out.glob(sdist.name.removesuffix(".tar.gz") + "[.-]*"):
        old.unlink()
    return Path(shutil.copy(sdist, out))


def build(tree: Path, architecture: str, out: Path) -> Path:
    """Build the wheel with its manylinux tag in `out`, and return its path."""
    place = PLACE / architecture
    zig = f"{sys.executable} -m ziglang"
    target = f"-target {architecture}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    run(
        *(sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", place / "plain"),
        cwd=tree,
        # Python's own flags contain folders of the machine where this Python was built.
        CC=f"{zig} cc {target}",
        LDSHARED=f"{zig} cc {target} -shared",
        AR=f"{zig} ar",
        # By default zig adds checks for undefined behaviour, which a release must not have.
        CFLAGS="-fno-sanitize=all",
        LDFLAGS="-Wl,-s",
        _PYTHON_HOST_PLATFORM=f"linux-{architecture}",
        KVPLAN_LIMITED_API="1",
    )
    (plain,) = (place / "plain").iterdir()
    # auditwheel accepts --plat only for this machine's architecture, so it chooses the tag itself.
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", place / "audited", plain)
    (audited,) = (place / "audited").iterdir()
    found = re.search(rf"-manylinux_(\d+)_(\d+)_{architecture}\.whl$", audited.name)
    if found is None or tuple(map(int, found.groups())) > GLIBC:
        raise SystemExit(f"{audited.name}: more than glibc {GLIBC[0]}.{GLIBC[1]} is needed")
    tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{architecture}"
    run(sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, audited)
    (tagged,) = (place / "audited").iterdir()
    return Path(shutil.copy(tagged, out))


def needed(wheel: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each library of a wheel and the newest glibc that it needs; exit if that is too new."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(text for text in archive.namelist() if text.endswith(".so")):
            versions = glibc_versions(archive.read(name))
            newest = max(versions, default=(2, 0))
            if newest > GLIBC:
                raise SystemExit(f"{wheel.name}: {name} needs glibc {newest}, more than {GLIBC}")
            yield name, newest


def glibc_versions(library: bytes) -> set[tuple[int, ...]]:
    """Return the versions of glibc in a library, like `objdump -T`, for any machine."""
    found = set()
    for section in ELFFile(io.BytesIO(library)).iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for _, versions in section.iter_versions():
                for version in versions:
                    if version.name.startswith("GLIBC_"):
                        found.add(tuple(int(part) for part in version.name[6:].split(".")))
    return found


def attempt(wheel: Path, architecture: str) -> None:
    """Use the wheel in an environment with only the wheel and its dependencies."""
    place = PLACE / architecture / "clean"
    program = shutil.copy(ROOT / "tools" / "try_wheel.py", place.parent)
    if architecture == platform.machine():
        run(sys.executable, "-m", "venv", "--without-pip", place)
        python = place / "bin" / "python"
        run(sys.executable, "-m", "pip", "--python", python, "install", "-q", wheel)
        show(python, "-W", "error", program, cwd=place.parent)
    elif (ROOT / "build/arm64/ready").exists():
        # The environment of the emulated machine already has its dependencies.
        emulated = ROOT / "tools" / "arm64"
        run(emulated, "python", "-m", "pip", "install", "-q", "--no-deps", "--target", place, wheel)
        # Not over `local`: under qemu a process sees a start time that other processes do not.
        tried = ("python", "-W", "error", program, "tcp")
        show(emulated, *tried, cwd=place.parent, PYTHONPATH=str(place))
    else:
        how = "; make arm64-setup emulates one" if architecture == "aarch64" else ""
        print(f"  not tried: this machine is {platform.machine()}{how}")


if __name__ == "__main__":
    main()
