/* The parts of UCX (libucp, libucs) that kvplan uses. The declarations are kvplan's own, so that building needs no
 * files of UCX. The library is found and opened at run time.
 *
 * Layouts are those of API 1.13 on 64-bit Linux. Later releases append fields, and the mask of a structure says which
 * fields it has, so one build works with all releases. Names are UCX's with the prefix kvn_, so that its documentation
 * can be looked up. */
#ifndef KVNATIVE_UCX_H
#define KVNATIVE_UCX_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/socket.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVN_UCP_API_MAJOR 1
#define KVN_UCP_API_MINOR 13

typedef int8_t kvn_ucs_status; /* ucs_status_t is a packed enum of one byte */
typedef struct kvn_ucp_context *kvn_ucp_context_h;
typedef struct kvn_ucp_config kvn_ucp_config;
typedef struct kvn_ucp_worker *kvn_ucp_worker_h;
typedef struct kvn_ucp_ep *kvn_ucp_ep_h;
typedef struct kvn_ucp_mem *kvn_ucp_mem_h;
typedef struct kvn_ucp_rkey *kvn_ucp_rkey_h;
typedef struct kvn_ucp_address kvn_ucp_address;
/* NULL: done. KVN_UCS_IS_ERROR: an error. Else a request; free it after its callback. */
typedef void *kvn_ucs_status_ptr;

/* The values of ucs_status_t with special treatment. */
enum {
    KVN_UCS_OK = 0,
    KVN_UCS_INPROGRESS = 1,
    KVN_UCS_ERR_NO_RESOURCE = -2,
    KVN_UCS_ERR_NO_MEMORY = -4,
    KVN_UCS_ERR_INVALID_PARAM = -5,
    KVN_UCS_ERR_UNREACHABLE = -6,
    KVN_UCS_ERR_INVALID_ADDR = -7,
    KVN_UCS_ERR_CANCELED = -16,
    KVN_UCS_ERR_TIMED_OUT = -20,
    KVN_UCS_ERR_UNSUPPORTED = -22,
    KVN_UCS_ERR_REJECTED = -23,
    KVN_UCS_ERR_NOT_CONNECTED = -24,
    KVN_UCS_ERR_CONNECTION_RESET = -25,
    KVN_UCS_ERR_ENDPOINT_TIMEOUT = -80,
    KVN_UCS_ERR_LAST = -100
};

#define KVN_UCS_IS_ERROR(pointer) ((uintptr_t)(pointer) >= (uintptr_t)(intptr_t)KVN_UCS_ERR_LAST)
#define KVN_UCS_POINTER_STATUS(pointer) ((kvn_ucs_status)(intptr_t)(pointer))

/* ucp_params, ucp_feature */
enum {
    KVN_UCP_PARAM_FEATURES = 1 << 0,
    KVN_UCP_PARAM_MT_WORKERS_SHARED = 1 << 5,
    KVN_UCP_PARAM_NAME = 1 << 8
};
enum { KVN_UCP_FEATURE_RMA = 1 << 1, KVN_UCP_FEATURE_WAKEUP = 1 << 4 };

typedef struct kvn_ucp_params {
    uint64_t field_mask;
    uint64_t features;
    size_t request_size;
    void (*request_init)(void *request);
    void (*request_cleanup)(void *request);
    uint64_t tag_sender_mask;
    int mt_workers_shared;
    size_t estimated_num_eps;
    size_t estimated_num_ppn;
    const char *name;
} kvn_ucp_params;

/* ucp_worker_params; ucs_thread_mode_t */
enum { KVN_UCP_WORKER_PARAM_THREAD_MODE = 1 << 0, KVN_UCP_WORKER_PARAM_FLAGS = 1 << 5 };
enum { KVN_UCS_THREAD_MODE_SERIALIZED = 1 };
enum { KVN_UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK = 1 << 0 };

typedef struct kvn_ucp_worker_params {
    uint64_t field_mask;
    int thread_mode;
    unsigned long cpu_mask[16]; /* ucs_cpu_set_t */
    unsigned events;
    void *user_data;
    int event_fd;
    uint64_t flags;
    const char *name;
    size_t am_alignment;
    uint64_t client_id;
} kvn_ucp_worker_params;

/* ucp_ep_params; ucs_sock_addr_t; ucp_err_handler_t */
enum {
    KVN_UCP_EP_PARAM_REMOTE_ADDRESS = 1 << 0,
    KVN_UCP_EP_PARAM_ERR_HANDLING_MODE = 1 << 1,
    KVN_UCP_EP_PARAM_ERR_HANDLER = 1 << 2
};
enum { KVN_UCP_ERR_HANDLING_MODE_NONE = 0, KVN_UCP_ERR_HANDLING_MODE_PEER = 1 };

