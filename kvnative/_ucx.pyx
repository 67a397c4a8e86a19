"""UCX: its library, found at run time, an engine's end of it, and links to the ends of peers."""

cimport cython
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from kvnative._host cimport kvn_failure, unsigned
from kvnative._native cimport KVN_FAILED, KVN_FOREVER, KVN_INVALID, KVN_OK

import atexit
import math
import os
import threading
import weakref

from kvnative._backend import NativeError

__all__ = ["UcxEnd", "UcxError", "UcxLibrary", "UcxNativeLink", "remove_range"]

# As in the environment; either form is understood.
PREFIX = "UCX_"

cdef dict MODES = {"gathered": KVN_UCX_GATHERED, "one_sided": KVN_UCX_ONE_SIDED}
cdef dict LIBRARIES = {}  # file -> UcxLibrary: a library is never closed
cdef object OPENING = threading.Lock()  # opening may change the environment for a while
cdef object ENDS = weakref.WeakSet()


class UcxError(NativeError):
    """A call of UCX failed, or a link did: the message has what, and UCX's own text.

    Attributes:
        code: the ucs_status_t, or an errno; 0 where neither had a part in it.
        status: one of the KVN_ constants.
    """

    def __init__(self, message, code=0, status=KVN_FAILED):
        super().__init__(message)
        self.code = code
        self.status = status


cdef int check_ucx(int status, const kvn_failure *failure) except -1:
    if status == KVN_OK:
        return 0
    message = failure.message.decode("utf-8", "replace")
    if status == KVN_INVALID and failure.code == 0:
        raise ValueError(message)
    raise UcxError(message, failure.code, status)


def remove_range(ends, slot: int) -> None:
    """As `UcxEnd.remove_range`, of several ends at once, whose sends are waited for together.

    Args:
        ends: 1 to 16, as a sequence.
        slot: of a range that the first holds; another one need not.

    Raises:
        ValueError: so many ends; otherwise as there.
    """
    cdef uint64_t place = unsigned("slot", slot)
    cdef kvn_ucx_serve *all[KVN_UCX_MAX_LANES]
    cdef size_t count = 0
    cdef kvn_failure failure
    cdef int status
    cdef UcxEnd end
    held = tuple(ends)
    if not 1 <= len(held) <= KVN_UCX_MAX_LANES:
        raise ValueError(f"{len(held)} ends: expected 1 to {<int>KVN_UCX_MAX_LANES}")
    for item in held:
        end = <UcxEnd?>item
        end.check_serves()
        all[count] = end.serve
        count += 1
    with nogil:
        status = kvn_ucx_serve_remove_range(all, count, place, &failure)
    check_ucx(status, &failure)


@atexit.register
def close_all():
    """Stop the threads before UCX's own destructors run."""
    for end in list(ENDS):
        end.close()


@cython.final
@cython.auto_pickle(False)
cdef class UcxLibrary:
    """The UCX libraries of this process.

    Attributes:
        path: the file of libucp; another one than was asked for where the process had one before.
        version: (1, 22, 0), say.
    """

    def __init__(self, *args, **kwargs):
        raise TypeError("a UcxLibrary comes from UcxLibrary.load()")

    @staticmethod
    def load(path: str) -> UcxLibrary:
        """Open the library, or return the one that is open.

        Args:
            path: the file of libucp, or its name for the loader's own search.

        Raises:
            UcxError: it cannot be opened, or is older than 1.13; status KVN_UNSUPPORTED.
        """
        cdef kvn_failure failure
        cdef UcxLibrary self = UcxLibrary.__new__(UcxLibrary)
        cdef bytes encoded = os.fsencode(path)
        cdef const char *file = encoded
        cdef int status
        with OPENING:
            known = LIBRARIES.get(path)
            if known is not None:
                return known
            with nogil:
                status = kvn_ucx_library_open(file, &self.library, &failure)
            check_ucx(status, &failure)
            self.path = os.fsdecode(<bytes>self.library.path)
            self.version = tuple(<int>self.library.version[i] for i in range(3))
            LIBRARIES[path] = self
            return self


