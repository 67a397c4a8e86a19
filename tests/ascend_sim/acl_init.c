/* aclInit, aclFinalize, and code that all calls share. */
#include <string.h>

#include "acl.h"

ACL aclInit(const char *config_path);
ACL aclFinalize(void);
SIM_API const char *aclGetRecentErrMsg(void);
ACL aclrtGetVersion(int32_t *major, int32_t *minor, int32_t *patch);
SIM_API const char *aclrtGetSocName(void);
ACL aclrtGetRunMode(int32_t *mode);

enum { UNINITIALIZED = 100001, REPEAT_INITIALIZE = 100002, REPEAT_FINALIZE = 100037 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static enum { NEVER, READY, FINISHED } state;

int acl_enter(sim_call *call, const char *name) {
    int code = sim_enter(call, name);
    if (code) {
        return code;
    }
    pthread_mutex_lock(&mutex);
    int is_ready = state == READY;
    pthread_mutex_unlock(&mutex);
    return is_ready ? 0 : sim_error(UNINITIALIZED, "%s: call aclInit before", name);
}

int acl_enter_device(sim_call *call, const char *name, int *device) {
    int code = acl_enter(call, name);
    *device = -1;
    if (code) {
        return code;
    }
    *device = sim_current_device();
    return *device < 0 ? sim_error(SIM_NO_CONTEXT, "%s: the thread has no context", name) : 0;
}

int acl_check_pointer(const void *pointer, const char *argument) {
    return pointer ? 0 : sim_error(SIM_INVALID, "%s is NULL", argument);
}

int acl_check_timeout(int32_t timeout) {
    if (timeout < -1 || timeout == 0) {
        return sim_error(SIM_PARAM, "timeout=%d: -1 or more than 0 milliseconds", timeout);
    }
    return 0;
}

ACL aclInit(const char *config_path) {
    sim_call call;
    int code = sim_enter(&call, __func__);
    if (!code) {
        pthread_mutex_lock(&mutex);
        if (state == READY) {
            code = sim_error(REPEAT_INITIALIZE, "aclInit was called before");
        }
        state = READY;
        pthread_mutex_unlock(&mutex);
    }
    return sim_leave(&call, code, "\"config\":%s", config_path ? "true" : "false");
}

ACL aclFinalize(void) {
    sim_call call;
    int code = sim_enter(&call, __func__);
    if (!code) {
        pthread_mutex_lock(&mutex);
        if (state != READY) {
            code = sim_error(state == NEVER ? UNINITIALIZED : REPEAT_FINALIZE, "nothing to end");
        }
        state = state == NEVER ? NEVER : FINISHED;
        pthread_mutex_unlock(&mutex);
    }
    if (!code) {
        sim_leaks_note("aclFinalize");
    }
    return sim_leave(&call, code, "%s", "");
}

const char *aclGetRecentErrMsg(void) {
    const sim_call call = {.name = __func__};
    const char *text = sim_error_take();
    sim_leave(&call, 0, "\"found\":%s", text ? "true" : "false");
    return text;
}

ACL aclrtGetVersion(int32_t *major, int32_t *minor, int32_t *patch) {
    sim_call call;
    int code = sim_enter(&call, __func__);
    code = ACL_CHECK(code, major);
    code = ACL_CHECK(code, minor);
    code = ACL_CHECK(code, patch);
    if (!code) {
        *major = 1;
        *minor = KVSIM_CANN >= 805 ? 16 : 13;
        *patch = 0;
    }
    return sim_leave(&call, code, "%s", "");
}

/* Returns NULL if no device is visible. */
const char *aclrtGetSocName(void) {
    static _Thread_local char name[32];
    sim_call call;
    sim_settings settings = sim_settings_now();
    int code = acl_enter(&call, __func__);
    strcpy(name, settings.soc);
    sim_leave(&call, code, "%s", "");
    return code || !settings.num_devices ? NULL : name;
}

ACL aclrtGetRunMode(int32_t *mode) {
    sim_call call;
    int code = acl_enter(&call, __func__);
    code = ACL_CHECK(code, mode);
    if (!code) {
        *mode = 1; /* ACL_HOST: the program runs on the host */
    }
    return sim_leave(&call, code, "%s", "");
}
