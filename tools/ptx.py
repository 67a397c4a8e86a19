"""Make kvnative/src/cuda/copy.ptx: the copy kernel as PTX, which the driver of a GPU compiles.

    python tools/ptx.py           write it
    python tools/ptx.py --check   1, and why, where the one in the tree is another

The compiler is NVRTC, a library of NVIDIA's that needs no GPU (requirements/ptx.txt). Whether the
file is that of the sources can be told without NVRTC: its first lines have a hash of the sources,
the options and the compiler's version.
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

# Volta: the first with the memory model that the kernel's fences are from. Every later GPU does,
# too: ptxas of CUDA 13.5 compiles it for sm_75 to sm_100, though not for Volta any more.
ARCHITECTURE = "70"
OPTIONS = [f"--gpu-architecture=compute_{ARCHITECTURE}", "--std=c++17"]
# A driver refuses PTX of a version that came after it (222), and NVRTC writes its own, the newest.
# Here it is that of CUDA 11.2, the oldest driver that kvplan takes: the kernel uses nothing that
# came later, which ptxas checks, for it refuses what the version does not have.
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
    """Return the hash of everything that the result depends on."""
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
    """NVRTC of the installed wheel, of the version that is pinned."""
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
    """What `call` has, whose size `callSize` says."""
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
