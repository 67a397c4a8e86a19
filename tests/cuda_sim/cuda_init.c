/* cuInit, and properties of devices. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_sim.h"

CUDA cuInit(unsigned flags);
CUDA cuDriverGetVersion(int *version);
CUDA cuDeviceGetCount(int *count);
CUDA cuDeviceGet(int *device, int ordinal);
CUDA cuDeviceGetName(char *name, int room, int device);
CUDA cuDeviceGetUuid(unsigned char *uuid, int device);
CUDA cuDeviceGetUuid_v2(unsigned char *uuid, int device);
CUDA cuDeviceGetPCIBusId(char *text, int room, int device);
CUDA cuDeviceGetAttribute(int *value, int attribute, int device);
CUDA cuDeviceCanAccessPeer(int *can, int device, int peer);
CUDA cuThreadExchangeStreamCaptureMode(int *mode);

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int is_initialized;
static int visible[64];
static int num_visible;

int cuda_is_initialized(void) {
    pthread_mutex_lock(&mutex);
    int answer = is_initialized;
    pthread_mutex_unlock(&mutex);
    return answer;
}

int cuda_num_devices(void) { return num_visible; }

int cuda_physical(int ordinal) {
    return ordinal >= 0 && ordinal < num_visible ? visible[ordinal] : -1;
}

int cuda_ordinal(int physical) {
    for (int i = 0; i < num_visible; i++) {
        if (visible[i] == physical) {
            return i;
        }
    }
    return -1;
}

int cuda_can_reach(int device, int peer) {
    const sim_settings settings = sim_settings_now();
    const int64_t peers = settings.cuda_mig ? 0 : settings.cuda_peers;
    return device != peer && (peers == 1 || (peers == 2 && device < peer));
}

int cuda_is_mappable(int device) {
    return cuda_ordinal(device) >= 0 || sim_settings_now().cuda_hidden;
}

/* Devices after the first invalid number are not visible. */
static void find_visible(void) {
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    int count = sim_settings_now().num_devices;
    num_visible = 0;
    for (int i = 0; i < count && !text; i++) {
        visible[num_visible++] = i;
    }
    while (text && *text && num_visible < count) {
        char *end;
        long number = strtol(text, &end, 10);
        if (end == text || number < 0 || number >= count) {
            break;
        }
        visible[num_visible++] = (int)number;
        text = *end == ',' ? end + 1 : end;
    }
}

/* ---- calls that a capture forbids ---- */

static _Thread_local int capture_mode; /* CUstreamCaptureMode: 0 global, 1 thread-local, 2 relaxed */

/* A thread in global mode may make no "potentially unsafe" calls while another thread captures. The documents name
 * cudaMalloc; PyTorch has found cudaEventQuery. The simulator refuses all calls that allocate, free, load, query or
 * wait. */
static int is_unsafe(const char *name) {
    static const char *const NAMES[] = {
        "cuMemAlloc_v2",       "cuMemAllocManaged",    "cuMemFree_v2",      "cuMemHostAlloc",
        "cuMemFreeHost",       "cuMemHostRegister_v2", "cuMemHostUnregister", "cuMemcpyHtoD_v2",
        "cuMemcpyDtoH_v2",     "cuStreamQuery",        "cuStreamSynchronize", "cuEventQuery",
        "cuEventSynchronize",  "cuModuleLoadDataEx",   "cuModuleUnload",      "cuMemCreate",
        "cuMemMap",            "cuMemUnmap",           "cuMemSetAccess",
    };
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++) {
        if (!strcmp(name, NAMES[i])) {
            return 1;
        }
    }
    return 0;
}

static int check_capture(const char *name) {
    int is_set = sim_settings_now().cuda_capture != 0;
    int forbids = (is_set && capture_mode == 0) || cuda_capture_forbids(capture_mode);
    if ((is_set || forbids) && !strcmp(name, "cuCtxSynchronize")) {
        return sim_error(CAPTURE_UNSUPPORTED, "a stream of the context is captured");
    }
    if (forbids && is_unsafe(name)) {
        sim_violation("%s spoils the capture of a stream by another thread", name);
        return sim_error(CAPTURE_UNSUPPORTED, "%s: another thread captures a stream", name);
    }
    return 0;
}

