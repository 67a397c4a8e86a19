/*
 * Modules and launches. A module is PTX text. A launch runs the kernel of the same name in kernels.cpp. Of the text,
 * only names, sizes of parameters, and attributes of kernels are read.
 */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_sim.h"

CUDA cuModuleLoadDataEx(void **module, const void *image, unsigned count, int *options, void **values);
CUDA cuModuleUnload(void *module);
CUDA cuModuleGetFunction(void **function, void *module, const char *name);
CUDA cuFuncLoad(void *function);
CUDA cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                    unsigned block_y, unsigned block_z, unsigned shared_nbytes, void *stream,
                    void **parameters, void **extra);

/* The newest PTX version that the driver compiles. */
#define NEWEST_PTX (KVSIM_CUDA >= 13000 ? 900 : KVSIM_CUDA >= 12080 ? 807 : KVSIM_CUDA >= 12040 ? 804 : 702)
#define MAX_SHARED 49152U

typedef struct module {
    void *handle;
    cuda_context *context;
    char *text;
    struct module *next;
} module;

typedef struct function {
    void *handle;
    void *module;
    cuda_context *context;
    const cuda_kernel *kernel;
    unsigned max_threads; /* of a block, from .maxntid or .reqntid; 0: no limit */
    int is_loaded;
    struct function *next;
} function;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static module *modules;
static function *functions;

/* ---- PTX text ---- */

/* Returns the text without comments; the caller frees the result. */
static char *without_comments(const char *text) {
    char *bare = malloc(strlen(text) + 1);
    char *out = bare;
    if (!bare) {
        abort();
    }
    while (*text) {
        if (!strncmp(text, "//", 2)) {
            text += strcspn(text, "\n");
        } else if (!strncmp(text, "/*", 2)) {
            const char *end = strstr(text + 2, "*/");
            text = end ? end + 2 : text + strlen(text);
        } else {
            *out++ = *text++;
        }
    }
    *out = '\0';
    return bare;
}

static int check_image(const char *text) {
    int major, minor, target;
    char after[32] = "";
    if (!strncmp(text, "\x7f" "ELF", 4) || !strncmp(text, "\x50\xed\x55\xba", 4)) {
        return sim_error(INVALID_IMAGE, "the image is binary code: the simulator takes PTX only");
    }
    text += strspn(text, " \t\r\n");
    if (sscanf(text, ".version %d.%d .target sm_%d %31s", &major, &minor, &target, after) != 4 ||
        !strstr(text, ".address_size 64")) {
        return sim_error(INVALID_PTX, "the image is not 64-bit PTX");
    }
    if (major * 100 + minor > NEWEST_PTX) {
        return sim_error(UNSUPPORTED_PTX, "PTX %d.%d: the driver compiles up to %d.%d", major, minor,
                         NEWEST_PTX / 100, NEWEST_PTX % 100);
    }
    if (target > sim_settings_now().cuda_capability) {
        return sim_error(INVALID_PTX, "target sm_%d: the device is sm_%d", target,
                         (int)sim_settings_now().cuda_capability);
    }
    return 0;
}

/* Returns the text after ".entry name", or NULL. */
static const char *find_entry(const char *text, const char *name) {
    size_t length = strlen(name);
    while ((text = strstr(text, ".entry"))) {
        text += strlen(".entry");
        text += strspn(text, " \t\r\n");
        if (!strncmp(text, name, length) && !isalnum((unsigned char)text[length]) &&
            text[length] != '_' && text[length] != '$') {
            return text + length;
        }
    }
    return NULL;
}

static size_t size_of_type(const char *type) {
    const char *digits = type + strcspn(type, "0123456789");
    return (size_t)atoi(digits) / 8;
}

/* Returns the size of a declared parameter: ".param [.align n] .type name[count]". */
static size_t size_of_parameter(const char *text) {
    char type[16] = "", name[256] = "";
    int alignment;
    size_t count = 1;
    if (sscanf(text, ".param .align %d .%15s %255[^,)]", &alignment, type, name) != 3) {
        sscanf(text, ".param .%15s %255[^,)]", type, name);
    }
    const char *bracket = strchr(name, '[');
    if (bracket) {
        count = (size_t)atoll(bracket + 1);
    }
    return size_of_type(type) * count;
}

