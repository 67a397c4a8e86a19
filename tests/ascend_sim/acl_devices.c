/* Devices and contexts. */
#include "acl.h"

ACL aclrtGetDeviceCount(uint32_t *count);
ACL aclrtSetDevice(int32_t device);
ACL aclrtResetDevice(int32_t device);
ACL aclrtResetDeviceForce(int32_t device);
ACL aclrtGetDevice(int32_t *device);
ACL aclrtCreateContext(void **context, int32_t device);
ACL aclrtDestroyContext(void *context);
ACL aclrtSetCurrentContext(void *context);
ACL aclrtGetCurrentContext(void **context);
ACL aclrtSynchronizeDevice(void);
ACL aclrtSynchronizeDeviceWithTimeout(int32_t timeout);
ACL aclrtDeviceCanAccessPeer(int32_t *allowed, int32_t device, int32_t peer);
ACL aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags);
ACL aclrtDeviceDisablePeerAccess(int32_t peer);

ACL aclrtGetDeviceCount(uint32_t *count) {
    sim_call call;
    int code = acl_enter(&call, __func__);
    code = ACL_CHECK(code, count);
    if (!code) {
        *count = (uint32_t)sim_settings_now().num_devices;
    }
    return sim_leave(&call, code, "%s", "");
}

ACL aclrtSetDevice(int32_t device) {
    sim_call call;
    int code = acl_enter(&call, __func__);
    code = code ? code : sim_device_set(device);
    return sim_leave(&call, code, "\"device\":%d", device);
}

ACL aclrtResetDevice(int32_t device) {
    sim_call call;
    int code = acl_enter(&call, __func__);
    code = code ? code : sim_device_reset(device, 0);
    return sim_leave(&call, code, "\"device\":%d", device);
}

ACL aclrtResetDeviceForce(int32_t device) {
    sim_call call;
    int code = acl_enter(&call, __func__);
    code = code ? code : sim_device_reset(device, 1);
    return sim_leave(&call, code, "\"device\":%d", device);
}

ACL aclrtGetDevice(int32_t *device) {
    sim_call call;
    int current;
    int code = acl_enter_device(&call, __func__, &current);
    code = ACL_CHECK(code, device);
    if (!code) {
        *device = current;
    }
    return sim_leave(&call, code, "\"device\":%d", current);
}

ACL aclrtCreateContext(void **context, int32_t device) {
    sim_call call;
    int code = acl_enter(&call, __func__);
    code = ACL_CHECK(code, context);
    code = code ? code : sim_context_create(device, context);
    return sim_leave(&call, code, "\"device\":%d", device);
}

ACL aclrtDestroyContext(void *context) {
    sim_call call;
    int code = acl_enter(&call, __func__);
    code = ACL_CHECK(code, context);
    code = code ? code : sim_context_destroy(context, 0);
    return sim_leave(&call, code, "%s", "");
}

ACL aclrtSetCurrentContext(void *context) {
    sim_call call;
    int code = acl_enter(&call, __func__);
    code = ACL_CHECK(code, context);
    code = code ? code : sim_context_set(context);
    return sim_leave(&call, code, "\"context\":%llu", (unsigned long long)context);
}

ACL aclrtGetCurrentContext(void **context) {
    sim_call call;
    int code = acl_enter(&call, __func__);
    code = ACL_CHECK(code, context);
    code = code ? code : sim_context_get(context);
    return sim_leave(&call, code, "%s", "");
}

ACL aclrtSynchronizeDevice(void) {
    sim_call call;
    int code = acl_enter(&call, __func__);
    code = code ? code : sim_context_wait(-1);
    return sim_leave(&call, code, "%s", "");
}

ACL aclrtSynchronizeDeviceWithTimeout(int32_t timeout) {
    sim_call call;
    int code = acl_enter(&call, __func__);
    code = code ? code : acl_check_timeout(timeout);
    code = code ? code : sim_context_wait(timeout);
    return sim_leave(&call, code, "\"timeout\":%d", timeout);
}

ACL aclrtDeviceCanAccessPeer(int32_t *allowed, int32_t device, int32_t peer) {
    sim_call call;
    int code = acl_enter(&call, __func__);
    code = ACL_CHECK(code, allowed);
    if (!code) {
        int state = sim_peer_access(device, peer, 0);
        code = state < 0 ? -state : 0;
        *allowed = device != peer;
    }
    return sim_leave(&call, code, "\"device\":%d,\"peer\":%d", device, peer);
}

