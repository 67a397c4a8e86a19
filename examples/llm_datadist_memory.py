"""Tensors of a program's own, for the pair llm_datadist_*: stands in for torch_npu.

On a machine with Ascend devices they lie in the memory of one, as `torch.zeros(..., device="npu")`
would, and `address` is what its `data_ptr()` is; elsewhere they are arrays of NumPy.
"""

from __future__ import annotations

import numpy as np

from kvplan import LLMException, LLMStatusCode
from kvplan.device.ascend import AscendDevice


class Tensors:
    """A stack of float32 tensors of one shape.

    Args:
        values: what they hold at first, tensor by tensor.
        device_id: where they lie, if there is such a device.
    """

    def __init__(self, values: np.ndarray, device_id: int) -> None:
        self._here = np.array(values, np.float32, order="C")
        self._device: AscendDevice | None = None
        base = self._here.ctypes.data
        try:
            self._device = AscendDevice(device_id)
        except LLMException as error:
            if error.status_code is not LLMStatusCode.LLM_FEATURE_NOT_ENABLED:
                raise
            # There is none: the array is what peers read and write.
        else:
            self._buffer = self._device.allocate(values.nbytes)
            base = self._buffer.address
            self._device.write(base, self._here)
        self._tensor_nbytes = values[0].nbytes
        self.addresses = [base + number * self._tensor_nbytes for number in range(len(values))]

    def write(self, values: np.ndarray, first: int = 0) -> None:
        """Let the tensors from `first` on hold these values."""
        self._here[first : first + len(values)] = values
        if self._device is not None:
            self._device.write(self.addresses[first], self._here[first : first + len(values)])

    def read(self) -> np.ndarray:
        """Return what they hold now."""
        if self._device is not None:
            self._device.read(self.addresses[0], self._here)
        return self._here.copy()

    def close(self) -> None:
        """Release the device; no engine may use the tensors any more."""
        if self._device is not None:
            del self._buffer
            self._device.close()
            self._device = None
