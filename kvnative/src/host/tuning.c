#include "host/tuning.h"

#define BYPASS_NBYTES (16u << 20)
#define PIECE_NBYTES (512u << 10)

void kvn_tuning_builtin(kvn_tuning *tuning)
{
    *tuning = (kvn_tuning){
        .cached = KVN_COPY_MEMCPY,
        .bypassing = kvn_widest_non_temporal(),
        .bypass_nbytes = BYPASS_NBYTES,
        .piece_nbytes = PIECE_NBYTES,
    };
}
