"""Objects that are accepted as memory, and objects that are refused."""

import copy
import ctypes
import mmap
import pickle
import re
import resource
import threading

import numpy as np
import pytest

import kvplan
from kvplan import CacheDesc, DataType, HostMemory, LLMException, LLMStatusCode, Rows, Transfer
from kvplan.execution.memory import check_lent, take_back, using
from kvplan.transport.local import LocalTransport
from tests.support.foreign import exported_by_numpy
from tests.support.refusals import refused

DESC = CacheDesc(1, (6, 8), DataType.DT_BF16)
PLAN = kvplan.plan(Transfer(Rows(DESC, [0]), Rows(DESC, [3])))


def tensor() -> np.ndarray:
    return np.arange(48, dtype=np.uint16).reshape(6, 8)


class Foreign:
    """A tensor of a library with DLPack 1.0."""

    def __init__(self, array, *, change=None):
        self.array = array
        self.change = change or (lambda tensor: None)

    def __dlpack__(self, *, max_version=None):
        # NumPy before 2.1 does not know the argument; kvplan then omits the argument.
        capsule, _, exported = exported_by_numpy(self.array, max_version)
        self.change(exported)
        return capsule


class OldForeign(Foreign):
    """A tensor of a library from before DLPack 1.0."""

    def __dlpack__(self):
        return super().__dlpack__()


@pytest.mark.parametrize("library", [Foreign, OldForeign])
class TestDLPack:
    def test_a_tensor_is_a_source_and_a_destination(self, library):
        src, dst = tensor(), np.zeros((6, 8), np.uint16)
        kvplan.execute(PLAN, [library(src)], [library(dst)])
        np.testing.assert_array_equal(dst[3], src[0])
        assert not dst[[0, 1, 2, 4, 5]].any()

    def test_bfloat16_is_accepted(self, library):
        """NumPy lacks this type, but the bytes are the same."""

        def to_bfloat16(exported):
            exported.code = 4  # kDLBfloat

        dst = np.zeros((6, 8), np.uint16)
        kvplan.execute(PLAN, [tensor()], [library(dst, change=to_bfloat16)])
        np.testing.assert_array_equal(dst[3], tensor()[0])

    def test_memory_begins_at_the_byte_offset(self, library):
        def skip_a_row(exported):
            exported.byte_offset = 16
            exported.shape[0] = 5

        src = HostMemory.from_arrays([library(tensor(), change=skip_a_row)])
        assert src.nbytes.tolist() == [80]
        dst = np.zeros((6, 8), np.uint16)
        desc = CacheDesc(1, (5, 8), DataType.DT_BF16)
        kvplan.execute(kvplan.plan(Transfer(Rows(desc, [0]), Rows(DESC, [3]))), src, [dst])
        np.testing.assert_array_equal(dst[3], tensor()[1])

    def test_a_tensor_on_a_device_is_refused(self, library):
        def to_cuda(exported):
            exported.device_type = 2

        with refused(LLMStatusCode.LLM_PARAM_INVALID, r"arrays\[0\] is on device cuda:0"):
            HostMemory.from_arrays([library(tensor(), change=to_cuda)])

    @pytest.mark.parametrize("device_type", [1, 3, 11])
    def test_host_memory_is_accepted_pinned_or_not(self, library, device_type):
        def to_host(exported):
            exported.device_type = device_type

        src = HostMemory.from_arrays([library(tensor(), change=to_host)])
        assert src.nbytes.tolist() == [96]

    @pytest.mark.parametrize(
        ("bad", "why"),
        [
            (tensor()[:, ::2], "not C-contiguous; contiguous memory is needed"),
            (tensor().T, r"not C-contiguous; permuted by \(1, 0\) it is, with shape "),
            (tensor()[:0], "is empty"),
        ],
    )
    def test_a_tensor_with_gaps_or_without_bytes_is_refused(self, library, bad, why):
        with pytest.raises(LLMException, match=rf"arrays\[0\] of shape .* {why}"):
            HostMemory.from_arrays([library(bad)])

    def test_strides_of_dimensions_of_length_1_are_ignored(self, library):
        odd = np.lib.stride_tricks.as_strided(tensor(), (1, 48), (6, 2))
        assert HostMemory.from_arrays([library(odd)]).nbytes.tolist() == [96]

    def test_a_tensor_lives_as_long_as_the_memory(self, library):
        memory = HostMemory.from_arrays([library(tensor())])
        found = (ctypes.c_uint16 * 48).from_address(int(memory.addresses[0]))
        assert list(found) == list(range(48))


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="it does not hand out read-only arrays"
)
def test_a_read_only_tensor_is_only_a_source():
    array = tensor()
    array.flags.writeable = False
    memory = HostMemory.from_arrays([Foreign(array)])
    assert not memory.writable
    with pytest.raises(LLMException, match="dst is read-only"):
        kvplan.execute(PLAN, [tensor()], memory)


def test_a_tensor_that_its_library_does_not_export_is_refused():
    class Kept:
        def __dlpack__(self, **_):
            raise RuntimeError("requires grad: detach it")

    with pytest.raises(LLMException, match=r"arrays\[0\]: Kept .*: requires grad: detach it"):
        HostMemory.from_arrays([Kept()])


@pytest.mark.parametrize("dtype", [object, [("key", np.int64), ("value", object)]])
def test_python_objects_are_refused(dtype):
    """A copy of their bytes would make reference counts wrong, and crash the process later."""
    objects = np.zeros(12, dtype)
    with pytest.raises(TypeError, match="references to Python objects"):
        HostMemory.from_arrays([objects])
    with LocalTransport() as transport, pytest.raises(TypeError, match="Python objects"):
        transport.register(objects)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_memory_is_not_copied(duplicate):
    """The addresses of a deep copy would not be those of its arrays."""
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        duplicate(HostMemory.from_arrays([tensor()]))


