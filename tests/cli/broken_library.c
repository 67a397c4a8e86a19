/* A library that is broken in the way that BROKEN says, as soon as it is loaded. */
#include <stdlib.h>
#include <unistd.h>

static void __attribute__((constructor)) begin(void)
{
    if (getenv("BROKEN")[0] == 'h')
        for (;;)
            pause();
    abort();
}
