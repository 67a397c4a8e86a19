/*
 * The HCCL interface, declared here from the vendor's documents and not from the declarations of the
 * library under test, so that two readings of the documents check each other.
 */
#ifndef KVSIM_HCCL_ABI_H
#define KVSIM_HCCL_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef void *HcclComm;
typedef void *aclrtStream;

typedef enum {
    HCCL_SUCCESS = 0,
    HCCL_E_PARA = 1,
    HCCL_E_PTR = 2,
    HCCL_E_MEMORY = 3,
    HCCL_E_INTERNAL = 4,
    HCCL_E_NOT_SUPPORT = 5,
    HCCL_E_NOT_FOUND = 6,
    HCCL_E_UNAVAIL = 7,
    HCCL_E_SYSCALL = 8,
    HCCL_E_TIMEOUT = 9,
    HCCL_E_OPEN_FILE = 10,
    HCCL_E_TCP_CONNECT = 11,
    HCCL_E_ROCE_CONNECT = 12,
    HCCL_E_TCP_TRANSFER = 13,
    HCCL_E_ROCE_TRANSFER = 14,
    HCCL_E_RUNTIME = 15,
    HCCL_E_DRV = 16,
    HCCL_E_PROFILING = 17,
    HCCL_E_CCE = 18,
    HCCL_E_NETWORK = 19,
    HCCL_E_AGAIN = 20,
    HCCL_E_REMOTE = 21,
    HCCL_E_SUSPENDING = 22,
    HCCL_E_OPRETRY_FAIL = 23,
    HCCL_E_OOM = 24,
    HCCL_E_IN_STATUS = 1041,
} HcclResult;

typedef struct {
    int32_t type; /* HCCL_MEM_DEVICE, HCCL_MEM_HOST */
    void *addr;
    uint64_t size;
} HcclMem;

enum { HCCL_MEM_DEVICE = 0, HCCL_MEM_HOST = 1 };

typedef struct {
    char desc[512];
} HcclMemDesc;

typedef struct {
    HcclMemDesc *array;
    uint32_t arrayLength;
} HcclMemDescs;

typedef struct {
    void *localAddr;
    void *remoteAddr;
    uint64_t count;
    int32_t dataType;
} HcclOneSideOpDesc;

typedef struct {
    int32_t topoType; /* 0: full mesh */
    uint64_t rsvd[3];
} HcclPrepareConfig;

#define HCCL_CONFIG_MAGIC 0xf0f0f0f0u
#define HCCL_CONFIG_VERSION 5u
#define HCCL_CONFIG_SIZE 300u
#define HCCL_NOT_SET 0xffffffffu

/* Version 5 of the record. HCCL_CONFIG_SIZE bytes are valid, and the struct has padding after them. */
typedef struct {
    struct {
        uint64_t size;
        uint32_t magic;
        uint32_t version;
        uint64_t zero;
    } head;
    uint32_t bufferSizeMB;
    uint32_t deterministic;
    char commName[128];
    char udi[128];
    uint32_t opExpansionMode;
    uint32_t rdmaTrafficClass;
    uint32_t rdmaServiceLevel;
} HcclCommConfig5;

_Static_assert(sizeof(HcclMem) == 24 && offsetof(HcclMem, addr) == 8, "HcclMem");
_Static_assert(sizeof(HcclMemDesc) == 512, "HcclMemDesc");
_Static_assert(sizeof(HcclMemDescs) == 16, "HcclMemDescs");
_Static_assert(sizeof(HcclOneSideOpDesc) == 32, "HcclOneSideOpDesc");
_Static_assert(offsetof(HcclOneSideOpDesc, dataType) == 24, "HcclOneSideOpDesc.dataType");
_Static_assert(sizeof(HcclPrepareConfig) == 32, "HcclPrepareConfig");
_Static_assert(offsetof(HcclCommConfig5, bufferSizeMB) == 24, "HcclCommConfig.bufferSizeMB");
_Static_assert(offsetof(HcclCommConfig5, commName) == 32, "HcclCommConfig.commName");
_Static_assert(offsetof(HcclCommConfig5, udi) == 160, "HcclCommConfig.udi");
_Static_assert(offsetof(HcclCommConfig5, opExpansionMode) == 288, "HcclCommConfig.opExpansionMode");
_Static_assert(offsetof(HcclCommConfig5, rdmaServiceLevel) == 296, "HcclCommConfig.rdmaServiceLevel");

#define HCCL_API __attribute__((visibility("default")))

HCCL_API HcclResult HcclCommInitClusterInfoMemConfig(const char *rankTable, uint32_t rank,
                                                     void *config, HcclComm *comm);
HCCL_API HcclResult HcclCommDestroy(HcclComm comm);
HCCL_API HcclResult HcclGetCommAsyncError(HcclComm comm, HcclResult *asyncError);
HCCL_API const char *HcclGetErrorString(HcclResult code);

HCCL_API HcclResult HcclRegisterGlobalMem(const HcclMem *mem, void **memHandle);
HCCL_API HcclResult HcclDeregisterGlobalMem(void *memHandle);
HCCL_API HcclResult HcclCommBindMem(HcclComm comm, void *memHandle);
HCCL_API HcclResult HcclCommUnbindMem(HcclComm comm, void *memHandle);
HCCL_API HcclResult HcclCommPrepare(HcclComm comm, const HcclPrepareConfig *config, int timeout);
HCCL_API HcclResult HcclRemapRegistedMemory(HcclComm *comms, HcclMem *mems, uint64_t numComms,
                                            uint64_t numMems);

HCCL_API HcclResult HcclRegisterMem(HcclComm comm, uint32_t remoteRank, int type, void *addr,
                                    uint64_t size, HcclMemDesc *desc);
HCCL_API HcclResult HcclDeregisterMem(HcclComm comm, HcclMemDesc *desc);
HCCL_API HcclResult HcclExchangeMemDesc(HcclComm comm, uint32_t remoteRank, HcclMemDescs *local,
                                        int timeout, HcclMemDescs *remote, uint32_t *actualNum);
HCCL_API HcclResult HcclEnableMemAccess(HcclComm comm, HcclMemDesc *remoteDesc, HcclMem *remoteMem);
HCCL_API HcclResult HcclDisableMemAccess(HcclComm comm, HcclMemDesc *remoteDesc);

HCCL_API HcclResult HcclBatchPut(HcclComm comm, uint32_t remoteRank, HcclOneSideOpDesc *descs,
                                 uint32_t numDescs, aclrtStream stream);
HCCL_API HcclResult HcclBatchGet(HcclComm comm, uint32_t remoteRank, HcclOneSideOpDesc *descs,
                                 uint32_t numDescs, aclrtStream stream);

#endif
