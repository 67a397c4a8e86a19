/* Settings: read from the environment when the library is loaded; a test may change them later. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "core_log.h"
#include "sim.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static sim_settings settings;

static int parse(const char *text, int64_t *value) {
    char *end;
    errno = 0;
    *value = strtoll(text, &end, 10);
    return errno || end == text || *end ? -1 : 0;
}

static int set_soc(const char *soc) {
    static const struct {
        const char *prefix;
        sim_product product;
    } PRODUCTS[] = {{"Ascend910_93", SIM_A3}, {"Ascend910B", SIM_A2}, {"Ascend950", SIM_950}};
    for (size_t i = 0; i < sizeof PRODUCTS / sizeof *PRODUCTS; i++) {
        if (!strncmp(soc, PRODUCTS[i].prefix, strlen(PRODUCTS[i].prefix)) &&
            strlen(soc) < sizeof settings.soc) {
            strcpy(settings.soc, soc);
            settings.product = PRODUCTS[i].product;
            return 0;
        }
    }
    return -1;
}

/* Only the devices in ASCEND_RT_VISIBLE_DEVICES are visible, in that order; without the variable, all are. */
static int set_devices(int64_t count) {
    if (count > 64) {
        return -1;
    }
    settings.num_devices = 0;
    const char *visible = getenv("ASCEND_RT_VISIBLE_DEVICES");
    if (!visible) {
        for (int i = 0; i < count; i++) {
            settings.physical[settings.num_devices++] = i;
        }
        return 0;
    }
    while (*visible && settings.num_devices < 64) {
        char *end;
        long number = strtol(visible, &end, 10);
        if (end == visible || number < 0 || number >= count) {
            break; /* the devices after the first invalid number are not visible, either */
        }
        settings.physical[settings.num_devices++] = (int)number;
        visible = *end == ',' ? end + 1 : end;
    }
    return 0;
}

static int set_directory(const char *path) {
    if (strlen(path) >= sizeof settings.directory) {
        return -1;
    }
    strcpy(settings.directory, path);
    return 0;
}

static int set_number(const char *name, int64_t value) {
    if (value < 0 && strcmp(name, "super_pod_id")) {
        return -1; /* only super_pod_id may be negative: outside of a super pod */
    }
    if (!strcmp(name, "devices")) {
        return set_devices(value);
    } else if (!strcmp(name, "hbm_bytes")) {
        settings.hbm_bytes = (uint64_t)value;
    } else if (!strcmp(name, "latency_us")) {
        settings.latency_us = value;
    } else if (!strcmp(name, "bandwidth")) {
        settings.bandwidth = (uint64_t)value;
    } else if (!strcmp(name, "seed")) {
        settings.seed = (uint64_t)value;
    } else if (!strcmp(name, "retry_us")) {
        settings.retry_us = value;
    } else if (!strcmp(name, "notify_us")) {
        settings.notify_us = value;
    } else if (!strcmp(name, "server_id")) {
        settings.server_id = value;
    } else if (!strcmp(name, "super_pod_id")) {
        settings.super_pod_id = value;
    } else if (!strcmp(name, "hdk")) {
        settings.hdk = value;
    } else if (!strcmp(name, "tls")) {
        settings.tls = value;
    } else if (!strcmp(name, "max_links")) {
        settings.max_links = value;
    } else if (!strcmp(name, "issue_blocks")) {
        settings.issue_blocks = value;
    } else if (!strcmp(name, "cuda_capability")) {
        settings.cuda_capability = value;
    } else if (!strcmp(name, "cuda_peers")) {
        settings.cuda_peers = value;
    } else if (!strcmp(name, "cuda_hidden")) {
        settings.cuda_hidden = value;
    } else if (!strcmp(name, "cuda_mig")) {
        settings.cuda_mig = value;
    } else if (!strcmp(name, "cuda_reuse")) {
        settings.cuda_reuse = value;
    } else if (!strcmp(name, "cuda_adjacent")) {
        settings.cuda_adjacent = value;
    } else if (!strcmp(name, "cuda_virtual")) {
        settings.cuda_virtual = value;
    } else if (!strcmp(name, "cuda_ipc")) {
        settings.cuda_ipc = value;
    } else if (!strcmp(name, "cuda_host_register")) {
        settings.cuda_host_register = value;
    } else if (!strcmp(name, "cuda_mps")) {
        settings.cuda_mps = value;
    } else if (!strcmp(name, "cuda_staged_us")) {
        settings.cuda_staged_us = value;
    } else if (!strcmp(name, "cuda_capture")) {
        settings.cuda_capture = value;
    } else if (!strcmp(name, "cuda_threads")) {
        settings.cuda_threads = value;
    } else if (!strcmp(name, "page_bytes")) {
        settings.page_bytes = (uint64_t)value;
    } else if (!strcmp(name, "page_table_bytes")) {
        settings.page_table_bytes = (uint64_t)value;
    } else {
        return -1;
    }
    return 0;
}

