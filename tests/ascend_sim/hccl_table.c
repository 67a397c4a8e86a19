/*
 * Stricter than the library: refuses fields that the library ignores, because kvplan generates the tables, and so an
 * unknown field is a bug.
 */
#include "hccl_table.h"

#include <arpa/inet.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hccl_json.h"

#define MAX_DEVICE_ID 63
#define FORMAT(f, first) __attribute__((format(printf, f, first)))

typedef struct {
    rank_table *table;
    sim_product product;
    int version; /* 10, 12 */
    unsigned seen; /* a bit for each rank_id */
    char *error;
    size_t error_size;
} reader;

static int FORMAT(2, 3) fail(reader *r, const char *text, ...)
{
    va_list arguments;
    va_start(arguments, text);
    vsnprintf(r->error, r->error_size, text, arguments);
    va_end(arguments);
    return -1;
}

uint64_t table_hash(const void *bytes, size_t nbytes)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < nbytes; i++)
        hash = (hash ^ ((const unsigned char *)bytes)[i]) * UINT64_C(0x100000001b3);
    return hash;
}

static int check_keys(reader *r, const json *object, const char *where, const char *known)
{
    if (object->kind != JSON_OBJECT)
        return fail(r, "%s is not an object", where);
    for (size_t i = 0; i < object->num_items; i++) {
        char bounded[80];
        snprintf(bounded, sizeof bounded, " %s ", object->items[i].key);
        if (strchr(object->items[i].key, ' ') || !strstr(known, bounded))
            return fail(r, "%s has an unknown field \"%s\"", where, object->items[i].key);
    }
    return 0;
}

/* Reads a string of 1 to `size` - 1 characters. A field that is not `required` may be missing. */
static int read_text(reader *r, const json *object, const char *key, int required, char *out,
                     size_t size)
{
    const json *value = json_member(object, key);
    *out = '\0';
    if (!value)
        return required ? fail(r, "\"%s\" is missing", key) : 0;
    if (value->kind != JSON_STRING)
        return fail(r, "\"%s\" is not a string", key);
    if (!*value->text || strlen(value->text) >= size)
        return fail(r, "\"%s\" has %zu characters; it must have 1 to %zu", key, strlen(value->text),
                    size - 1);
    strcpy(out, value->text);
    return 0;
}

static int read_count(reader *r, const json *object, const char *key, uint64_t maximum,
                      uint32_t *out)
{
    char text[12], *end;
    if (read_text(r, object, key, 1, text, sizeof text))
        return -1;
    const unsigned long long value = strtoull(text, &end, 10);
    if (*end || text[0] < '0' || text[0] > '9' || (text[0] == '0' && text[1]) || value > maximum)
        return fail(r, "\"%s\" is \"%s\"; it must be a decimal number in [0, %llu]", key, text,
                    (unsigned long long)maximum);
    *out = (uint32_t)value;
    return 0;
}

static int read_list(reader *r, const json *object, const char *key, const json **out)
{
    *out = json_member(object, key);
    if (!*out || (*out)->kind != JSON_ARRAY || !(*out)->num_items)
        return fail(r, "\"%s\" is not a list with items", key);
    return 0;
}

static int is_address(const char *text)
{
    unsigned char address[16];
    return inet_pton(AF_INET, text, address) == 1 || inet_pton(AF_INET6, text, address) == 1;
}

static int read_device(reader *r, const json *device, const char *server_id)
{
    table_rank rank = {.super_device_id = UINT32_MAX};
    uint32_t rank_id;
    strcpy(rank.server_id, server_id);
    if (check_keys(r, device, "a device",
                   r->version == 12
                       ? " device_id device_ip device_port rank_id super_device_id "
                       : " device_id device_ip device_port rank_id ") ||
        read_count(r, device, "rank_id", TABLE_RANKS - 1, &rank_id) ||
        read_count(r, device, "device_id", MAX_DEVICE_ID, &rank.device_id) ||
        read_text(r, device, "device_ip", 0, rank.device_ip, sizeof rank.device_ip))
        return -1;
    if (*rank.device_ip && !is_address(rank.device_ip))
        return fail(r, "\"device_ip\" is \"%s\"; it must be an IP address", rank.device_ip);
    if (json_member(device, "device_port") &&
        (read_count(r, device, "device_port", 65535, &rank.device_port) || !rank.device_port))
        return *r->error ? -1 : fail(r, "\"device_port\" is 0");
    if (r->version == 12 &&
        read_count(r, device, "super_device_id", UINT32_MAX - 1, &rank.super_device_id))
        return -1;
    if (r->seen & 1u << rank_id)
        return fail(r, "\"rank_id\" %u twice", rank_id);
    r->seen |= 1u << rank_id;
    r->table->ranks[rank_id] = rank;
    return 0;
}

static int read_servers(reader *r, const json *root)
{
    const json *servers, *devices;
    char ids[TABLE_RANKS][65];
    if (read_list(r, root, "server_list", &servers) ||
        read_count(r, root, "server_count", TABLE_RANKS, &r->table->num_servers))
        return -1;
    if (servers->num_items != r->table->num_servers)
        return fail(r, "\"server_count\" is %u and \"server_list\" has %zu", r->table->num_servers,
                    servers->num_items);
    for (size_t i = 0; i < servers->num_items; i++) {
        const json *server = &servers->items[i];
        if (check_keys(r, server, "a server", " server_id device ") ||
            read_text(r, server, "server_id", 1, ids[i], sizeof ids[i]) ||
            read_list(r, server, "device", &devices))
            return -1;
        if (i && strcmp(ids[0], ids[1]) == 0)
            return fail(r, "\"server_id\" \"%s\" twice", ids[0]);
        for (size_t k = 0; k < devices->num_items; k++)
            if (read_device(r, &devices->items[k], ids[i]))
                return -1;
    }
    return r->seen == (1u << TABLE_RANKS) - 1
               ? 0
               : fail(r, "the simulator takes two ranks, \"0\" and \"1\"");
}

