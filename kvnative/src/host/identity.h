/* Identifies processes by pid and start time, because a pid is reused. */
#ifndef KVN_IDENTITY_H
#define KVN_IDENTITY_H

#include <stdbool.h>
#include <stdint.h>

typedef uint64_t kvn_identity; /* start time, in clock ticks since boot, above 22 bits of pid */

kvn_identity kvn_identity_of(int pid);
int kvn_identity_pid(kvn_identity process);
/* Returns true if the process lives, or if that is unknown. */
bool kvn_identity_lives(kvn_identity process);
/* Returns true if a process has the file with this inode mapped, or if that is unknown. Executing another program
 * unmaps it. */
bool kvn_process_has_mapped(int pid, uint64_t inode);

#endif
