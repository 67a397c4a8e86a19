#include <stdio.h>
#include <sys/stat.h>

#include "ucx_line.h"

#define MAX_DEPTH 4 /* the kernel's own */

static bool is_socket(int file)
{
    struct stat found;
    return fstat(file, &found) == 0 && S_ISSOCK(found.st_mode);
}

static size_t collect(int set, int *out, size_t room, int depth)
{
    char path[64], line[256];
    size_t count = 0;
    int file;

    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", set);
    FILE *text = fopen(path, "re");
    if (!text)
        return 0;
    while (count < room && fgets(line, sizeof line, text))
        if (sscanf(line, "tfd: %d", &file) == 1) {
            if (is_socket(file))
                out[count++] = file;
            else if (depth < MAX_DEPTH)
                count += collect(file, out + count, room - count, depth + 1);
        }
    fclose(text);
    return count;
}

size_t kvn_ucx_sockets(int set, int *out, size_t room) { return collect(set, out, room, 0); }