cdef dict encoded_settings(settings):
    found = {}
    for name, value in settings.items():
        bare = name.removeprefix(PREFIX)
        if not bare or "\0" in name or "\0" in value:
            raise ValueError(f"a setting is {name!r}={value!r}; it must be a name of UCX's, such as"
                             f" UCX_NET_DEVICES, and text")
        found[bare.encode()] = value.encode()
    return found


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class UcxEnd:
    """What an engine has of UCX: a context, a worker and the thread that drives it.

    Making one takes up to 400 ms and does not hold the GIL.

    Args:
        mode: "gathered" or "one_sided"; both ends of a link have the same.
        settings: of UCX, with or without UCX_ before the name; they override the environment.
        name: for UCX's own tools.
        max_ranges: how many slots for ranges there are, 1 to 2**24; of a gathered end.

    Attributes:
        mode: as given.
        address: of the worker; the peer's end makes a link with it.
        transports: what UCX found to use, "tcp/eth0" say.

    Raises:
        ValueError: the mode or a setting is none.
        UcxError: UCX refuses: no device of that name, say.
    """

    def __init__(self, UcxLibrary library not None, *, str mode not None="gathered", settings=(),
                 str name not None="", uint32_t max_ranges=65536):
        cdef kvn_failure failure
        cdef int status
        cdef kvn_ucx_mode number
        cdef size_t nbytes = 0, count
        cdef char transports[512]
        cdef kvn_ucx_setting *array
        cdef bytes label = name.encode()
        cdef const char *title = label
        cdef const char *start
        if self.end is not NULL:
            raise TypeError("a UcxEnd is made once")
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; it must be one of {', '.join(MODES)}")
        given = encoded_settings(dict(settings))
        count = len(given)
        number = MODES[mode]
        self.library = library
        self.mode = mode
        array = <kvn_ucx_setting *>calloc(count + 1, sizeof(kvn_ucx_setting))
        if array is NULL:
            raise MemoryError
        try:
            for i, (key, value) in enumerate(given.items()):
                array[i].name = <const char *>key
                array[i].value = <const char *>value
            with OPENING, nogil:
                status = kvn_ucx_end_create(&library.library, number, array, count, title,
                                            &self.end, &failure)
        finally:
            free(array)
        check_ucx(status, &failure)
        if number == KVN_UCX_GATHERED:
            self.serve = kvn_ucx_serve_create(self.end, max_ranges, &failure)
            if self.serve is NULL:
                check_ucx(failure.status, &failure)
        start = <const char *>kvn_ucx_end_address(self.end, &nbytes)
        self.address = start[:nbytes]
        kvn_ucx_end_transports(self.end, transports, sizeof(transports))
        self.transports = transports.decode("utf-8", "replace")
        ENDS.add(self)

    cdef int check_made(self) except -1:
        if self.end is NULL:
            raise TypeError("the UcxEnd was not made")
        if kvn_ucx_end_is_forked(self.end):
            raise NativeError("UCX does not work in a process forked from the one that opened it:"
                              " start such processes with the method spawn")
        return 0

    @property
    def counters(self) -> dict[str, int]:
        """What has been counted.

        messages, unknown_tokens, malformed, wakeups, rounds, links_failed; of a gathered end also
        pulled_nbytes and pushed_nbytes (by peers), parts (of their pulls), refused (pieces that lay
        in no range that is registered), broken (links failed for what their peer sent), stalled
        (links failed for what their peer did not take).
        """
        cdef kvn_ucx_counters counters
        cdef kvn_ucx_served served
        self.check_made()
        kvn_ucx_end_count(self.end, &counters)
        counted = dict(counters)
        if self.serve is not NULL:
            kvn_ucx_serve_count(self.serve, &served)
            counted.update(served)
        return counted

    cdef int check_serves(self) except -1:
        self.check_made()
        if self.serve is NULL:
            raise ValueError("the end is one-sided: its memory is mapped, not listed in ranges")
        return 0

    def add_range(self, slot: int, address: int, nbytes: int, writable: bool,
                  generation: int) -> None:
        """Let peers read a range of this process's memory, and write to it if `writable`.

        They name it by slot and generation. The memory must be mapped and stay so until
        `remove_range` has returned.

        Raises:
            ValueError: a slot that is out of range or taken, an empty range, or one beyond 2**64;
                the end is one-sided.
        """
        cdef uint64_t place = unsigned("slot", slot), start = unsigned("address", address)
        cdef uint64_t size = unsigned("nbytes", nbytes), number = unsigned("generation", generation)
        cdef bint may_write = writable
        cdef kvn_failure failure
        cdef int status
        self.check_serves()
        with nogil:
            status = kvn_ucx_serve_add_range(self.serve, place, start, size, may_write, number,
                                             &failure)
        check_ucx(status, &failure)

    def remove_range(self, slot: int) -> None:
        """Let peers reach it no more; when this returns, nothing reads or writes it for them.

        Waits for what is being sent of it, at most about half a second; then the links that do not
        take it are failed, and what they were sent is never confirmed.

        Raises:
            ValueError: the slot holds no range; the end is one-sided.
        """
        remove_range((self,), slot)

    def link(self, bytes token not None, bytes peer_address=None) -> UcxNativeLink:
        """Make a link; connect() it before use.

        Args:
            token: 16 bytes that both ends know and nobody else.
            peer_address: of the peer's worker; None: the peer has this one's, and calls.

        Raises:
            ValueError: the token has another length or is in use; the address is empty or too long.
            UcxError: the end is closed.
        """
        self.check_made()
        if len(token) != KVN_UCX_TOKEN_NBYTES:
            raise ValueError(f"token has {len(token)} bytes; it must have {KVN_UCX_TOKEN_NBYTES}")
        if peer_address is not None and not peer_address:
            raise ValueError("peer_address is empty; it must be None or a worker's address")
        return UcxNativeLink.of(self, token, peer_address)

    def close(self) -> None:
        """Fail its links, telling the peers, and stop its thread. Idempotent.

        Nothing happens in a forked child.
        """
        if self.end is not NULL:
            with nogil:
                kvn_ucx_end_close(self.end)

    def __dealloc__(self):
        if self.end is not NULL:
            with nogil:
                kvn_ucx_end_close(self.end)
                kvn_ucx_end_release(self.end)


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class UcxNativeLink:
    """A link to a peer's end; made by UcxEnd.link(), closed with the last reference to it.

    Attributes:
        end: this side's.
    """

    def __init__(self, *args, **kwargs):
        raise TypeError("a UcxNativeLink comes from UcxEnd.link()")

    @staticmethod
    cdef UcxNativeLink of(UcxEnd end, bytes token, bytes peer_address):
        cdef kvn_failure failure
        cdef UcxNativeLink self = UcxNativeLink.__new__(UcxNativeLink)
        cdef const uint8_t *word = token
        cdef const char *address = NULL
        cdef size_t nbytes = 0
        cdef int status
        if peer_address is not None:
            address = peer_address
            nbytes = len(peer_address)
        self.end = end
        with nogil:
            status = kvn_ucx_link_create(end.end, word, address, nbytes, &self.link, &failure)
        check_ucx(status, &failure)
        return self

    cdef int check_made(self) except -1:
        if self.link is NULL:
            raise TypeError("the UcxNativeLink was not made")
        return self.end.check_made()

    def connect(self, timeout_ms: float) -> None:
        """Return when the peer has answered.

        Raises:
            UcxError: KVN_TIMEOUT: it has not within the time, and connect() may be called again;
                another status: the link has failed.
        """
        cdef kvn_failure failure
        cdef int64_t deadline = KVN_FOREVER
        cdef int status
        self.check_made()
        if not timeout_ms > 0:
            raise ValueError(f"timeout_ms is {timeout_ms:g}; it must be > 0")
        if not math.isinf(timeout_ms):
            deadline = kvn_now_ns() + <int64_t>(min(timeout_ms, 1e12) * 1e6)
        with nogil:
            status = kvn_ucx_link_connect(self.link, deadline, &failure)
        check_ucx(status, &failure)

    @property
    def connected(self) -> bool:
        """The peer has answered, and the link has not failed."""
        self.check_made()
        return kvn_ucx_link_is_connected(self.link)

    @property
    def failure(self) -> tuple[int, str] | None:
        """Status and reason once it has failed; close() is a failure too (KVN_CANCELLED)."""
        cdef kvn_failure why
        self.check_made()
        if not kvn_ucx_link_has_failed(self.link, &why):
            return None
        return why.status, why.message.decode("utf-8", "replace")

    @property
    def death_fd(self) -> int:
        """A file that becomes readable when the link fails. The link's: duplicate it to keep it."""
        self.check_made()
        return kvn_ucx_link_death_fd(self.link)

    @property
    def way(self) -> str:
        """"gathered over tcp/eth0"; "gathered" before it is connected."""
        cdef char way[128]
        self.check_made()
        kvn_ucx_link_way(self.link, way, sizeof(way))
        name = self.end.mode.replace("_", "-")
        return f"{name} over {way.decode()}" if way[0] else name

    def close(self, str reason not None="the link was closed") -> None:
        """Tell the peer, and fail with that reason. Idempotent."""
        cdef bytes text = reason.encode()
        cdef const char *why = text
        self.check_made()
        with nogil:
            kvn_ucx_link_close(self.link, why)

    def __dealloc__(self):
        if self.link is not NULL and not kvn_ucx_end_is_forked(self.end.end):
            with nogil:
                kvn_ucx_link_close(self.link, "the link was dropped")
                kvn_ucx_link_release(self.link)