typedef struct kvn_ucs_sock_addr {
    const void *addr;
    uint32_t addrlen;
} kvn_ucs_sock_addr;

typedef void (*kvn_ucp_err_handler_cb)(void *arg, kvn_ucp_ep_h ep, kvn_ucs_status status);

typedef struct kvn_ucp_err_handler {
    kvn_ucp_err_handler_cb cb;
    void *arg;
} kvn_ucp_err_handler;

typedef struct kvn_ucp_ep_params {
    uint64_t field_mask;
    const kvn_ucp_address *address;
    int err_mode;
    kvn_ucp_err_handler err_handler;
    void *user_data;
    unsigned flags;
    kvn_ucs_sock_addr sockaddr;
    void *conn_request;
    const char *name;
    kvn_ucs_sock_addr local_sockaddr;
} kvn_ucp_ep_params;

/* ucp_ep_attr; ucp_transport_entry_t; ucp_transports_t. UCX fills in transports since 1.14, and has one more field after
 * them since 1.18. */
enum { KVN_UCP_EP_ATTR_TRANSPORTS = 1 << 3 };

typedef struct kvn_ucp_transport_entry {
    const char *transport_name;
    const char *device_name;
} kvn_ucp_transport_entry;

typedef struct kvn_ucp_transports {
    kvn_ucp_transport_entry *entries;
    unsigned num_entries;
    size_t entry_size;
} kvn_ucp_transports;

typedef struct kvn_ucp_ep_attr {
    uint64_t field_mask;
    char name[32];
    struct sockaddr_storage local_sockaddr;
    struct sockaddr_storage remote_sockaddr;
    kvn_ucp_transports transports;
} kvn_ucp_ep_attr;

/* ucp_mem_map_params; ucs_memory_type_t */
enum {
    KVN_UCP_MEM_MAP_PARAM_ADDRESS = 1 << 0,
    KVN_UCP_MEM_MAP_PARAM_LENGTH = 1 << 1,
    KVN_UCP_MEM_MAP_PARAM_MEMORY_TYPE = 1 << 4
};
enum {
    KVN_UCS_MEMORY_HOST = 0,
    KVN_UCS_MEMORY_CUDA = 1
};

typedef struct kvn_ucp_mem_map_params {
    uint64_t field_mask;
    void *address;
    size_t length;
    unsigned flags;
    unsigned prot;
    int memory_type;
} kvn_ucp_mem_map_params;

/* ucp_request_param_t; ucp_op_attr_t. UCX has more fields after `memh` since 1.22. */
enum {
    KVN_UCP_OP_ATTR_CALLBACK = 1 << 1,
    KVN_UCP_OP_ATTR_USER_DATA = 1 << 2,
    KVN_UCP_OP_ATTR_FLAGS = 1 << 4,
    KVN_UCP_OP_ATTR_MEMORY_TYPE = 1 << 6,
    KVN_UCP_OP_ATTR_MEMH = 1 << 8,
    KVN_UCP_OP_ATTR_MULTI_SEND = 1 << 19
};
enum { KVN_UCP_EP_CLOSE_FLAG_FORCE = 1 << 0 };
typedef void (*kvn_ucp_send_nbx_callback)(void *request, kvn_ucs_status status, void *user_data);

typedef struct kvn_ucp_request_param {
    uint32_t op_attr_mask;
    uint32_t flags;
    void *request;
    kvn_ucp_send_nbx_callback send; /* a union of callbacks in UCX */
    uint64_t datatype;
    void *user_data;
    void *reply_buffer;
    int memory_type;
    void *recv_info;
    kvn_ucp_mem_h memh;
} kvn_ucp_request_param;

/* ucs_log_func_t: RC_STOP hides a message from UCX's own handler, which would print it; ucs_log_level_t. */
enum { KVN_UCS_LOG_STOP = 0, KVN_UCS_LOG_CONTINUE = 1 };
enum { KVN_UCS_LOG_LEVEL_FATAL = 0, KVN_UCS_LOG_LEVEL_ERROR = 1 };

typedef int (*kvn_ucs_log_func)(const char *file, unsigned line, const char *function, int level,
                                const void *component, const char *format, va_list arguments);