CUDA cuThreadExchangeStreamCaptureMode(int *mode) {
    sim_call call;
    int code = cuda_enter(&call, __func__);
    code = CUDA_CHECK(code, mode);
    if (!code && (*mode < 0 || *mode > 2)) {
        code = sim_error(INVALID_VALUE, "mode=%d: 0, 1 or 2", *mode);
    }
    if (!code) {
        int before = capture_mode;
        capture_mode = *mode;
        *mode = before;
    }
    return cuda_leave(&call, code, "\"mode\":%d", capture_mode);
}

int cuda_enter(sim_call *call, const char *name) {
    int code = sim_enter(call, name);
    if (!code && !cuda_is_initialized()) {
        code = sim_error(NOT_INITIALIZED, "%s: call cuInit before", name);
    }
    return code ? code : check_capture(name);
}

CUDA cuInit(unsigned flags) {
    sim_call call;
    int code = sim_enter(&call, __func__);
    if (!code && flags) {
        code = sim_error(INVALID_VALUE, "Flags=%u: 0", flags);
    }
    if (!code) {
        pthread_mutex_lock(&mutex);
        if (!is_initialized) {
            find_visible();
        }
        code = num_visible ? 0 : sim_error(NO_DEVICE, "no device is visible");
        is_initialized |= !code;
        pthread_mutex_unlock(&mutex);
    }
    return cuda_leave(&call, code, "%s", "");
}

/* Works also before cuInit. */
CUDA cuDriverGetVersion(int *version) {
    sim_call call;
    int code = sim_enter(&call, __func__);
    code = CUDA_CHECK(code, version);
    if (!code) {
        *version = KVSIM_CUDA;
    }
    return cuda_leave(&call, code, "%s", "");
}

static int enter_device(sim_call *call, const char *name, const void *out, int device, int *physical) {
    int code = cuda_enter(call, name);
    *physical = -1;
    if (!code && !out) {
        code = sim_error(INVALID_VALUE, "%s: NULL", name);
    }
    if (!code && (*physical = cuda_physical(device)) < 0) {
        code = sim_error(INVALID_DEVICE, "device %d: there are %d", device, cuda_num_devices());
    }
    return code;
}

CUDA cuDeviceGetCount(int *count) {
    sim_call call;
    int code = cuda_enter(&call, __func__);
    code = CUDA_CHECK(code, count);
    if (!code) {
        *count = cuda_num_devices();
    }
    return cuda_leave(&call, code, "%s", "");
}

CUDA cuDeviceGet(int *device, int ordinal) {
    sim_call call;
    int physical;
    int code = enter_device(&call, __func__, device, ordinal, &physical);
    if (!code) {
        *device = ordinal;
    }
    return cuda_leave(&call, code, "\"device\":%d", ordinal);
}

CUDA cuDeviceGetName(char *name, int room, int device) {
    sim_call call;
    int physical;
    int code = enter_device(&call, __func__, name, device, &physical);
    if (!code && room < 1) {
        code = sim_error(INVALID_VALUE, "len=%d", room);
    }
    if (!code) {
        snprintf(name, (size_t)room, "%s", "Simulated GPU");
    }
    return cuda_leave(&call, code, "\"device\":%d", device);
}

/* A UUID is the same in all processes. In MIG mode, two devices are slices of one card, whose UUID
 * cuDeviceGetUuid returns; cuDeviceGetUuid_v2 "returns its MIG UUID which uniquely identifies the subscribed MIG
 * compute instance" (CUDA driver API, Device Management). Slices have no peer access (MIG User Guide, Application
 * Considerations). */
static int get_uuid(const char *name, unsigned char *uuid, int device, int of_slices) {
    sim_call call;
    int physical;
    int code = enter_device(&call, name, uuid, device, &physical);
    if (!code) {
        int is_mig = sim_settings_now().cuda_mig != 0;
        memcpy(uuid, is_mig && of_slices ? "kvsim-cuda-mig-\0" : "kvsim-cuda-gpu-\0", 16);
        uuid[15] = (unsigned char)(is_mig && !of_slices ? physical / 2 : physical);
    }
    return cuda_leave(&call, code, "\"device\":%d", device);
}

