/* The ACL library of this process: opens it, looks up its calls, and puts its errors into words. It is never
 * closed, because its threads and exit handlers outlive the last user. */
#ifndef KVN_ACL_LIBRARY_H
#define KVN_ACL_LIBRARY_H

#include <stdbool.h>
#include <stddef.h>

#include "core/library.h"
#include "kvnative/acl.h"

#define KVN_ACL_MAX_FILES 2 /* libacl_rt.so, and libascendcl.so, which had all calls before 8.5 */

typedef struct kvn_acl_library {
    kvn_acl calls; /* the first field, as kvn_device_ops demands */
    void *files[KVN_ACL_MAX_FILES]; /* dlopen handles; NULL: not opened */
} kvn_acl_library;

extern const kvn_symbols kvn_acl_symbols;

/* Opens the 1 or 2 files of `paths`, one of which may be missing. Each symbol comes from the first file that has it.
 * `failure` names the missing call, or has the loader's message. */
int kvn_acl_library_open(const char *const *paths, size_t num_paths, kvn_acl_library *out,
                         kvn_failure *failure);
/* Calls aclInit. *first is set if this is the first call in the process. */
int kvn_acl_library_init(const kvn_acl_library *library, int *first, kvn_failure *failure);
/* Calls aclFinalize. Call it only if *first was set, and when nothing of the library is in use. */
int kvn_acl_library_finalize(const kvn_acl_library *library, kvn_failure *failure);

/* ---- properties of devices; after init, without a context ---- */

int kvn_acl_library_devices(const void *runtime, uint32_t *count, kvn_failure *failure);
/* Returns a name such as "Ascend910B1"; "" if unknown. */
const char *kvn_acl_library_soc(const kvn_acl_library *library);
/* Gets the three numbers of the interface's version; false: unknown. */
bool kvn_acl_library_interface(const kvn_acl_library *library, int32_t version[3]);
/* Gets the number of the device on its server; false: unknown. */
bool kvn_acl_library_physical(const kvn_acl_library *library, int32_t logical, int32_t *physical);
int kvn_acl_library_attribute(const void *runtime, int32_t device, int attribute, int64_t *value,
                              kvn_failure *failure);

/* ---- errors ---- */

/* Joins the lines of a text to one, without trailing blanks. */
void kvn_acl_put_on_one_line(char *text);
/* Writes "call: code (words): the vendor's text" into `failure`, and returns the KVN_ status of the aclError `code`.
 * ACL keeps its text for each thread: call this on the thread of the failed call, before another call of ACL. */
int kvn_acl_fail(const kvn_acl *acl, const char *call, int code, kvn_failure *failure);
/* Drops ACL's text about an expected error, which the next error would otherwise repeat. */
void kvn_acl_forget(const kvn_acl *acl);

#endif