/* X(result, name, parameters): calls that every supported version has. */
#define KVN_UCP_REQUIRED(X)                                                                        \
    X(void, ucp_get_version, (unsigned *major, unsigned *minor, unsigned *release))                \
    X(kvn_ucs_status, ucp_config_read,                                                             \
      (const char *env_prefix, const char *filename, kvn_ucp_config **out))                        \
    X(void, ucp_config_release, (kvn_ucp_config * config))                                         \
    X(kvn_ucs_status, ucp_config_modify,                                                           \
      (kvn_ucp_config * config, const char *name, const char *value))                              \
    X(kvn_ucs_status, ucp_init_version,                                                            \
      (unsigned api_major, unsigned api_minor, const kvn_ucp_params *params,                       \
       const kvn_ucp_config *config, kvn_ucp_context_h *out))                                      \
    X(void, ucp_cleanup, (kvn_ucp_context_h context))                                              \
    X(void, ucp_context_print_info, (kvn_ucp_context_h context, FILE * stream))                    \
    X(kvn_ucs_status, ucp_worker_create,                                                           \
      (kvn_ucp_context_h context, const kvn_ucp_worker_params *params, kvn_ucp_worker_h *out))     \
    X(void, ucp_worker_destroy, (kvn_ucp_worker_h worker))                                         \
    X(kvn_ucs_status, ucp_worker_get_address,                                                      \
      (kvn_ucp_worker_h worker, kvn_ucp_address * *address, size_t *nbytes))                       \
    X(void, ucp_worker_release_address, (kvn_ucp_worker_h worker, kvn_ucp_address * address))      \
    X(unsigned, ucp_worker_progress, (kvn_ucp_worker_h worker))                                    \
    X(kvn_ucs_status, ucp_worker_get_efd, (kvn_ucp_worker_h worker, int *fd))                      \
    X(kvn_ucs_status, ucp_worker_arm, (kvn_ucp_worker_h worker))                                   \
    X(kvn_ucs_status, ucp_ep_create,                                                               \
      (kvn_ucp_worker_h worker, const kvn_ucp_ep_params *params, kvn_ucp_ep_h *out))               \
    X(kvn_ucs_status_ptr, ucp_ep_close_nbx, (kvn_ucp_ep_h ep, const kvn_ucp_request_param *param)) \
    X(kvn_ucs_status_ptr, ucp_ep_flush_nbx, (kvn_ucp_ep_h ep, const kvn_ucp_request_param *param)) \
    X(void, ucp_ep_print_info, (kvn_ucp_ep_h ep, FILE * stream))                                   \
    X(kvn_ucs_status, ucp_ep_query, (kvn_ucp_ep_h ep, kvn_ucp_ep_attr * attributes))               \
    X(kvn_ucs_status, ucp_mem_map,                                                                 \
      (kvn_ucp_context_h context, const kvn_ucp_mem_map_params *params, kvn_ucp_mem_h *out))       \
    X(kvn_ucs_status, ucp_mem_unmap, (kvn_ucp_context_h context, kvn_ucp_mem_h memory))            \
    X(kvn_ucs_status, ucp_rkey_pack,                                                               \
      (kvn_ucp_context_h context, kvn_ucp_mem_h memory, void **out, size_t *nbytes))               \
    X(void, ucp_rkey_buffer_release, (void *packed))                                               \
    X(kvn_ucs_status, ucp_ep_rkey_unpack,                                                          \
      (kvn_ucp_ep_h ep, const void *packed, kvn_ucp_rkey_h *out))                                  \
    X(void, ucp_rkey_destroy, (kvn_ucp_rkey_h rkey))                                               \
    X(kvn_ucs_status_ptr, ucp_get_nbx,                                                             \
      (kvn_ucp_ep_h ep, void *buffer, size_t count, uint64_t remote, kvn_ucp_rkey_h rkey,          \
       const kvn_ucp_request_param *param))                                                        \
    X(kvn_ucs_status_ptr, ucp_put_nbx,                                                             \
      (kvn_ucp_ep_h ep, const void *buffer, size_t count, uint64_t remote, kvn_ucp_rkey_h rkey,    \
       const kvn_ucp_request_param *param))                                                        \
    X(void, ucp_request_free, (void *request))

/* Calls of libucs, which UCX installs with libucp. */
#define KVN_UCS_REQUIRED(X)                                          \
    X(const char *, ucs_status_string, (kvn_ucs_status status))      \
    X(void, ucs_log_push_handler, (kvn_ucs_log_func handler))

/* The calls, as found in the libraries. */
typedef struct kvn_ucx {
#define KVN_UCX_FIELD(result, name, parameters) result(*name) parameters;
    KVN_UCP_REQUIRED(KVN_UCX_FIELD)
    KVN_UCS_REQUIRED(KVN_UCX_FIELD)
#undef KVN_UCX_FIELD
} kvn_ucx;

#ifdef __cplusplus
}
#endif
#endif
