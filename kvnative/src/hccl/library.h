/* The HCCL or HIXL library of this process, which is found next to ACL's: its calls, and descriptions of its errors.
 * The library is never closed, because its threads outlive the last user. */
#ifndef KVN_HCCL_LIBRARY_H
#define KVN_HCCL_LIBRARY_H

#include <pthread.h>
#include <stdbool.h>

#include "acl/library.h"
#include "kvnative/hixl.h"

/* Time that the vendor's engine waits after an abort on A3, whose AICPU continues with operations that it has
 * unfolded. */
#define KVN_HCCL_UNFOLD_MS 100
/* HCCL's maximum number of ranges in a process, and of a communicator. */
#define KVN_HCCL_MAX_REGIONS 256

typedef struct kvn_hccl_calls {
    kvn_hccl_init_fn init;
    kvn_hccl_destroy_fn destroy;
    kvn_hccl_batch_fn put;
    kvn_hccl_batch_fn get;
    /* Optional from here: NULL if the library lacks the call. */
    kvn_hccl_async_error_fn async_error;
    kvn_hccl_error_string_fn error_string;
    /* Memory that is registered once. */
    kvn_hccl_register_global_fn register_global;
    kvn_hccl_deregister_global_fn deregister_global;
    kvn_hccl_bind_fn bind;
    kvn_hccl_bind_fn unbind;
    kvn_hccl_prepare_fn prepare;
    /* Memory that is registered with each communicator. */
    kvn_hccl_register_fn register_memory;
    kvn_hccl_forget_fn deregister_memory;
    kvn_hccl_exchange_fn exchange;
    kvn_hccl_enable_fn enable;
    kvn_hccl_forget_fn disable;
} kvn_hccl_calls;

/* Calls of HIXL's client/server interface, all required. */
typedef struct kvn_hixl_calls {
    kvn_hixl_server_create_fn server_create;
    kvn_hixl_listen_fn server_listen;
    kvn_hixl_register_fn server_register;
    kvn_hixl_unregister_fn server_unregister;
    kvn_hixl_destroy_fn server_destroy;
    kvn_hixl_client_create_fn client_create;
    kvn_hixl_register_fn client_register;
    kvn_hixl_unregister_fn client_unregister;
    kvn_hixl_connect_fn connect;
    kvn_hixl_batch_fn put;
    kvn_hixl_batch_fn get;
    kvn_hixl_query_fn query;
    kvn_hixl_destroy_fn client_destroy;
    void *newest; /* never called: 9.0 lacks it */
} kvn_hixl_calls;

typedef struct kvn_region kvn_region;
struct kvn_words_page;
struct kvn_hixl_server;

/* One per process and path; it must stay in place. */
typedef struct kvn_hccl {
    kvn_hccl_calls calls; /* without those of communicators if `is_client_server` */
    kvn_hixl_calls hixl;
    bool is_client_server; /* HIXL's library instead of HCCL's: servers and clients are the connections */
    const kvn_acl *acl;   /* for the vendor's texts, which HCCL leaves there */
    bool is_per_comm;     /* memory is registered with each communicator */
    uint32_t unfold_ms;   /* time for which operations may continue after an abort of their stream */
    char driver[32];      /* version of the HDK, such as "25.5.0"; "": unknown */
    uint64_t most[2];     /* maximum bytes to register with a device: [0] of host memory, [1] of its own */
    pthread_mutex_t init; /* HCCL cannot make two communicators at the same time */
    pthread_mutex_t registry; /* guards the lists below and `num_bound` of each region */
    kvn_region *regions;  /* open regions */
    struct kvn_hixl_server *servers; /* see server.h */
    uint64_t num_servers; /* the last number; an attempt that failed has one, too */
    pthread_mutex_t words_mutex; /* taken before `registry`; guards the fields below */
    struct kvn_words_page *words; /* see words.h */
} kvn_hccl;

extern const kvn_symbols kvn_hccl_symbols, kvn_hixl_symbols;

/* Opens the file at `path`; the loader searches a bare name. KVN_UNSUPPORTED if that fails or if a required call is
 * missing. `soc_name` (NULL: unknown) selects one of the two interfaces to register memory. */
int kvn_hccl_open(const char *path, const kvn_acl *acl, const char *soc_name, kvn_hccl *out,
                  kvn_failure *failure);
/* The same for HIXL's library. */
int kvn_hixl_open(const char *path, const kvn_acl *acl, kvn_hccl *out, kvn_failure *failure);
/* Sets the version of the driver, or "", and the bytes that it lets HCCL register. Call it before all others. */
void kvn_hccl_set_driver(kvn_hccl *hccl, const char *version, uint64_t most_host, uint64_t most_device);

/* Returns the KVN_ status of a HcclResult. */
int kvn_hccl_status(kvn_hccl_result result);
/* Writes "call: code (words): the vendor's text". Call it on the thread of the failed call, before the next call.
 * Returns kvn_hccl_status(result). */
int kvn_hccl_explain(const kvn_hccl *hccl, const char *call, kvn_hccl_result result, char *message,
                     size_t room);
int kvn_hccl_fail(const kvn_hccl *hccl, const char *call, kvn_hccl_result result,
                  kvn_failure *failure);

#endif