static int place_server(reader *r, const json *server, const char *super_pod_id)
{
    char server_id[65];
    int found = 0;
    if (check_keys(r, server, "a server of a super pod", " server_id ") ||
        read_text(r, server, "server_id", 1, server_id, sizeof server_id))
        return -1;
    for (int i = 0; i < TABLE_RANKS; i++) {
        table_rank *rank = &r->table->ranks[i];
        if (strcmp(rank->server_id, server_id))
            continue;
        if (*rank->super_pod_id)
            return fail(r, "server \"%s\" is in two super pods, or twice in one", server_id);
        strcpy(rank->super_pod_id, super_pod_id);
        found = 1;
    }
    return found ? 0 : fail(r, "\"super_pod_list\" has \"%s\", \"server_list\" has not", server_id);
}

static int read_super_pods(reader *r, const json *root)
{
    const json *pods, *servers;
    char ids[TABLE_RANKS][65];
    table_rank *ranks = r->table->ranks;
    if (read_list(r, root, "super_pod_list", &pods))
        return -1;
    if (pods->num_items > TABLE_RANKS)
        return fail(r, "\"super_pod_list\" has more items than there are ranks");
    for (size_t i = 0; i < pods->num_items; i++) {
        const json *pod = &pods->items[i];
        if (check_keys(r, pod, "a super pod", " super_pod_id server_list ") ||
            read_text(r, pod, "super_pod_id", 1, ids[i], sizeof ids[i]) ||
            read_list(r, pod, "server_list", &servers))
            return -1;
        if (i && strcmp(ids[0], ids[1]) == 0)
            return fail(r, "\"super_pod_id\" \"%s\" twice", ids[0]);
        for (size_t k = 0; k < servers->num_items; k++)
            if (place_server(r, &servers->items[k], ids[i]))
                return -1;
    }
    for (int i = 0; i < TABLE_RANKS; i++)
        if (!*ranks[i].super_pod_id)
            return fail(r, "server \"%s\" is in no super pod", ranks[i].server_id);
    if (strcmp(ranks[0].super_pod_id, ranks[1].super_pod_id) == 0 &&
        ranks[0].super_device_id == ranks[1].super_device_id)
        return fail(r, "\"super_device_id\" %u twice in a super pod", ranks[0].super_device_id);
    return 0;
}

/* Checks constraints between the ranks. */
static int check_ranks(reader *r)
{
    const table_rank *first = &r->table->ranks[0], *second = &r->table->ranks[1];
    const int same_server = strcmp(first->server_id, second->server_id) == 0;
    const int same_pod =
        r->version == 12 && strcmp(first->super_pod_id, second->super_pod_id) == 0;
    if (same_server && first->device_id == second->device_id)
        return fail(r, "\"device_id\" %u twice on server \"%s\"", first->device_id,
                    first->server_id);
    if (!*first->device_ip != !*second->device_ip)
        return fail(r, "\"device_ip\" is given for one rank and not for the other");
    if (*first->device_ip && !strchr(first->device_ip, ':') != !strchr(second->device_ip, ':'))
        return fail(r, "\"device_ip\" is of IPv4 for one rank and of IPv6 for the other");
    if (*first->device_ip && strcmp(first->device_ip, second->device_ip) == 0)
        return fail(r, "\"device_ip\" \"%s\" twice", first->device_ip);
    if (!*first->device_ip && !same_server && !same_pod)
        return fail(r, "\"device_ip\" is missing; it must be given for ranks on two servers");
    return 0;
}

static int read_root(reader *r, const json *root)
{
    char text[16];
    if (check_keys(r, root, "the table",
                   " version server_count server_list super_pod_list status ") ||
        read_text(r, root, "version", 1, text, sizeof text))
        return -1;
    r->version = strcmp(text, "1.0") == 0 ? 10 : strcmp(text, "1.2") == 0 ? 12 : 0;
    if (!r->version)
        return fail(r, "\"version\" is \"%s\"; it must be \"1.0\" or \"1.2\"", text);
    if (r->version == 12 && r->product == SIM_A2)
        return fail(r, "\"version\" is \"1.2\"; this product has no super pods and takes \"1.0\"");
    if (read_text(r, root, "status", 1, text, sizeof text))
        return -1;
    if (strcmp(text, "completed"))
        return fail(r, "\"status\" is \"%s\"; it must be \"completed\"", text);
    if (r->version == 10 && json_member(root, "super_pod_list"))
        return fail(r, "\"super_pod_list\" in a table of version 1.0");
    if (read_servers(r, root) || (r->version == 12 && read_super_pods(r, root)))
        return -1;
    return check_ranks(r);
}

int table_parse(const char *text, sim_product product, rank_table *out, char *error,
                size_t error_size)
{
    json root;
    int failed;
    memset(out, 0, sizeof *out);
    *error = '\0';
    reader r = {.table = out, .product = product, .error = error, .error_size = error_size};
    failed = json_parse(text, &root, error, error_size) || read_root(&r, &root);
    json_free(&root);
    out->super_pods = r.version == 12;
    out->hash = table_hash(text, strlen(text));
    return failed ? -1 : 0;
}
