/*
 * The client/server interface of HIXL (cs/hixl_cs.h of 9.1), declared here from the vendor's documents and
 * not from the declarations of the library under test, so that two readings of the documents check each
 * other.
 */
#ifndef KVSIM_HIXL_ABI_H
#define KVSIM_HIXL_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef uint32_t HixlStatus;

#define HIXL_SUCCESS 0u
#define HIXL_PARAM_INVALID 103900u
#define HIXL_TIMEOUT 103901u
#define HIXL_RESOURCE_EXHAUSTED 203900u
#define HIXL_FAILED 503900u

enum { COMM_PROTOCOL_HCCS = 0, COMM_PROTOCOL_ROCE = 1, COMM_PROTOCOL_UBC_CTP = 4,
       COMM_PROTOCOL_UBC_TP = 5, COMM_PROTOCOL_UBOE = 7 };
enum { COMM_ADDR_TYPE_IP_V4 = 0, COMM_ADDR_TYPE_IP_V6 = 1, COMM_ADDR_TYPE_ID = 2, COMM_ADDR_TYPE_EID = 3 };
enum { ENDPOINT_LOC_TYPE_DEVICE = 0, ENDPOINT_LOC_TYPE_HOST = 1 };
enum { COMM_MEM_TYPE_DEVICE = 0, COMM_MEM_TYPE_HOST = 1 };
enum { HIXL_COMPLETE_STATUS_WAITING, HIXL_COMPLETE_STATUS_COMPLETED, HIXL_COMPLETE_STATUS_TIMEOUT,
       HIXL_COMPLETE_STATUS_FAILED };

typedef struct {
    int32_t protocol;
    struct {
        int32_t type;
        uint8_t raws[36];
    } commAddr;
    struct {
        int32_t locType;
        uint32_t devPhyId, superDevId, serverIdx, superPodIdx;
        uint8_t rest[44];
    } loc;
    uint8_t raws[52];
} EndpointDesc;

typedef struct {
    int32_t type;
    void *addr;
    uint64_t size;
} CommMem;

typedef struct {
    const char *global_resource_config;
    uint8_t reserved[120];
} HixlConfig;

typedef struct {
    const EndpointDesc *endpoint_list;
    const char *server_ip;
    uint32_t server_port;
    uint32_t endpoint_list_num;
    uint8_t reserved[104];
} HixlServerDesc;

typedef struct {
    const EndpointDesc *local_endpoint;
    const EndpointDesc *remote_endpoint;
    const char *server_ip;
    uint32_t server_port;
    uint8_t tc, sl;
    uint8_t reserved[98];
} HixlClientDesc;

typedef struct {
    void *remote_buf;
    void *local_buf;
    uint64_t len;
} HixlOneSideOpDesc;

_Static_assert(sizeof(EndpointDesc) == 160 && offsetof(EndpointDesc, loc) == 44, "EndpointDesc");
_Static_assert(sizeof(CommMem) == 24, "CommMem");
_Static_assert(sizeof(HixlConfig) == 128, "HixlServerConfig");
_Static_assert(sizeof(HixlServerDesc) == 128 && offsetof(HixlServerDesc, server_port) == 16, "HixlServerDesc");
_Static_assert(sizeof(HixlClientDesc) == 128 && offsetof(HixlClientDesc, tc) == 28, "HixlClientDesc");
_Static_assert(sizeof(HixlOneSideOpDesc) == 24, "HixlOneSideOpDesc");

#define HIXL_API __attribute__((visibility("default")))

HIXL_API HixlStatus HixlCSServerCreate(const HixlServerDesc *desc, const HixlConfig *config, void **server);
HIXL_API HixlStatus HixlCSServerRegMem(void *server, const char *tag, const CommMem *mem, void **handle);
HIXL_API HixlStatus HixlCSServerListen(void *server, uint32_t backlog);
HIXL_API HixlStatus HixlCSServerUnregMem(void *server, void *handle);
HIXL_API HixlStatus HixlCSServerDestroy(void *server);
HIXL_API HixlStatus HixlCSClientCreate(const HixlClientDesc *desc, const HixlConfig *config, void **client);
HIXL_API HixlStatus HixlCSClientConnect(void *client, uint32_t timeout_ms);
HIXL_API HixlStatus HixlCSClientRegMem(void *client, const char *tag, const CommMem *mem, void **handle);
HIXL_API HixlStatus HixlCSClientUnregMem(void *client, void *handle);
HIXL_API HixlStatus HixlCSClientBatchPutAsync(void *client, uint32_t num, const HixlOneSideOpDesc *list,
                                              void **batch);
HIXL_API HixlStatus HixlCSClientBatchGetAsync(void *client, uint32_t num, const HixlOneSideOpDesc *list,
                                              void **batch);
HIXL_API HixlStatus HixlCSClientBatchPutSync(void *client, uint32_t num, const HixlOneSideOpDesc *list,
                                             uint32_t timeout_ms);
HIXL_API HixlStatus HixlCSClientQueryCompleteStatus(void *client, void *batch, int32_t *status);
HIXL_API HixlStatus HixlCSClientDestroy(void *client);

#endif
