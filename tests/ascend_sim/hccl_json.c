#include "hccl_json.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DEPTH 16

typedef struct {
    const char *begin, *at;
    char *error;
    size_t error_size;
} reader;

static int parse_value(reader *r, json *out, int depth);

static int fail(reader *r, const char *what)
{
    snprintf(r->error, r->error_size, "character %zu: %s", (size_t)(r->at - r->begin), what);
    return -1;
}

static void skip_space(reader *r)
{
    while (*r->at == ' ' || *r->at == '\t' || *r->at == '\n' || *r->at == '\r')
        r->at++;
}

static int accept(reader *r, char character)
{
    skip_space(r);
    if (*r->at != character)
        return 0;
    r->at++;
    return 1;
}

static int parse_hex(reader *r, unsigned *out)
{
    *out = 0;
    for (int i = 0; i < 4; i++, r->at++) {
        const char c = *r->at;
        const int digit = c >= '0' && c <= '9'   ? c - '0'
                          : c >= 'a' && c <= 'f' ? c - 'a' + 10
                          : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                                 : -1;
        if (digit < 0)
            return fail(r, "\\u needs four hexadecimal digits");
        *out = *out * 16 + (unsigned)digit;
    }
    return 0;
}

/* Accepts \u escapes of a single UTF-16 unit except NUL: names and addresses need no others. */
static int parse_escape(reader *r, char **to)
{
    static const char from_letters[] = "\"\\/bfnrt", letters[] = "\"\\/\b\f\n\r\t";
    const char *found = *r->at ? strchr(from_letters, *r->at) : NULL;
    unsigned unit;
    if (found) {
        *(*to)++ = letters[found - from_letters];
        r->at++;
        return 0;
    }
    if (*r->at != 'u')
        return fail(r, "unknown escape");
    r->at++;
    if (parse_hex(r, &unit))
        return -1;
    if (unit == 0 || (unit >= 0xd800 && unit < 0xe000))
        return fail(r, "\\u0000 and surrogates are not taken");
    if (unit < 0x80) {
        *(*to)++ = (char)unit;
    } else if (unit < 0x800) {
        *(*to)++ = (char)(0xc0 | unit >> 6);
        *(*to)++ = (char)(0x80 | (unit & 0x3f));
    } else {
        *(*to)++ = (char)(0xe0 | unit >> 12);
        *(*to)++ = (char)(0x80 | (unit >> 6 & 0x3f));
        *(*to)++ = (char)(0x80 | (unit & 0x3f));
    }
    return 0;
}

static int parse_string(reader *r, char **out)
{
    const char *end = r->at + 1;
    char *to;
    if (*r->at != '"')
        return fail(r, "a string is expected");
    while (*end && *end != '"')
        end += end[0] == '\\' && end[1] ? 2 : 1;
    to = *out = malloc((size_t)(end - r->at) + 1);
    if (!to)
        return fail(r, "no memory");
    r->at++;
    *to = '\0';
    while (*r->at != '"') {
        const unsigned char c = (unsigned char)*r->at;
        if (c < 0x20) {
            *to = '\0';
            return fail(r, c ? "a control character in a string" : "a string does not end");
        }
        r->at++;
        if (c != '\\')
            *to++ = (char)c;
        else if (parse_escape(r, &to)) {
            *to = '\0';
            return -1;
        }
    }
    r->at++;
    *to = '\0';
    return 0;
}

static int parse_number(reader *r, json *out)
{
    const char *from = r->at;
    if (*r->at == '-')
        r->at++;
    const char *digits = r->at;
    while (*r->at >= '0' && *r->at <= '9')
        r->at++;
    if (r->at == digits || (*digits == '0' && r->at - digits > 1))
        return fail(r, "not a value");
    if (*r->at == '.') {
        digits = ++r->at;
        while (*r->at >= '0' && *r->at <= '9')
            r->at++;
        if (r->at == digits)
            return fail(r, "a digit is expected");
    }
    if (*r->at == 'e' || *r->at == 'E') {
        r->at++;
        if (*r->at == '+' || *r->at == '-')
            r->at++;
        digits = r->at;
        while (*r->at >= '0' && *r->at <= '9')
            r->at++;
        if (r->at == digits)
            return fail(r, "a digit is expected");
    }
    out->kind = JSON_NUMBER;
    out->text = strndup(from, (size_t)(r->at - from));
    return out->text ? 0 : fail(r, "no memory");
}

static json *add_item(json *out)
{
    json *grown = realloc(out->items, (out->num_items + 1) * sizeof(json));
    if (!grown)
        return NULL;
    out->items = grown;
    return memset(&grown[out->num_items++], 0, sizeof(json));
}

static int parse_member(reader *r, json *out, json *item)
{
    skip_space(r);
    if (parse_string(r, &item->key))
        return -1;
    for (json *other = out->items; other < item; other++)
        if (strcmp(other->key, item->key) == 0)
            return fail(r, "a key twice");
    return accept(r, ':') ? 0 : fail(r, "':' is expected");
}

static int parse_items(reader *r, json *out, char end, int depth)
{
    r->at++;
    if (depth >= MAX_DEPTH)
        return fail(r, "too many levels");
    if (accept(r, end))
        return 0;
    do {
        json *item = add_item(out);
        if (!item)
            return fail(r, "no memory");
        if (out->kind == JSON_OBJECT && parse_member(r, out, item))
            return -1;
        if (parse_value(r, item, depth + 1))
            return -1;
    } while (accept(r, ','));
    return accept(r, end) ? 0 : fail(r, "',' or the end of the list is expected");
}

static int parse_word(reader *r, json *out)
{
    static const char *const words[] = {"null", "true", "false"};
    for (size_t i = 0; i < 3; i++) {
        const size_t length = strlen(words[i]);
        if (strncmp(r->at, words[i], length) == 0) {
            r->at += length;
            out->kind = i ? JSON_BOOLEAN : JSON_NULL;
            return 0;
        }
    }
    return parse_number(r, out);
}

static int parse_value(reader *r, json *out, int depth)
{
    skip_space(r);
    switch (*r->at) {
    case '{':
        out->kind = JSON_OBJECT;
        return parse_items(r, out, '}', depth);
    case '[':
        out->kind = JSON_ARRAY;
        return parse_items(r, out, ']', depth);
    case '"':
        out->kind = JSON_STRING;
        return parse_string(r, &out->text);
    default:
        return parse_word(r, out);
    }
}

int json_parse(const char *text, json *out, char *error, size_t error_size)
{
    reader r = {.begin = text, .at = text, .error = error, .error_size = error_size};
    memset(out, 0, sizeof *out);
    if (parse_value(&r, out, 0))
        return -1;
    skip_space(&r);
    return *r.at ? fail(&r, "text after the value") : 0;
}

void json_free(json *value)
{
    for (size_t i = 0; i < value->num_items; i++)
        json_free(&value->items[i]);
    free(value->items);
    free(value->key);
    free(value->text);
    memset(value, 0, sizeof *value);
}

const json *json_member(const json *object, const char *key)
{
    if (!object || object->kind != JSON_OBJECT)
        return NULL;
    for (size_t i = 0; i < object->num_items; i++)
        if (strcmp(object->items[i].key, key) == 0)
            return &object->items[i];
    return NULL;
}