/* Aborts if the parameters differ from those in kernels.cpp: then the PTX was compiled from another source. */
static void check_parameters(const char *entry, const cuda_kernel *kernel) {
    const char *end = entry + strcspn(entry, ")");
    const char *at = entry;
    int count = 0;
    while ((at = strstr(at, ".param")) && at < end) {
        if (count >= kernel->num_parameters || size_of_parameter(at) != kernel->sizes[count]) {
            count = -1;
            break;
        }
        count++;
        at++;
    }
    if (count != kernel->num_parameters) {
        fprintf(stderr, "kvsim: the PTX of %s has other parameters than its source\n", kernel->name);
        abort();
    }
}

static unsigned find_max_threads(const char *entry) {
    const char *body = strchr(entry, '{');
    unsigned x = 0, y = 1, z = 1;
    for (const char *at = entry; body && at < body; at++) {
        if (sscanf(at, ".maxntid %u, %u, %u", &x, &y, &z) >= 1 ||
            sscanf(at, ".reqntid %u, %u, %u", &x, &y, &z) >= 1) {
            return x * y * z;
        }
    }
    return 0;
}

/* ---- modules ---- */

/* Writes to the caller's error log: CU_JIT_ERROR_LOG_BUFFER, of CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES. */
static void write_log(unsigned count, const int *options, void **values, int code) {
    char *buffer = NULL;
    size_t room = 0;
    for (unsigned i = 0; i < count; i++) {
        buffer = options[i] == 5 ? values[i] : buffer;
        room = options[i] == 6 ? (size_t)(uintptr_t)values[i] : room;
    }
    if (buffer && room) {
        snprintf(buffer, room, "%s", code ? "ptxas fatal   : the simulator refuses this text" : "");
    }
}

CUDA cuModuleLoadDataEx(void **out, const void *image, unsigned count, int *options, void **values) {
    sim_call call;
    cuda_context *context;
    char *text = NULL;
    int code = cuda_enter_context(&call, __func__, &context);
    code = CUDA_CHECK(code, out);
    code = CUDA_CHECK(code, image);
    if (!code && count && (!options || !values)) {
        code = sim_error(INVALID_VALUE, "numOptions=%u, but no options", count);
    }
    if (!code) {
        text = without_comments(image);
        code = check_image(text);
        write_log(count, options, values, code);
    }
    if (!code) {
        module *made = malloc(sizeof *made);
        if (!made) {
            abort();
        }
        *made = (module){sim_handle_new(), context, text, NULL};
        pthread_mutex_lock(&mutex);
        made->next = modules;
        modules = made;
        pthread_mutex_unlock(&mutex);
        sim_count(SIM_COUNT_MODULES, 1);
        *out = made->handle;
    } else {
        free(text);
    }
    return cuda_leave(&call, code, "\"module\":%llu", code ? 0 : ID(*out));
}

/* Call with the mutex held. */
static module *find_module(const void *handle) {
    module *it = modules;
    while (it && it->handle != handle) {
        it = it->next;
    }
    return it;
}

/* Drops the module and its functions. Call with the mutex held. */
static void drop(module *dropped) {
    for (function **link = &functions; *link;) {
        function *it = *link;
        if (it->module == dropped->handle) {
            *link = it->next;
            free(it);
        } else {
            link = &it->next;
        }
    }
    module **link = &modules;
    while (*link != dropped) {
        link = &(*link)->next;
    }
    *link = dropped->next;
    free(dropped->text);
    free(dropped);
    sim_count(SIM_COUNT_MODULES, -1);
}

void cuda_modules_drop(const cuda_context *context) {
    pthread_mutex_lock(&mutex);
    for (module *it = modules; it;) {
        module *next = it->next;
        if (it->context == context) {
            drop(it);
        }
        it = next;
    }
    pthread_mutex_unlock(&mutex);
}

