/* Launches the copy kernel on streams, and stops it. The launcher owns the control words and
 * descriptors that a launch reads; they outlive the launch, even if it was given up and begins late. Calls need the
 * device's context current, and may come from several threads. */
#ifndef KVN_CUDA_LAUNCH_H
#define KVN_CUDA_LAUNCH_H

#include "cuda/launch_memory.h"

/* Maximum number of launches on a stream at one time; each has 458 KB for its descriptors. */
#define KVN_CUDA_MAX_LAUNCHES 16u
/* The result of work that was told to stop: a CUresult that CUDA does not have. */
#define KVN_CUDA_ABORTED 1000000

/* Makes the launcher of a device. */
int kvn_cuda_launcher_open(const kvn_device *device, kvn_failure *failure);
/* Call this when only launches that were given up are left. Those may still begin, so their memory is never freed.
 * Returns true if there are any: then the context must stay, too. */
bool kvn_cuda_launcher_close(const kvn_device *device);

/* Compiles the kernel once; later calls return the same outcome. KVN_UNSUPPORTED: this driver refuses the kernel, and
 * `failure` says why. Other failures, such as a lack of memory, are not final. */
int kvn_cuda_launcher_load(const kvn_device *device, kvn_failure *failure);
/* Launches a copy of 1 to KVN_CUDA_LAUNCH_COUNT descriptors with at most `blocks` blocks. No descriptor is empty, and
 * the device reaches all memory. The caller may free the columns on return. */
int kvn_cuda_launch(const kvn_device *device, kvn_stream stream, unsigned blocks, kvn_columns batch,
                    kvn_failure *failure);
/* Call this before other work that moves bytes is put on the stream: from then on the stream cannot be aborted. */
int kvn_cuda_launcher_note(const kvn_device *device, kvn_stream stream, kvn_failure *failure);

/* Returns true if nothing but launches, which can be stopped, is on the stream. */
bool kvn_cuda_can_stop(const kvn_device *device, kvn_stream stream);
/* Returns KVN_PENDING while the stream has work, then its outcome: KVN_CUDA_ABORTED, once, if it was told to stop. */
int kvn_cuda_query(const kvn_device *device, kvn_stream stream, kvn_failure *failure);
/* Stops the launches of a stream. KVN_OK: no work of the stream touches memory any more, although launches on it may
 * still begin and end. Otherwise work continues, and kvn_cuda_query says when it has ended. Once its launches were told
 * to stop, new ones fail with KVN_CUDA_ABORTED until the stream is idle. */
int kvn_cuda_abort(const kvn_device *device, kvn_stream stream, kvn_failure *failure);
/* Aborts the stream, and destroys it, at once or when the launches that were given up have passed. */
int kvn_cuda_drop(const kvn_device *device, kvn_stream stream, kvn_failure *failure);

#endif