static int change_peer_access(const char *name, int32_t peer, uint32_t flags, int change) {
    sim_call call;
    int device;
    int code = acl_enter_device(&call, name, &device);
    if (!code && (flags || device == peer)) {
        code = sim_error(SIM_PARAM, "flags=%u, peer=%d of device %d", flags, peer, device);
    }
    if (!code) {
        int state = sim_peer_access(device, peer, change);
        code = state < 0 ? -state : 0;
    }
    return sim_leave(&call, code, "\"device\":%d,\"peer\":%d", device, peer);
}

ACL aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) {
    return change_peer_access(__func__, peer, flags, 1);
}

ACL aclrtDeviceDisablePeerAccess(int32_t peer) { return change_peer_access(__func__, peer, 0, -1); }

/* A call of the runtime below ACL; older libraries have it instead of aclrtGetPhyDevIdByLogicDevId. */
ACL rtGetDevicePhyIdByIndex(uint32_t logical, uint32_t *physical);

ACL rtGetDevicePhyIdByIndex(uint32_t logical, uint32_t *physical) {
    sim_call call;
    sim_settings settings = sim_settings_now();
    int code = acl_enter(&call, __func__);
    if (!code && (logical >= (uint32_t)settings.num_devices || !physical)) {
        code = sim_error(SIM_DEVICE_ID, "there is no device %u", logical);
    }
    if (!code) {
        *physical = (uint32_t)settings.physical[logical];
    }
    return sim_leave(&call, code, "%s", "");
}

#if KVSIM_CANN >= 805

ACL aclrtGetPhyDevIdByLogicDevId(const int32_t logical, int32_t *const physical);
ACL aclrtGetLogicDevIdByPhyDevId(const int32_t physical, int32_t *const logical);
ACL aclrtGetDeviceInfo(uint32_t device, int32_t attribute, int64_t *value);

ACL aclrtGetPhyDevIdByLogicDevId(const int32_t logical, int32_t *const physical) {
    sim_call call;
    int code = acl_enter(&call, __func__);
    code = ACL_CHECK(code, physical);
    sim_settings settings = sim_settings_now();
    if (!code && (logical < 0 || logical >= settings.num_devices)) {
        code = sim_error(SIM_DEVICE_ID, "device %d: there are %d", logical, settings.num_devices);
    } else if (!code) {
        *physical = settings.physical[logical];
    }
    return sim_leave(&call, code, "\"device\":%d", logical);
}

ACL aclrtGetLogicDevIdByPhyDevId(const int32_t physical, int32_t *const logical) {
    sim_call call;
    int code = acl_enter(&call, __func__);
    code = ACL_CHECK(code, logical);
    sim_settings settings = sim_settings_now();
    int found = 0;
    while (found < settings.num_devices && settings.physical[found] != physical) {
        found++;
    }
    if (!code && found == settings.num_devices) {
        code = sim_error(SIM_DEVICE_ID, "device %d of the server is not visible", physical);
    } else if (!code) {
        *logical = found;
    }
    return sim_leave(&call, code, "\"physical\":%d", physical);
}

ACL aclrtGetDeviceInfo(uint32_t device, int32_t attribute, int64_t *value) {
    sim_call call;
    int code = acl_enter(&call, __func__);
    code = ACL_CHECK(code, value);
    sim_settings settings = sim_settings_now();
    if (!code && device >= (uint32_t)settings.num_devices) {
        code = sim_error(SIM_DEVICE_ID, "device %u: there are %d", device, settings.num_devices);
    }
    int physical = code ? 0 : settings.physical[device];
    const struct {
        int32_t attribute;
        int needs_super_pod;
        int64_t value;
    } ROWS[] = {
        {401, 0, 0},                                                   /* SMP_ID */
        {402, 0, physical},                                            /* PHY_CHIP_ID */
        {403, 1, settings.super_pod_id < 0 ? -1 : settings.server_id * settings.num_devices + physical},
        {404, 1, settings.server_id},                                  /* SUPER_POD_SERVER_ID */
        {405, 1, settings.super_pod_id},                               /* SUPER_POD_ID */
        {407, 0, 1},                                                   /* MAINBOARD_ID */
        {501, 0, 0},                                                   /* IS_VIRTUAL */
    };
    size_t row = 0;
    while (row < sizeof ROWS / sizeof *ROWS && ROWS[row].attribute != attribute) {
        row++;
    }
    if (!code && row == sizeof ROWS / sizeof *ROWS) {
        code = sim_error(SIM_PARAM, "attribute %d", attribute);
    } else if (!code && ROWS[row].needs_super_pod && settings.product == SIM_A2) {
        code = sim_error(SIM_UNSUPPORTED, "attribute %d: %s has no super pod", attribute,
                         settings.soc);
    } else if (!code) {
        *value = ROWS[row].value;
    }
    return sim_leave(&call, code, "\"device\":%u,\"attribute\":%d", device, attribute);
}

#endif