CUDA cuModuleUnload(void *handle) {
    sim_call call;
    cuda_context *context;
    int code = cuda_enter_context(&call, __func__, &context);
    if (!code) {
        pthread_mutex_lock(&mutex);
        module *it = find_module(handle);
        if (it && it->context == context) {
            drop(it);
        } else {
            sim_violation("%p is unloaded, but is not a module of the context", handle);
            code = sim_error(INVALID_HANDLE, "%p is not a module of the context", handle);
        }
        pthread_mutex_unlock(&mutex);
    }
    return cuda_leave(&call, code, "\"module\":%llu", ID(handle));
}

CUDA cuModuleGetFunction(void **out, void *handle, const char *name) {
    sim_call call;
    cuda_context *context;
    int code = cuda_enter_context(&call, __func__, &context);
    code = CUDA_CHECK(code, out);
    code = CUDA_CHECK(code, name);
    pthread_mutex_lock(&mutex);
    const module *it = code ? NULL : find_module(handle);
    const char *entry = it ? find_entry(it->text, name) : NULL;
    if (!code && !it) {
        code = sim_error(INVALID_HANDLE, "%p is not a module", handle);
    } else if (!code && !entry) {
        code = sim_error(NOT_FOUND, "the module has no kernel %s", name);
    }
    if (!code) {
        const cuda_kernel *kernel = cuda_kernel_find(name);
        if (!kernel) {
            fprintf(stderr, "kvsim: there is no source of the kernel %s (kernels.cpp)\n", name);
            abort();
        }
        check_parameters(entry, kernel);
        function *made = malloc(sizeof *made);
        if (!made) {
            abort();
        }
        *made = (function){sim_handle_new(), handle, it->context, kernel, find_max_threads(entry), 0, functions};
        functions = made;
        *out = made->handle;
    }
    pthread_mutex_unlock(&mutex);
    return cuda_leave(&call, code, "\"function\":%llu", code ? 0 : ID(*out));
}

/* Call with the mutex held. */
static function *function_of(const void *handle) {
    function *it = functions;
    while (it && it->handle != handle) {
        it = it->next;
    }
    return it;
}

/* Without this call, the first launch loads the function: lazy loading is the default. */
CUDA cuFuncLoad(void *handle) {
    sim_call call;
    cuda_context *context;
    int code = cuda_enter_context(&call, __func__, &context);
    pthread_mutex_lock(&mutex);
    function *it = code ? NULL : function_of(handle);
    if (it) {
        it->is_loaded = 1;
    } else if (!code) {
        code = sim_error(INVALID_HANDLE, "%p is not a function", handle);
    }
    pthread_mutex_unlock(&mutex);
    return cuda_leave(&call, code, "\"function\":%llu", ID(handle));
}

/* ---- launches ---- */

typedef struct {
    const cuda_kernel *kernel;
    const cuda_context *context;
    unsigned num_blocks;
    unsigned num_threads;
    void *parameters[16]; /* copied values, all in one allocation */
} launch;

static int run(void *argument, sim_stream *stream) {
    const launch *work = argument;
    (void)stream;
    return cuda_kernel_run(work->kernel, work->context, work->num_blocks, work->num_threads,
                           work->parameters);
}

static void dispose(void *argument) {
    launch *work = argument;
    free(work->parameters[0]);
    free(work);
}

/* Copies the values, because the program may change them after the call. */
static int copy_parameters(launch *work, void **parameters) {
    const cuda_kernel *kernel = work->kernel;
    size_t nbytes = 0;
    for (int i = 0; i < kernel->num_parameters; i++) {
        if (!parameters || !parameters[i]) {
            return sim_error(INVALID_VALUE, "kernelParams[%d] is NULL", i);
        }
        nbytes += (kernel->sizes[i] + 15) / 16 * 16;
    }
    char *values = malloc(nbytes + 1);
    if (!values) {
        abort();
    }
    work->parameters[0] = values;
    for (int i = 0; i < kernel->num_parameters; i++) {
        work->parameters[i] = values;
        memcpy(values, parameters[i], kernel->sizes[i]);
        values += (kernel->sizes[i] + 15) / 16 * 16;
    }
    return 0;
}

