#include "ucx/environ.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool kvn_ucx_environ_add(kvn_ucx_environ *self, const char *const *variables, size_t count)
{
    size_t num_before = 0;

    self->before = environ;
    while (environ && environ[num_before])
        num_before++;
    self->ours = calloc(count + num_before + 1, sizeof *self->ours);
    if (!self->ours)
        return false;
    memcpy(self->ours, variables, count * sizeof *variables);
    memcpy(self->ours + count, self->before, num_before * sizeof *self->ours);
    __atomic_store_n(&environ, self->ours, __ATOMIC_SEQ_CST);
    return true;
}

void kvn_ucx_environ_restore(kvn_ucx_environ *self)
{
    char **ours = self->ours;

    __atomic_compare_exchange_n(&environ, &ours, self->before, false, __ATOMIC_SEQ_CST,
                                __ATOMIC_SEQ_CST);
}
