"""Make kvnative/src/cuda/copy.ptx: the copy kernel as PTX, which the driver of a GPU compiles.

    python tools/ptx.py           write it
    python tools/ptx.py --check   exit with 1, and the reason, if the file in the tree is outdated

The compiler is NVRTC, a library of NVIDIA that needs no GPU (requirements/ptx.txt). The first
lines of the file have a hash of the sources, the options and the compiler's version, which tests
compare without NVRTC.
"""

import argparse
import ctypes
import hashlib
import re
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "kvnative/src/cuda/copy.cu"
HEADER = ROOT / "kvnative/src/cuda/copy_kernel.h"
RESULT = ROOT / "kvnative/src/cuda/copy.ptx"
PACKAGE = "nvidia-cuda-nvrtc-cu12"
COMPILER = "12.9.86"  # as requirements/ptx.txt pins it

# Volta: the first GPU with the memory model of the kernel's fences. Every later GPU works, too:
# ptxas of CUDA 13.5 compiles the PTX for sm_75 to sm_100, though not for Volta any more.
ARCHITECTURE = "70"
OPTIONS = [f"--gpu-architecture=compute_{ARCHITECTURE}", "--std=c++17"]
# A driver refuses PTX of a version newer than itself (error 222), and NVRTC writes the newest. This
# is the version of CUDA 11.2, the oldest driver that kvplan supports. ptxas checks that the kernel
# uses nothing newer: it refuses features that the version lacks.
VERSION = "7.2"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args()
    ptx = compile_ptx()
    if not given.check:
        RESULT.write_text(ptx)
    elif RESULT.read_text() != ptx:
        raise SystemExit(f"{RESULT} is not what {SOURCE.name} makes: run `make ptx`")


def fingerprint() -> str:
    """Return the hash of all inputs of the result."""
    parts = [COMPILER, VERSION, *OPTIONS, SOURCE.read_text(), HEADER.read_text()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def head() -> str:
    return (
        f"// Made by tools/ptx.py from copy.cu and copy_kernel.h, with {PACKAGE} {COMPILER}.\n"
        f"// sha256 of its sources: {fingerprint()}\n"
    )


def compile_ptx() -> str:
    """Run NVRTC. An error ends the program with the compiler's log."""
    nvrtc = load_nvrtc()
    program = ctypes.c_void_p()
    name = str(HEADER.relative_to(ROOT / "kvnative/src")).encode()
    headers = (ctypes.c_char_p * 1)(HEADER.read_bytes())
    names = (ctypes.c_char_p * 1)(name)
    options = (ctypes.c_char_p * len(OPTIONS))(*(option.encode() for option in OPTIONS))
    check(
        nvrtc,
        "nvrtcCreateProgram",
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), SOURCE.read_bytes(), SOURCE.name.encode(), 1, headers, names
        ),
    )
    code = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if log := text(nvrtc, "nvrtcGetProgramLog", program):
        print(log, file=sys.stderr)
    check(nvrtc, "nvrtcCompileProgram", code)
    ptx = text(nvrtc, "nvrtcGetPTX", program)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    lowered, count = re.subn(r"(?m)^\.version \S+$", f".version {VERSION}", ptx)
    if count != 1:
        raise SystemExit(f"the PTX has {count} lines with .version; 1 was expected")
    return head() + re.sub(r"(?m)^// Compiler Build ID: .*\n", "", lowered).strip() + "\n"


def load_nvrtc() -> ctypes.CDLL:
    """Load NVRTC from the installed wheel, which must have the pinned version."""
    try:
        found = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise SystemExit(f"{PACKAGE} is not installed: make ptx installs it") from None
    if found.version != COMPILER:
        raise SystemExit(f"{PACKAGE} is {found.version}; {COMPILER} is pinned here")
    (library,) = (
        item for item in found.files or () if re.fullmatch(r"libnvrtc\.so\.\d+", item.name)
    )
    nvrtc = ctypes.CDLL(str(found.locate_file(library)))
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    return nvrtc


def text(nvrtc: ctypes.CDLL, call: str, program: ctypes.c_void_p) -> str:
    """Return the text of `call`, whose size `callSize` returns."""
    size = ctypes.c_size_t()
    check(nvrtc, call, getattr(nvrtc, f"{call}Size")(program, ctypes.byref(size)))
    found = ctypes.create_string_buffer(size.value)
    check(nvrtc, call, getattr(nvrtc, call)(program, found))
    return found.value.decode().strip()


def check(nvrtc: ctypes.CDLL, call: str, code: int) -> None:
    if code:
        raise SystemExit(f"{call}: {code} ({nvrtc.nvrtcGetErrorString(code).decode()})")


if __name__ == "__main__":
    main()