static int check_shape(const unsigned grid[3], const unsigned block[3], unsigned shared) {
    unsigned long long threads = (unsigned long long)block[0] * block[1] * block[2];
    if (!grid[0] || grid[0] > 0x7FFFFFFF || !grid[1] || grid[1] > 65535 || !grid[2] || grid[2] > 65535) {
        return sim_error(INVALID_VALUE, "a grid of %u x %u x %u", grid[0], grid[1], grid[2]);
    }
    if (!threads || block[0] > 1024 || block[1] > 1024 || block[2] > 64 || threads > 1024) {
        return sim_error(INVALID_VALUE, "a block of %u x %u x %u", block[0], block[1], block[2]);
    }
    return shared > MAX_SHARED ? sim_error(INVALID_VALUE, "sharedMemBytes=%u", shared) : 0;
}

/* Refuses more threads than the PTX allows. Shapes that the source on the host does not support are violations. */
static int check_threads(const function *called, const unsigned grid[3], const unsigned block[3]) {
    unsigned threads = block[0] * block[1] * block[2];
    if (called->max_threads && threads > called->max_threads) {
        return sim_error(701, "%u threads: at most %u", threads, called->max_threads);
    }
    if ((called->max_threads && threads != called->max_threads) || block[1] * block[2] != 1 ||
        grid[1] * grid[2] != 1) {
        sim_violation("%s is launched with another shape than its source on the host has",
                      called->kernel->name);
    }
    return 0;
}

static int find_function(const void *handle, const cuda_context *context, function *found) {
    pthread_mutex_lock(&mutex);
    function *it = function_of(handle);
    if (it) {
        *found = *it;
        it->is_loaded = 1;
    }
    pthread_mutex_unlock(&mutex);
    if (it && !found->is_loaded && !sim_streams_are_idle(context->handle)) {
        sim_violation("%s is first launched while the context has work: to load it may wait for that: cuFuncLoad",
                      found->kernel->name);
    }
    if (!it || it->context != context) {
        sim_violation("%p is launched, but is not a function of the context", handle);
        return sim_error(INVALID_HANDLE, "%p is not a function of the context", handle);
    }
    return 0;
}

static int is_blocking(void) {
    const char *value = getenv("CUDA_LAUNCH_BLOCKING");
    return value && !strcmp(value, "1");
}

CUDA cuLaunchKernel(void *handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                    unsigned block_y, unsigned block_z, unsigned shared_nbytes, void *stream_handle,
                    void **parameters, void **extra) {
    sim_call call;
    cuda_context *context;
    sim_stream *stream = NULL;
    function called = {0};
    const unsigned grid[3] = {grid_x, grid_y, grid_z}, block[3] = {block_x, block_y, block_z};
    int code = cuda_enter_context(&call, __func__, &context);
    code = code ? code : find_function(handle, context, &called);
    code = code ? code : check_shape(grid, block, shared_nbytes);
    code = code ? code : check_threads(&called, grid, block);
    if (!code && extra) {
        code = sim_error(NOT_SUPPORTED, "extra: the simulator takes kernelParams");
    }
    code = code ? code : cuda_stream_find(context, stream_handle, &stream);
    if (!code) {
        launch *work = calloc(1, sizeof *work);
        if (!work) {
            abort();
        }
        *work = (launch){.kernel = called.kernel, .context = context, .num_blocks = grid_x,
                         .num_threads = block_x * block_y * block_z};
        code = copy_parameters(work, parameters);
        if (code) {
            free(work);
        } else {
            if (call.fault.kind == SIM_FAULT_PARTIAL) {
                work->num_blocks /= 2;
            }
            code = sim_stream_enqueue(stream, &call.fault, run, dispose, work, 1);
            code = code || !is_blocking() ? code : sim_stream_wait(stream, -1);
        }
    }
    if (stream) {
        sim_stream_release(stream);
    }
    return cuda_leave(&call, code, "\"kernel\":\"%s\",\"blocks\":%u,\"threads\":%u,\"stream\":%llu",
                      called.kernel ? called.kernel->name : "", grid_x, block_x, ID(stream_handle));
}
