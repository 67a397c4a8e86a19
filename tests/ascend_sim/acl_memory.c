/* Device memory and pinned host memory: allocation, registration, queries. */
#include <stdlib.h>

#include "acl.h"

ACL aclrtMalloc(void **out, size_t nbytes, int32_t policy);
ACL aclrtMallocAlign32(void **out, size_t nbytes, int32_t policy);
ACL aclrtFree(void *pointer);
ACL aclrtMallocHost(void **out, size_t nbytes);
ACL aclrtFreeHost(void *pointer);
ACL aclrtHostRegister(void *pointer, uint64_t nbytes, int32_t type, void **device_pointer);
ACL aclrtHostUnregister(void *pointer);
ACL aclrtPointerGetAttributes(const void *pointer, acl_pointer_attributes *attributes);
ACL aclrtGetMemInfo(int32_t attribute, size_t *available, size_t *total);

#define ID(handle) ((unsigned long long)(uintptr_t)(handle))
static int check_size(uint64_t nbytes) {
    return nbytes ? 0 : sim_error(SIM_INVALID, "size=0: at least 1");
}

static int allocate(const char *name, void **out, size_t nbytes, int32_t policy, int padding) {
    sim_call call;
    uint64_t address = 0;
    int device;
    int code = acl_enter_device(&call, name, &device);
    code = ACL_CHECK(code, out);
    code = code ? code : check_size(nbytes);
    /* 0x101100: flags beside the policy, for low or high bandwidth and read-only memory. */
    if (!code && (policy < 0 || (policy & ~0x101100) > 7)) {
        code = sim_error(SIM_INVALID, "policy=0x%x", (unsigned)policy);
    }
    code = code ? code : sim_memory_allocate_in(SIM_MEMORY_DEVICE, device, nbytes,
                                                  (policy & 7) == 1 || (policy & 7) == 4,
                                                  (uint64_t)padding, &address);
    if (!code) {
        *out = (void *)(uintptr_t)address;
    }
    return sim_leave(&call, code, "\"bytes\":%zu,\"address\":%llu,\"device\":%d", nbytes,
                     (unsigned long long)address, device);
}

/* Takes 32 bytes more than requested, so an allocation of whole pages takes another page. */
ACL aclrtMalloc(void **out, size_t nbytes, int32_t policy) {
    return allocate(__func__, out, nbytes, policy, 32);
}

ACL aclrtMallocAlign32(void **out, size_t nbytes, int32_t policy) {
    return allocate(__func__, out, nbytes, policy, 0);
}

static int release(const char *name, void *pointer, sim_memory_kind kind) {
    sim_call call;
    int device;
    int code = acl_enter_device(&call, name, &device);
    code = ACL_CHECK(code, pointer);
    code = code ? code : sim_memory_free(kind, (uint64_t)(uintptr_t)pointer);
    return sim_leave(&call, code, "\"address\":%llu", ID(pointer));
}

ACL aclrtFree(void *pointer) { return release(__func__, pointer, SIM_MEMORY_DEVICE); }
ACL aclrtFreeHost(void *pointer) { return release(__func__, pointer, SIM_MEMORY_PINNED); }

ACL aclrtMallocHost(void **out, size_t nbytes) {
    sim_call call;
    uint64_t address = 0;
    int device;
    int code = acl_enter_device(&call, __func__, &device);
    code = ACL_CHECK(code, out);
    code = code ? code : check_size(nbytes);
    code = code ? code : sim_memory_allocate(SIM_MEMORY_PINNED, device, nbytes, &address);
    if (!code) {
        *out = (void *)(uintptr_t)address;
    }
    return sim_leave(&call, code, "\"bytes\":%zu,\"address\":%llu", nbytes,
                     (unsigned long long)address);
}

static int pin(int device, void *pointer, uint64_t nbytes, int mapped) {
    uint64_t page = sim_settings_now().page_bytes;
    if ((uintptr_t)pointer % page) {
        return sim_error(SIM_UNALIGNED, "%p is not aligned to %llu", pointer,
                         (unsigned long long)page);
    }
    int code = sim_memory_register(device, (uint64_t)(uintptr_t)pointer, nbytes, mapped);
    /* Before 8.5, this error had no code of its own. */
    return code == SIM_ALREADY_REGISTERED && KVSIM_CANN < 805 ? SIM_PARAM : code;
}