def test_addresses_are_checked_again_before_each_transfer():
    page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
    memory = HostMemory.from_addresses(DESC, [page.ctypes.data])
    kvplan.execute(PLAN, memory, memory)
    protect = ctypes.CDLL(None).mprotect
    assert protect(ctypes.c_void_p(page.ctypes.data), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    with refused(LLMStatusCode.LLM_PARAM_INVALID, r"tensor 0: .* is not readable"):
        kvplan.execute(PLAN, memory, memory)


def test_addresses_of_a_cache_are_checked_once_before_and_once_after(monkeypatch):
    """Each check reads /proc/self/maps, which takes longer than a small transfer."""
    looked = []
    check_mapped = HostMemory.check_mapped

    def look(memory, *tensors):
        looked.append(memory)
        check_mapped(memory, *tensors)

    monkeypatch.setattr(HostMemory, "check_mapped", look)
    array = tensor()
    cache = kvplan.Cache(DESC, tensor_addrs=(array.ctypes.data,))
    kvplan.execute(PLAN, cache, cache)
    assert len(looked) == 2 * 2
    kvplan.submit(PLAN, cache, cache).wait()
    assert len(looked) == 2 * 4


def test_addresses_with_an_owner_are_not_checked():
    held = mmap.mmap(-1, mmap.PAGESIZE)
    memory = HostMemory.from_addresses(DESC, [np.frombuffer(held).ctypes.data], owner="mine")
    held.close()
    memory.check()


def test_addresses_that_cannot_be_checked_are_refused():
    array = tensor()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(LLMException, match="/proc/self/maps cannot be opened") as caught:
            HostMemory.from_addresses(DESC, [array.ctypes.data])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert caught.value.status_code is LLMStatusCode.LLM_OUT_OF_MEMORY


@pytest.mark.parametrize("bad", [np.zeros((2, 0), np.uint8), np.zeros(3, "V0"), np.zeros(1, "V0")])
def test_an_array_without_bytes_is_refused(bad):
    with pytest.raises(LLMException, match=r"arrays\[0\] of shape .* is empty"):
        HostMemory.from_arrays([bad])


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 0, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)])
def test_the_permutation_that_a_refusal_names_is_contiguous(order):
    array = np.zeros((2, 3, 4, 5), np.float16).transpose(order)
    for given in (array, Foreign(array)):
        with pytest.raises(LLMException, match="permuted by") as caught:
            HostMemory.from_arrays([given])
        axes = re.search(r"permuted by \(([0-9, ]+)\)", str(caught.value))
        assert axes is not None
        turned = array.transpose([int(word) for word in axes[1].split(",")])
        assert HostMemory.from_arrays([turned]).nbytes.tolist() == [240]
        assert f"with shape {turned.shape}" in str(caught.value)


class TestMemoryThatIsTakenBack:
    def test_take_back_waits_for_another_thread(self) -> None:
        memory = HostMemory.from_arrays([tensor()])
        began, goes_on = threading.Event(), threading.Event()
        ended = []

        def use():
            with using(memory):
                began.set()
                assert goes_on.wait(30)
                ended.append("use")

        def take():
            take_back(memory, "its owner needs it")
            ended.append("taken")

        threads = [threading.Thread(target=value) for value in (use, take)]
        threads[0].start()
        assert began.wait(30)
        threads[1].start()
        while memory.revoked is None:
            pass
        with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "its owner needs it"), using(memory):
            pytest.fail("it was taken back before")
        assert not ended
        goes_on.set()
        for thread in threads:
            thread.join()
        assert ended == ["use", "taken"]

    def test_a_use_is_visible_before_it_checks_the_memory(self) -> None:
        looks, is_known = threading.Event(), threading.Event()
        ended = []

        class Looked(HostMemory):
            @property
            def revoked(self):
                found = super().revoked
                if threading.current_thread() is user:
                    looks.set()
                    assert is_known.wait(30)
                elif threading.current_thread() is taker:
                    is_known.set()
                return found

        def use():
            with using(memory):
                ended.append("use")

        def take():
            take_back(memory, "its owner needs it")
            ended.append("taken")

        memory = Looked.from_arrays([tensor()])
        user, taker = threading.Thread(target=use), threading.Thread(target=take)
        user.start()
        assert looks.wait(30)
        taker.start()
        while taker.is_alive() and not is_known.is_set():
            pass
        is_known.set()
        for thread in (user, taker):
            thread.join()
        assert ended == ["use", "taken"]

    def test_the_thread_that_uses_memory_can_take_it_back(self) -> None:
        """A signal handler can do so: the user finds out at its next check."""
        memory = HostMemory.from_arrays([tensor()])
        with using(memory):
            take_back(memory, "its owner needs it")
            with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "its owner needs it"):
                check_lent(memory)

    def test_a_transfer_of_revoked_memory_moves_nothing(self) -> None:
        source, target = tensor(), np.zeros((6, 8), np.uint16)
        memory = HostMemory.from_arrays([target])
        take_back(memory, "its owner needs it")
        with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "its owner needs it; 1 of 1"):
            kvplan.execute(PLAN, [source], memory)
        with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "its owner needs it; 1 of 1"):
            kvplan.submit(PLAN, [source], memory).wait()
        assert not target.any()
