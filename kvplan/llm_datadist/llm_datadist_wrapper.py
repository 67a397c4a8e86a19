"""What the original's Python part reaches its C++ part by: status numbers and functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kvplan.status import LLMException, LLMStatusCode
from kvplan.types import DataType
from kvplan.validation import INT64_MAX

kSuccess = int(LLMStatusCode.LLM_SUCCESS)
kFailed = int(LLMStatusCode.LLM_FAILED)
kParamInvalid = int(LLMStatusCode.LLM_PARAM_INVALID)
kLLMWaitProcessTimeOut = int(LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT)
kLLMKVCacheNotExist = int(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
kLLMRepeatRequest = int(LLMStatusCode.LLM_REPEAT_REQUEST)
kLLMRequestAlreadyCompleted = int(LLMStatusCode.LLM_REQUEST_ALREADY_COMPLETED)
kLLMEngineFinalized = int(LLMStatusCode.LLM_ENGINE_FINALIZED)
kLLMNotYetLink = int(LLMStatusCode.LLM_NOT_YET_LINK)
kAlreadyLink = int(LLMStatusCode.LLM_ALREADY_LINK)
kLinKFailed = int(LLMStatusCode.LLM_LINK_FAILED)
kUnlinkFailed = int(LLMStatusCode.LLM_UNLINK_FAILED)
kNotifyPromptUnlinkFailed = int(LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED)
kLLMClusterNumExceedLimit = int(LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT)
kProcessingLink = int(LLMStatusCode.LLM_PROCESSING_LINK)
kDeviceOutOfMemory = int(LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY)
kPrefixAlreadyExist = int(LLMStatusCode.LLM_PREFIX_ALREADY_EXIST)
kPrefixNotExist = int(LLMStatusCode.LLM_PREFIX_NOT_EXIST)
kLLMSeqLenOverLimit = int(LLMStatusCode.LLM_SEQ_LENOVERLIMIT)
kLLMNoFreeBlock = int(LLMStatusCode.LLM_NO_FREE_BLOCK)
kLLMBlocksOutOfMemory = int(LLMStatusCode.LLM_BLOCKS_OUT_OF_MEMORY)
kLLMExistLink = int(LLMStatusCode.LLM_EXIST_LINK)
kLLMFeatureNotEnabled = int(LLMStatusCode.LLM_FEATURE_NOT_ENABLED)
kLLMTimeout = int(LLMStatusCode.LLM_TIMEOUT)
kLLMLinkBusy = int(LLMStatusCode.LLM_LINK_BUSY)
kLLMOutOfMemory = int(LLMStatusCode.LLM_OUT_OF_MEMORY)
kLLMDeviceMemError = int(LLMStatusCode.LLM_DEVICE_MEM_ERROR)
kLLMSuspectRemoteError = int(LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR)

_STRING_BITS = 128  # the header of a string: where it is, and how long


def calc_tensor_size(shape: Sequence[int], data_type: int) -> int:
    """Return the bytes of a tensor; -1 where it has no size.

    Args:
        shape: its dimensions, each > 0.
        data_type: the number of its type.
    """
    try:
        kind = DataType(data_type)
        bits = _STRING_BITS if kind is DataType.DT_STRING else kind.bits
    except (ValueError, LLMException):
        return -1
    if any(length < 1 for length in shape):
        return -1
    nbytes = -(-math.prod(shape) * bits // 8)
    return nbytes if nbytes <= INT64_MAX else -1


def dict_to_vector(py_dict: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return the pairs of a mapping."""
    return list(py_dict.items())