/* *device_pointer is the address for programs on the device, which are not simulated. No call accepts it. */
ACL aclrtHostRegister(void *pointer, uint64_t nbytes, int32_t type, void **device_pointer) {
    sim_call call;
    int device;
    int code = acl_enter_device(&call, __func__, &device);
    code = ACL_CHECK(code, pointer);
    code = ACL_CHECK(code, device_pointer);
    if (!code && !nbytes) {
        code = sim_error(SIM_PARAM, "size=0: at least 1");
    }
    if (!code && type) {
        code = sim_error(SIM_UNSUPPORTED, "type=%d: only ACL_HOST_REGISTER_MAPPED", type);
    }
    code = code ? code : pin(device, pointer, nbytes, 1);
    if (!code) {
        *device_pointer = (void *)(uintptr_t)sim_space_take(nbytes, 4096);
    }
    return sim_leave(&call, code, "\"address\":%llu,\"bytes\":%llu", ID(pointer),
                     (unsigned long long)nbytes);
}

ACL aclrtHostUnregister(void *pointer) {
    sim_call call;
    int device;
    int code = acl_enter_device(&call, __func__, &device);
    code = ACL_CHECK(code, pointer);
    code = code ? code : sim_memory_free(SIM_MEMORY_REGISTERED, (uint64_t)(uintptr_t)pointer);
    if (code == SIM_NOT_REGISTERED && KVSIM_CANN < 805) {
        code = SIM_PARAM;
    }
    return sim_leave(&call, code, "\"address\":%llu", ID(pointer));
}

/* Returns 0 for host memory, and UINT32_MAX on an A3 outside of a super pod. */
static uint32_t location_id(const acl_place *place) {
    const sim_settings settings = sim_settings_now();
    if (place->device >= 0 && settings.product == SIM_A3 && settings.super_pod_id < 0) {
        return UINT32_MAX;
    }
    return place->device < 0 ? 0 : (uint32_t)place->device;
}

/* Before 8.5, pageable memory is reported as host memory. */
ACL aclrtPointerGetAttributes(const void *pointer, acl_pointer_attributes *attributes) {
    sim_call call;
    acl_place place;
    int device;
    int type = -1;
    int code = acl_enter_device(&call, __func__, &device);
    code = ACL_CHECK(code, pointer);
    code = ACL_CHECK(code, attributes);
    code = code ? code : acl_place_find(pointer, 1, &place);
    if (!code) {
        type = place.side == ACL_DEVICE_SIDE                             ? ACL_AT_DEVICE
               : place.side == ACL_PAGEABLE_SIDE && KVSIM_CANN >= 805 ? ACL_AT_UNREGISTERED
                                                                         : ACL_AT_HOST;
        *attributes = (acl_pointer_attributes){
            .location = {location_id(&place), type},
            .page_size = place.side == ACL_DEVICE_SIDE ? (uint32_t)place.memory->page
                                                                : (uint32_t)sim_settings_now().page_bytes,
        };
        acl_place_release(&place);
    }
    return sim_leave(&call, code, "\"address\":%llu,\"type\":%d", ID(pointer), type);
}

ACL aclrtGetMemInfo(int32_t attribute, size_t *available, size_t *total) {
    sim_call call;
    int device;
    int code = acl_enter_device(&call, __func__, &device);
    code = ACL_CHECK(code, available);
    code = ACL_CHECK(code, total);
    if (!code && (attribute < 0 || attribute > (KVSIM_CANN >= 805 ? 17 : 11))) {
        code = sim_error(SIM_INVALID, "attr=%d", attribute);
    }
    if (!code) {
        uint64_t hbm = sim_settings_now().hbm_bytes;
        uint64_t used = sim_memory_used(device);
        *total = hbm;
        *available = used < hbm ? hbm - used : 0;
    }
    return sim_leave(&call, code, "\"attribute\":%d", attribute);
}

#if KVSIM_CANN >= 805

#define MAPPED 0x2U
#define PINNED 0x10000000U

ACL aclrtHostRegisterV2(void *pointer, uint64_t nbytes, uint32_t flags);

ACL aclrtHostRegisterV2(void *pointer, uint64_t nbytes, uint32_t flags) {
    sim_call call;
    int device;
    int code = acl_enter_device(&call, __func__, &device);
    code = ACL_CHECK(code, pointer);
    if (!code && (!nbytes || !flags || (flags & ~(MAPPED | PINNED)))) {
        code = sim_error(SIM_PARAM, "size=%llu, flag=0x%x", (unsigned long long)nbytes, flags);
    }
    code = code ? code : pin(device, pointer, nbytes, (flags & MAPPED) != 0);
    return sim_leave(&call, code, "\"address\":%llu,\"bytes\":%llu,\"flags\":%u", ID(pointer),
                     (unsigned long long)nbytes, flags);
}

#endif
