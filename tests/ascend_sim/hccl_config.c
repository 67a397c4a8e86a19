#include <string.h>

#include "hccl_sim.h"

/* Stricter than the library, which also accepts longer records: kvplan sends only this version. */
HcclResult config_check(hccl_call *call, const void *record, HcclCommConfig5 *out)
{
    memcpy(out, record, sizeof out->head);
    if (out->head.size != HCCL_CONFIG_SIZE || out->head.version != HCCL_CONFIG_VERSION)
        return hccl_refuse(call, HCCL_E_PARA, "config is %llu bytes of version %u; it must be 300 of 5",
                           (unsigned long long)out->head.size, out->head.version);
    memcpy(out, record, HCCL_CONFIG_SIZE);
    if (out->head.magic != HCCL_CONFIG_MAGIC || out->head.zero)
        return hccl_refuse(call, HCCL_E_PARA, "config has magic 0x%x and %llu after the version",
                           out->head.magic, (unsigned long long)out->head.zero);
    if (!memchr(out->commName, 0, sizeof out->commName) || !*out->commName)
        return hccl_refuse(call, HCCL_E_PARA, "config has a name of 0 or of more than 127 characters");
    if (!memchr(out->udi, 0, sizeof out->udi))
        return hccl_refuse(call, HCCL_E_PARA, "config has a udi of more than 127 characters");
    for (const char *at = out->commName; *at; at++)
        if (*at <= ' ' || *at == '"' || *at == '\\' || *at > '~')
            return hccl_refuse(call, HCCL_E_PARA, "config has character 0x%02x in the name",
                               (unsigned char)*at);
    if (!out->bufferSizeMB)
        return hccl_refuse(call, HCCL_E_PARA, "config has a buffer of 0 MB");
    if (out->deterministic > 1 && out->deterministic != HCCL_NOT_SET)
        return hccl_refuse(call, HCCL_E_PARA, "config has deterministic %u", out->deterministic);
    if (out->opExpansionMode > 4)
        return hccl_refuse(call, HCCL_E_PARA, "config has opExpansionMode %u", out->opExpansionMode);
    if (out->rdmaTrafficClass != HCCL_NOT_SET &&
        (out->rdmaTrafficClass > 255 || out->rdmaTrafficClass % 4))
        return hccl_refuse(call, HCCL_E_PARA,
                           "config has traffic class %u; it must be a multiple of 4 in [0, 255]",
                           out->rdmaTrafficClass);
    if (out->rdmaServiceLevel != HCCL_NOT_SET && out->rdmaServiceLevel > 7)
        return hccl_refuse(call, HCCL_E_PARA, "config has service level %u; it must be in [0, 7]",
                           out->rdmaServiceLevel);
    return HCCL_SUCCESS;
}
