/* A strict reader of JSON (RFC 8259, no duplicate keys, no more than 16 levels). */
#ifndef KVSIM_HCCL_JSON_H
#define KVSIM_HCCL_JSON_H

#include <stddef.h>

typedef enum { JSON_NULL, JSON_BOOLEAN, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } json_kind;

typedef struct json {
    json_kind kind;
    char *key;  /* of a member of an object */
    char *text; /* of a string, or a number as it was written */
    struct json *items;
    size_t num_items;
} json;

/* Returns 0, or -1 and an error text. The caller calls json_free in both cases. */
int json_parse(const char *text, json *out, char *error, size_t error_size);
void json_free(json *value);
/* Returns the member, or NULL if it does not exist or the value is not an object. */
const json *json_member(const json *object, const char *key);

#endif
