/* The log's own interface inside the core. */
#ifndef KVSIM_CORE_LOG_H
#define KVSIM_CORE_LOG_H

#include "sim.h"

/* Writes to the file from now on; "" to none. 0, or -1 where it cannot be opened. */
int sim_log_open(const char *path);
/* Says why on stderr and ends the process. */
_Noreturn void sim_die(const char *format, ...) SIM_PRINTF(1, 2);
/* The fault of this call, if it is its turn. */
sim_fault sim_fault_take(const char *name);

#endif
