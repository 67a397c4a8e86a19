"""The numbers of the data types."""

from kvplan.types import DataType

DT_FLOAT = int(DataType.DT_FLOAT)
DT_FLOAT16 = int(DataType.DT_FLOAT16)
DT_BF16 = int(DataType.DT_BF16)
DT_INT8 = int(DataType.DT_INT8)
DT_INT16 = int(DataType.DT_INT16)
DT_UINT16 = int(DataType.DT_UINT16)
DT_UINT8 = int(DataType.DT_UINT8)
DT_INT32 = int(DataType.DT_INT32)
DT_INT64 = int(DataType.DT_INT64)
DT_UINT32 = int(DataType.DT_UINT32)
DT_UINT64 = int(DataType.DT_UINT64)
DT_BOOL = int(DataType.DT_BOOL)
DT_DOUBLE = int(DataType.DT_DOUBLE)
DT_STRING = int(DataType.DT_STRING)