int kvsim_set(const char *name, const char *value) {
    if (!strcmp(name, "log")) {
        return sim_log_open(value);
    }
    if (!strcmp(name, "faults")) {
        return kvsim_fault_add(value);
    }
    pthread_mutex_lock(&mutex);
    int status;
    int64_t number;
    if (!strcmp(name, "soc")) {
        status = set_soc(value);
    } else if (!strcmp(name, "dir")) {
        status = set_directory(value);
    } else if (!strcmp(name, "device_ips")) {
        status = strlen(value) < sizeof settings.device_ips ? 0 : -1;
        if (!status) {
            strcpy(settings.device_ips, value);
        }
    } else {
        status = parse(value, &number) ? -1 : set_number(name, number);
    }
    pthread_mutex_unlock(&mutex);
    return status;
}

sim_settings sim_settings_now(void) {
    pthread_mutex_lock(&mutex);
    sim_settings copy = settings;
    pthread_mutex_unlock(&mutex);
    return copy;
}

/* Aborts on an invalid setting, so that no test runs with the default instead. */
__attribute__((constructor)) static void read_environment(void) {
    static const char *const ROWS[][3] = {
        {"soc", "KVSIM_SOC", "Ascend910B1"},
        {"devices", "KVSIM_DEVICES", "8"},
        {"hbm_bytes", "KVSIM_HBM_BYTES", "68719476736"},
        {"latency_us", "KVSIM_LATENCY_US", "0"},
        {"bandwidth", "KVSIM_BANDWIDTH", "0"},
        {"seed", "KVSIM_SEED", "1"},
        {"retry_us", "KVSIM_RETRY_US", "200000"},
        {"notify_us", "KVSIM_NOTIFY_US", "1836000000"},
        {"server_id", "KVSIM_SERVER_ID", "0"},
        {"super_pod_id", "KVSIM_SUPER_POD_ID", "0"},
        {"hdk", "KVSIM_HDK", "2505"},
        {"device_ips", "KVSIM_DEVICE_IPS", ""},
        {"tls", "KVSIM_TLS", "0"},
        {"max_links", "KVSIM_MAX_LINKS", "512"},
        {"issue_blocks", "KVSIM_ISSUE_BLOCKS", "0"},
        {"page_bytes", "KVSIM_PAGE_BYTES", "4096"},
        {"page_table_bytes", "KVSIM_PAGE_TABLE_BYTES", "1099511627776"},
        {"cuda_capability", "KVSIM_CUDA_CAPABILITY", "90"},
        {"cuda_peers", "KVSIM_CUDA_PEERS", "1"},
        {"cuda_hidden", "KVSIM_CUDA_HIDDEN", "1"},
        {"cuda_mig", "KVSIM_CUDA_MIG", "0"},
        {"cuda_reuse", "KVSIM_CUDA_REUSE", "0"},
        {"cuda_adjacent", "KVSIM_CUDA_ADJACENT", "0"},
        {"cuda_virtual", "KVSIM_CUDA_VIRTUAL", "1"},
        {"cuda_ipc", "KVSIM_CUDA_IPC", "1"},
        {"cuda_host_register", "KVSIM_CUDA_HOST_REGISTER", "1"},
        {"cuda_mps", "KVSIM_CUDA_MPS", "0"},
        {"cuda_staged_us", "KVSIM_CUDA_STAGED_US", "0"},
        {"cuda_capture", "KVSIM_CUDA_CAPTURE", "0"},
        {"cuda_threads", "KVSIM_CUDA_THREADS", "2"},
        {"dir", "KVSIM_DIR", ""},
        {"log", "KVSIM_LOG", ""},
        {"faults", "KVSIM_FAULTS", ""},
    };
    for (size_t i = 0; i < sizeof ROWS / sizeof *ROWS; i++) {
        const char *value = getenv(ROWS[i][1]);
        if (kvsim_set(ROWS[i][0], value ? value : ROWS[i][2])) {
            sim_die("%s=%s is not a value that the simulator knows", ROWS[i][1], value);
        }
    }
}
