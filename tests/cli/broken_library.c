/* A library that is broken as BROKEN says: it aborts or hangs when it is loaded, or is an old UCX. */
#include <stdlib.h>
#include <unistd.h>

static void __attribute__((constructor)) begin(void)
{
    const char broken = getenv("BROKEN")[0];

    if (broken == 'h')
        for (;;)
            pause();
    if (broken == 'a')
        abort();
}

void ucp_get_version(unsigned *major, unsigned *minor, unsigned *release)
{
    *major = 1;
    *minor = 12;
    *release = 1;
}
