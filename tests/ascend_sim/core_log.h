/* Functions of the log and of faults that only the core calls. */
#ifndef KVSIM_CORE_LOG_H
#define KVSIM_CORE_LOG_H

#include "sim.h"

/* Appends the log to the file from now on; "" stops logging. Returns -1 if the file cannot be opened. */
int sim_log_open(const char *path);
/* Writes the message to stderr and aborts. */
_Noreturn void sim_die(const char *format, ...) SIM_PRINTF(1, 2);
/* Counts a call of the function, and returns the fault of this call. */
sim_fault sim_fault_take(const char *name);

#endif
