/* The backends that copy between a device and this host's memory, or within a device. */
#ifndef KVN_DEVICE_COPY_H
#define KVN_DEVICE_COPY_H

#include "device/channel.h"

/* `direction`: KVN_HOST_TO_DEVICE, KVN_DEVICE_TO_HOST or KVN_DEVICE_TO_DEVICE; `channels` belong to `device`. Both
 * outlive the backend. NULL with errno set (EINVAL, ENOMEM) on failure. */
kvn_backend *kvn_device_copy_create(kvn_device *device, kvn_channel **channels,
                                    unsigned num_channels, kvn_direction direction);

#endif
