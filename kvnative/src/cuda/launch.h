/* Launches of the copy kernel on streams, and how they are stopped. What a launch reads later, its control words
 * and its descriptors, is the launcher's: it outlives the launch, whenever that begins and whoever has given it
 * up. All calls are made with the device's context current; they may come from several threads. */
#ifndef KVN_CUDA_LAUNCH_H
#define KVN_CUDA_LAUNCH_H

#include "cuda/copy_kernel.h"
#include "cuda/device.h"

#define KVN_CUDA_LAUNCH_COUNT 8192u /* descriptors of a launch, at most */
/* Launches on a stream at one time, at most: each of them has 458 KB for its descriptors. */
#define KVN_CUDA_MAX_LAUNCHES 16u
/* Of work that was told to stop: a CUresult that CUDA does not have. */
#define KVN_CUDA_ABORTED 1000000

/* Makes the launcher of a device. */
int kvn_cuda_launcher_open(const kvn_device *device, kvn_failure *failure);
/* Nothing is in use but what was given up, which may still begin: what that reads is never freed. Returns true if
 * there is any: then the context must stay, too. */
bool kvn_cuda_launcher_close(const kvn_device *device);

/* Compiles the kernel, once; later calls have the first one's outcome. KVN_UNSUPPORTED: this driver does not
 * take it, and `failure` says why. Other failures, such as a lack of memory, are not final. */
int kvn_cuda_launcher_load(const kvn_device *device, kvn_failure *failure);
/* Launches a copy of 1 to KVN_CUDA_LAUNCH_COUNT descriptors, none empty, all of memory that the device reaches;
 * by at most `blocks` blocks. The columns may go when it returns. */
int kvn_cuda_launch(const kvn_device *device, kvn_stream stream, unsigned blocks, kvn_columns batch,
                    kvn_failure *failure);
/* Before something else that moves bytes is given to the stream, which is not to be aborted from then on. */
int kvn_cuda_launcher_note(const kvn_device *device, kvn_stream stream, kvn_failure *failure);

/* Returns true if the stream has nothing but launches, which can be stopped. */
bool kvn_cuda_can_stop(const kvn_device *device, kvn_stream stream);
/* KVN_PENDING while the stream has work, else its outcome; KVN_CUDA_ABORTED, once, after it was told to stop. */
int kvn_cuda_query(const kvn_device *device, kvn_stream stream, kvn_failure *failure);
/* Stops what can be stopped. KVN_OK: no work of the stream touches memory any more, though launches may still
 * be on it that will begin and end. Else it goes on for now, and kvn_cuda_query says when it has
 * ended. Until then nothing is launched on it: KVN_CUDA_ABORTED. */
int kvn_cuda_abort(const kvn_device *device, kvn_stream stream, kvn_failure *failure);
/* As abort; then destroys the stream, at once or when what was given up on it has passed. */
int kvn_cuda_drop(const kvn_device *device, kvn_stream stream, kvn_failure *failure);

#endif
