from typing import Literal, Never, final

import numpy as np
from numpy.typing import NDArray

from kvnative._acl import AclLibrary, Device
from kvnative._backend import Backend, NativeError

__all__ = [
    "MAX_GUARDS",
    "Communicator",
    "Guards",
    "HcclError",
    "HcclLibrary",
    "Region",
    "Staging",
]

# Most words that one `Guards` holds.
MAX_GUARDS: int

# A call of HCCL (or of ACL, made for it) failed. `code` is the HcclResult (or aclError), 0 where no
# call was made; `status` one of the KVN_ constants. The message has the call, the code, its name and
# the vendor's text.
class HcclError(NativeError):
    code: int
    status: int

@final
class HcclLibrary:
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    # None: libhcomm.so, then libhccl.so, beside the ACL library that was loaded, below ASCEND_HOME
    # and by the loader. One object per path. HcclError lists every place that was tried.
    @staticmethod
    def load(acl: AclLibrary, path: str | None = None) -> HcclLibrary: ...
    @property
    def acl(self) -> AclLibrary: ...
    @property
    def path(self) -> str: ...
    # Optional symbols that it lacks.
    @property
    def missing(self) -> tuple[str, ...]: ...
    # "global": memory is registered once and bound to communicators (A2, A3). "per_comm": it is
    # registered with each communicator and descriptions are exchanged in prepare (950). The classes
    # below are used alike.
    @property
    def generation(self) -> Literal["global", "per_comm"]: ...

# [address, address + nbytes) of `device`'s memory, or pinned host memory with on_device=False, known
# to HCCL. ValueError where it overlaps a region of that device which is not closed.
@final
class Region:
    def __init__(
        self,
        library: HcclLibrary,
        device: Device,
        address: int,
        nbytes: int,
        *,
        on_device: bool,
        owner: object = None,  # kept alive as long as the region: the DeviceBuffer or Pinned
    ) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def on_device(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    # HcclError (KVN_INVALID) while it is bound to a communicator; idempotent.
    def close(self) -> None: ...

# The words of the peer's board that say whether its ranges are still registered: `addresses` are
# remote ones (8 bytes each, inside one region that the peer has bound), `expected` what must be
# there. Both are copied. A transfer with guards reads the words after its data, in stream order, and
# ends with KVN_UNMAPPED, nothing confirmed, `code` 0, where one differs; the message says which
# (index, address, word, expected). Costs one HcclBatchGet for each `max_batch` words.
@final
class Guards:
    def __init__(self, addresses: NDArray[np.uint64], expected: NDArray[np.uint64]) -> None: ...
    def __len__(self) -> int: ...

# Device memory through which local memory goes that HCCL cannot use itself: host memory, or device
# memory that is not bound to the communicator. Make one per engine and bind `region` to every
# communicator, before its prepare. `lanes` transfers at a time may use it, each with `slots` slots of
# `slot_nbytes`; others wait for a lane (a deadline ends the waiting too). nbytes = lanes * slots *
# slot_nbytes.
@final
class Staging:
    def __init__(
        self,
        library: HcclLibrary,
        device: Device,
        *,
        slot_nbytes: int = 4 << 20,
        slots: int = 4,
        lanes: int = 2,
    ) -> None: ...
    @property
    def region(self) -> Region: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def slot_nbytes(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def lanes(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    # HcclError while a communicator is bound to it or a transfer uses it; idempotent.
    def close(self) -> None: ...

# One connection to one peer: two ranks, one channel (stream and thread). Its order of calls:
# bind... -> prepare -> backend... -> close.
@final
class Communicator:
    # Both ends give the same rank_table and name. Initialization is serialized in the process.
    # traffic_class, service_level: None leaves them to HCCL. max_batch: descriptors of one
    # HcclBatchPut/Get: 256 on A2 and A3, 64 on 950.
    def __init__(
        self,
        library: HcclLibrary,
        device: Device,
        rank_table: str,
        rank: int,
        remote_rank: int,
        name: str,
        *,
        traffic_class: int | None = None,
        service_level: int | None = None,
        max_batch: int = 256,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def remote_rank(self) -> int: ...
    # "open" (may bind), "preparing", "ready", "failed" (prepare failed: close it), "closed".
    @property
    def state(self) -> Literal["open", "preparing", "ready", "failed", "closed"]: ...
    # Whether an operation failed in HCCL or was aborted: better make a new communicator.
    @property
    def disturbed(self) -> bool: ...
    @property
    def regions(self) -> tuple[Region, ...]: ...
    # Only before prepare: HcclError (KVN_INVALID) afterwards.
    def bind(self, region: Region) -> None: ...
    # Any time, before the region is closed; waits for a prepare, not for transfers. A peer that uses the
    # region nevertheless fails, or on some links does not notice: that is what guards are for.
    def unbind(self, region: Region) -> None: ...
    # Blocks until the peer has come too; without the GIL. HCCL takes whole seconds: rounded up, at
    # least 1. HcclError with KVN_TIMEOUT when the peer did not come; the communicator is "failed".
    def prepare(self, timeout_ms: float) -> None: ...
    # A backend over this connection: descriptors' remote side in the peer's bound regions (each in
    # one region), local side in regions bound here; with `staging`, anywhere in `local`'s kind of
    # memory. It may outlive the communicator: batches are then refused (KVN_FAILED).
    def backend(
        self,
        direction: Literal["get", "put"],
        guards: Guards | None = None,
        staging: Staging | None = None,
        local: Literal["device", "host"] = "device",
    ) -> Backend: ...
    # Gives the peer up, without waiting: what is queued and running ends at once with KVN_PEER_GONE
    # and the message, and so does whatever is submitted later. `close` then does not wait long.
    def cancel(self, message: str) -> None: ...
    # (HcclResult, its text); (0, "") where nothing is wrong or there is no connection.
    def async_error(self) -> tuple[int, str]: ...
    # Unbinds, destroys. Waits for transfers in flight (cancel them first). Idempotent. While another
    # thread is in prepare it returns at once, and that thread closes when prepare returns.
    def close(self) -> None: ...
