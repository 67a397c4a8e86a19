/*
 * The network port of a device, for communicators over RDMA: its address, which may differ from that in the
 * rank table, and the port of its sockets, which only one process can use.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "hccl_sim.h"

#define DEFAULT_PORT 16666u

struct nic {
    nic *next;
    char name[80];
    int fd;
    unsigned uses;
};

static nic *nics; /* guarded by hccl_mutex */

HcclResult nic_check_environment(hccl_call *call)
{
    const char *timeout = getenv("HCCL_CONNECT_TIMEOUT");
    if (timeout && *timeout && /* no document says whether HCCL refuses an empty value */
        (strspn(timeout, "0123456789") != strlen(timeout) || atoi(timeout) < 120 || atoi(timeout) > 7200))
        return hccl_refuse(call, HCCL_E_PARA, "HCCL_CONNECT_TIMEOUT is %s; it must be in [120, 7200]", timeout);
    const char *pcie = getenv("HCCL_INTRA_PCIE_ENABLE"), *roce = getenv("HCCL_INTRA_ROCE_ENABLE");
    const int with_pcie = pcie && strcmp(pcie, "1") == 0, with_roce = roce && strcmp(roce, "1") == 0;
    if ((pcie && roce && with_pcie && with_roce) || (pcie && !roce && !with_pcie) ||
        (roce && !pcie && !with_roce))
        return hccl_refuse(call, HCCL_E_PARA, "HCCL_INTRA_PCIE_ENABLE is %s, HCCL_INTRA_ROCE_ENABLE is %s",
                           pcie ? pcie : "not set", roce ? roce : "not set");
    return HCCL_SUCCESS;
}

/* Devices of a host (A2) or super pod (A3) share memory over HCCS; others use RDMA. */
int nic_is_hccs(const comm *c)
{
    const table_rank *ranks = c->table.ranks;
    const char *rdma = getenv("HCCL_INTRA_ROCE_ENABLE");
    if (rdma && strcmp(rdma, "1") == 0)
        return 0;
    return c->product == SIM_A3 && c->table.super_pods
               ? strcmp(ranks[0].super_pod_id, ranks[1].super_pod_id) == 0
               : strcmp(ranks[0].server_id, ranks[1].server_id) == 0;
}

/* Returns 1 if KVSIM_DEVICE_IPS is empty, or has the rank's address at the place of its device. */
static int has_address(const table_rank *rank)
{
    sim_settings settings = sim_settings_now();
    char *rest = settings.device_ips;
    if (!*rest)
        return 1;
    for (uint32_t i = 0; i < rank->device_id && rest; i++)
        strsep(&rest, ",");
    const char *now = strsep(&rest, ",");
    return now && strcmp(now, rank->device_ip) == 0;
}

static int listen_at(const char *name)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int written =
        snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "%s", name);
    const socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)written);
    if (fd >= 0 && bind(fd, (const struct sockaddr *)&address, size) == 0)
        return fd;
    if (fd >= 0)
        close(fd);
    return -1;
}

HcclResult nic_open(hccl_call *call, comm *c)
{
    const table_rank *rank = &c->table.ranks[c->rank];
    const sim_settings settings = sim_settings_now();
    const unsigned port = rank->device_port ? rank->device_port : DEFAULT_PORT;
    char name[80];
    if (nic_is_hccs(c) || c->nic)
        return HCCL_SUCCESS;
    if (!has_address(rank))
        return hccl_refuse(call, HCCL_E_INTERNAL, "ra rdma init fail: phyId[%u]", rank->device_id);
    snprintf(name, sizeof name, "kvsim-nic-%u-%016llx-%s-%u", getuid(),
             (unsigned long long)table_hash(settings.directory, strlen(settings.directory)),
             rank->device_ip, port);
    for (nic *it = nics; it && !c->nic; it = it->next)
        if (strcmp(it->name, name) == 0)
            c->nic = it;
    if (!c->nic) {
        const int fd = listen_at(name);
        nic *made = fd >= 0 ? calloc(1, sizeof *made) : NULL;
        if (!made)
            return hccl_refuse(call, HCCL_E_UNAVAIL, "EI0020: The IP address %s and port %u have already been "
                               "bound", rank->device_ip, port);
        strcpy(made->name, name);
        made->fd = fd;
        made->next = nics;
        c->nic = nics = made;
    }
    c->nic->uses++;
    return HCCL_SUCCESS;
}

void nic_close(comm *c)
{
    nic **at = &nics;
    if (c->nic && --c->nic->uses == 0) {
        while (*at != c->nic)
            at = &(*at)->next;
        *at = c->nic->next;
        close(c->nic->fd);
        free(c->nic);
    }
    c->nic = NULL;
}
