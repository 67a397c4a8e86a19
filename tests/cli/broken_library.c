/* A library that is broken in the way that BROKEN says: as soon as it is loaded, or of an old UCX. */
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
