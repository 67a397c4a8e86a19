/* The ACL library of this process: opened, its calls looked up, and its errors in words. It is never
 * closed: its threads and exit handlers outlive the last user. */
#ifndef KVN_ACL_LIBRARY_H
#define KVN_ACL_LIBRARY_H

#include <stdbool.h>
#include <stddef.h>

#include "core/library.h"
#include "kvnative/acl.h"

#define KVN_ACL_MAX_FILES 2 /* libacl_rt.so, and libascendcl.so which had it all before 8.5 */

typedef struct kvn_acl_library {
    kvn_acl calls; /* first, as kvn_device_ops asks for it */
    void *files[KVN_ACL_MAX_FILES]; /* dlopen handles; NULL where not opened */
} kvn_acl_library;

extern const kvn_symbols kvn_acl_symbols;

/* Opens the 1 or 2 files of `paths`, of which one may be missing, and takes each symbol from the first file that has
 * it. `failure` names the missing call or has the loader's message. */
int kvn_acl_library_open(const char *const *paths, size_t num_paths, kvn_acl_library *out,
                         kvn_failure *failure);
/* Calls aclInit. *first: this was the first call in the process. */
int kvn_acl_library_init(const kvn_acl_library *library, int *first, kvn_failure *failure);
/* Calls aclFinalize: only if *first was set, and once nothing of the library is in use. */
int kvn_acl_library_finalize(const kvn_acl_library *library, kvn_failure *failure);

/* ---- what it says of devices; after init, no context is needed ---- */

int kvn_acl_library_devices(const void *runtime, uint32_t *count, kvn_failure *failure);
/* Such as "Ascend910B1"; "" if unknown. */
const char *kvn_acl_library_soc(const kvn_acl_library *library);
/* Version of the interface, three numbers; false if unknown. */
bool kvn_acl_library_interface(const kvn_acl_library *library, int32_t version[3]);
/* Number of the device on its server; false if unknown. */
bool kvn_acl_library_physical(const kvn_acl_library *library, int32_t logical, int32_t *physical);
int kvn_acl_library_attribute(const void *runtime, int32_t device, int attribute, int64_t *value,
                              kvn_failure *failure);

/* ---- errors ---- */

/* Makes one line of a text of several, without blanks at its end. */
void kvn_acl_put_on_one_line(char *text);
/* Writes "call: code (words): the vendor's text", which belongs to the thread. Call it on the thread of the failed
 * call, before the next call. Returns the KVN_ status of the aclError `code`. */
int kvn_acl_fail(const kvn_acl *acl, const char *call, int code, kvn_failure *failure);
/* Drops the text of an expected error, which would otherwise come with the next one. */
void kvn_acl_forget(const kvn_acl *acl);

#endif