CUDA cuDeviceGetUuid(unsigned char *uuid, int device) { return get_uuid(__func__, uuid, device, 0); }
CUDA cuDeviceGetUuid_v2(unsigned char *uuid, int device) { return get_uuid(__func__, uuid, device, 1); }

CUDA cuDeviceGetPCIBusId(char *text, int room, int device) {
    sim_call call;
    int physical;
    int code = enter_device(&call, __func__, text, device, &physical);
    if (!code && room < 13) {
        code = sim_error(INVALID_VALUE, "len=%d: at least 13", room);
    }
    if (!code) {
        snprintf(text, (size_t)room, "0000:%02X:00.0", (unsigned)(0x10 + physical));
    }
    return cuda_leave(&call, code, "\"device\":%d", device);
}

CUDA cuDeviceGetAttribute(int *value, int attribute, int device) {
    sim_call call;
    int physical;
    int code = enter_device(&call, __func__, value, device, &physical);
    const sim_settings settings = sim_settings_now();
    const int ROWS[][2] = {
        {1, 1024},                                 /* MAX_THREADS_PER_BLOCK */
        {8, 49152},                                /* MAX_SHARED_MEMORY_PER_BLOCK */
        {10, 32},                                  /* WARP_SIZE */
        {16, 8},                                   /* MULTIPROCESSOR_COUNT: few, so that kernels are small */
        {19, 1},                                   /* CAN_MAP_HOST_MEMORY */
        {33, 0x10 + physical},                     /* PCI_BUS_ID */
        {34, 0},                                   /* PCI_DEVICE_ID */
        {39, 2048},                                /* MAX_THREADS_PER_MULTIPROCESSOR */
        {40, 3},                                   /* ASYNC_ENGINE_COUNT */
        {41, 1},                                   /* UNIFIED_ADDRESSING */
        {50, 0},                                   /* PCI_DOMAIN_ID */
        {75, (int)settings.cuda_capability / 10},  /* COMPUTE_CAPABILITY_MAJOR */
        {76, (int)settings.cuda_capability % 10},  /* COMPUTE_CAPABILITY_MINOR */
        {86, 0},                                   /* HOST_NATIVE_ATOMIC_SUPPORTED */
        {88, 0},                                   /* PAGEABLE_MEMORY_ACCESS */
        {91, 1},                                   /* CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM */
        {99, settings.cuda_host_register != 0},    /* HOST_REGISTER_SUPPORTED */
        {102, settings.cuda_virtual != 0},         /* VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED */
        {103, settings.cuda_virtual == 1},         /* HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED */
        {110, 1},                                  /* GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED */
        {116, 0},                                  /* GPU_DIRECT_RDMA_SUPPORTED */
        {124, 0},                                  /* DMA_BUF_SUPPORTED */
        {128, 0},                                  /* HANDLE_TYPE_FABRIC_SUPPORTED */
        {133, settings.cuda_mps == 1},             /* MPS_ENABLED: last, so that it can be left out for older drivers */
    };
    const size_t num_rows = sizeof ROWS / sizeof *ROWS - (settings.cuda_mps == 2);
    size_t row = 0;
    while (row < num_rows && ROWS[row][0] != attribute) {
        row++;
    }
    if (!code && row == num_rows) {
        code = sim_error(INVALID_VALUE, "attribute %d: the simulator has none", attribute);
    } else if (!code) {
        *value = ROWS[row][1];
    }
    return cuda_leave(&call, code, "\"device\":%d,\"attribute\":%d", device, attribute);
}

CUDA cuDeviceCanAccessPeer(int *can, int device, int peer) {
    sim_call call;
    int physical;
    int code = enter_device(&call, __func__, can, device, &physical);
    int other = cuda_physical(peer);
    if (!code && other < 0) {
        code = sim_error(INVALID_DEVICE, "device %d: there are %d", peer, cuda_num_devices());
    } else if (!code) {
        *can = cuda_can_reach(physical, other);
    }
    return cuda_leave(&call, code, "\"device\":%d,\"peer\":%d", device, peer);
}
