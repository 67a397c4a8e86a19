/* Outcomes of the native layer. kvplan/execution/task.py maps them to LLMStatusCode. */
#ifndef KVNATIVE_STATUS_H
#define KVNATIVE_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kvn_status {
    KVN_OK = 0,
    KVN_PENDING = 1,      /* in flight: not an outcome */
    KVN_TIMEOUT = -1,     /* the deadline passed; the rest was abandoned */
    KVN_CANCELLED = -2,   /* the caller cancelled it; the rest was abandoned */
    KVN_INVALID = -3,     /* an argument that can never work */
    KVN_NO_MEMORY = -4,   /* this host is out of memory, threads or table entries */
    KVN_PEER_GONE = -5,   /* the other process has exited, or the connection to it has ended */
    KVN_DENIED = -6,      /* the system refuses access to the other process */
    KVN_UNMAPPED = -7,    /* a range is not (or no longer) mapped, registered or writable */
    KVN_UNSUPPORTED = -8, /* this backend or system cannot do that */
    KVN_FAILED = -9,      /* any other error; see `code` and `message` */
    KVN_DEVICE_MEMORY = -10,   /* a device's memory is damaged */
    KVN_SUSPECT_REMOTE = -11,  /* the device at the other end reports an error */
    KVN_NO_DEVICE_MEMORY = -12, /* the device has no memory, stream or other resource left */
    KVN_REVOKED = -13          /* this process deregistered memory of the batch; the rest was abandoned */
} kvn_status;

#ifdef __cplusplus
}
#endif
#endif
