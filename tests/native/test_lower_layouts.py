"""A third layout is one more row of the table in lower.c: add one, compile, and lower with it."""

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "kvnative/src/core/lower.c"
TABLE = "static const kvn_layout layouts[] = {\n"
# The two ranges of a process_vm_readv call as pairs of struct iovec.
IOVEC_ROW = """    {"iovec", "T{Q:local:Q:local_nbytes:Q:remote:Q:remote_nbytes:}", KVN_ROWS, 4,
     {KVN_LOCAL, KVN_NBYTES, KVN_REMOTE, KVN_NBYTES}, 0},
"""
LOCAL_SRC = 1


class Recipe(ctypes.Structure):
    """kvn_recipe of lower.h."""

    _fields_ = (
        ("src_offsets", ctypes.c_void_p),
        ("dst_offsets", ctypes.c_void_p),
        ("nbytes", ctypes.c_void_p),
        ("num_segments", ctypes.c_size_t),
        ("src_bases", ctypes.c_void_p),
        ("dst_bases", ctypes.c_void_p),
        ("num_pairs", ctypes.c_size_t),
    )


pytestmark = pytest.mark.skipif(not SOURCE.exists(), reason="an installed tree has no C sources")


@pytest.fixture
def with_iovec(tmp_path: Path) -> ctypes.CDLL:
    compiler = shutil.which("cc")
    assert compiler, "the native layer is built with cc"
    before = SOURCE.read_text()
    assert before.count(TABLE) == 1
    (tmp_path / "lower.c").write_text(before.replace(TABLE, TABLE + IOVEC_ROW))
    library = tmp_path / "lower.so"
    flags = ["-std=c11", "-D_GNU_SOURCE", "-shared", "-fPIC"]
    includes = [f"-I{ROOT / 'include'}", f"-I{SOURCE.parents[1]}"]
    files = [str(tmp_path / "lower.c"), "-o", str(library)]
    subprocess.run([compiler, *flags, *includes, *files], check=True)
    return ctypes.CDLL(str(library))


def test_a_third_layout_is_one_row(with_iovec: ctypes.CDLL) -> None:
    with_iovec.kvn_layout_named.restype = ctypes.c_void_p
    layout = ctypes.c_void_p(with_iovec.kvn_layout_named(b"iovec"))
    columns = [np.array(values, dtype=np.uint64) for values in ([1, 2], [10, 20], [3, 4])]
    bases = [np.array(values, dtype=np.uint64) for values in ([1000, 2000], [7000, 8000])]
    addresses = [array.ctypes.data for array in (*columns, *bases)]
    recipe = Recipe(*addresses[:3], 2, *addresses[3:], 2)
    array_nbytes = ctypes.c_size_t()
    two = ctypes.c_size_t(2)
    assert with_iovec.kvn_lower_nbytes(layout, two, two, ctypes.byref(array_nbytes)) == 0
    out = ctypes.create_string_buffer(array_nbytes.value)
    with_iovec.kvn_lower(ctypes.byref(recipe), layout, LOCAL_SRC, out)
    assert list(struct.iter_unpack("4Q", out.raw)) == [
        (1001, 3, 7010, 3),
        (1002, 4, 7020, 4),
        (2001, 3, 8010, 3),
        (2002, 4, 8020, 4),
    ]
