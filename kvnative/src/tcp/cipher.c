/* Encrypts and authenticates the records of TCP connections by OpenSSL's AES-GCM. */
#include "tcp/cipher.h"

#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "core/library.h"

#define SYMBOL(name) {#name, offsetof(kvn_tcp_crypto, name), false, false}

enum { GET_TAG = 0x10, SET_TAG = 0x11 }; /* EVP_CTRL_AEAD_ */

/* At most 128 MiB for one key, far below the limits of GCM. */
#define RECORDS_OF_KEY 4096u

static const kvn_symbol symbols[] = {
    SYMBOL(EVP_CIPHER_CTX_new), SYMBOL(EVP_CIPHER_CTX_free), SYMBOL(EVP_CIPHER_CTX_ctrl),
    SYMBOL(EVP_CipherInit_ex),  SYMBOL(EVP_CipherUpdate),    SYMBOL(EVP_CipherFinal_ex),
    SYMBOL(EVP_aes_128_gcm),    SYMBOL(EVP_sha256),          SYMBOL(HMAC),
};

int kvn_tcp_crypto_open(kvn_tcp_crypto *out, kvn_failure *failure)
{
    char here = 0;
    const struct iovec part = {&here, 1};
    kvn_failure refusal;
    void *file = kvn_library_open("libcrypto.so.3", RTLD_NOW | RTLD_NODELETE, &refusal);
    const char *missing;

    if (!file)
        file = kvn_library_open("libcrypto.so.1.1", RTLD_NOW | RTLD_NODELETE, &refusal);
    if (!file)
        return kvn_fail(failure, KVN_UNSUPPORTED, 0,
                        "encryption needs OpenSSL's libcrypto.so.3 or libcrypto.so.1.1: %s",
                        refusal.message);
    missing = kvn_library_fill(&file, 1, &(kvn_symbols){symbols, KVN_COUNT_OF(symbols)}, out);
    if (missing)
        return kvn_fail(failure, KVN_UNSUPPORTED, 0, "the libcrypto that was found lacks %s", missing);
    if (process_vm_readv(getpid(), &part, 1, &part, 1, 0) != 1)
        return kvn_fail(failure, KVN_UNSUPPORTED, errno,
                        "encryption needs process_vm_readv and process_vm_writev: %s",
                        strerror(errno));
    return KVN_OK;
}

bool kvn_tcp_cipher_init(kvn_tcp_cipher *self, const kvn_tcp_crypto *calls, const uint8_t *secret,
                         kvn_tcp_direction direction, bool seals)
{
    *self = (kvn_tcp_cipher){.calls = *calls, .direction = direction, .seals = seals};
    memcpy(self->secret, secret, sizeof self->secret);
    self->context = calls->EVP_CIPHER_CTX_new();
    return self->context != NULL;
}

void kvn_tcp_cipher_fini(kvn_tcp_cipher *self)
{
    if (self->context)
        self->calls.EVP_CIPHER_CTX_free(self->context); /* also wipes its key */
    explicit_bzero(self, sizeof *self);
}

/* Derives the key and the first nonce of the next records: one block of HKDF-Expand. The secret is an HMAC already, and
 * its other uses (control/data_streams.py) have other labels. */
static bool change_key(kvn_tcp_cipher *self)
{
    struct {
        char purpose[16];
        kvn_tcp_direction direction;
        uint8_t reserved[6];
        uint64_t number;
    } label = {"kvplan tcp keys", self->direction, {0}, self->count / RECORDS_OF_KEY};
    uint8_t made[32];
    unsigned nbytes = 0;
    bool is_set;

    _Static_assert(sizeof label == 32, "no padding");
    is_set = self->calls.HMAC(self->calls.EVP_sha256(), self->secret, sizeof self->secret,
                              (const uint8_t *)&label, sizeof label, made, &nbytes) &&
             nbytes == sizeof made &&
             self->calls.EVP_CipherInit_ex(self->context, self->calls.EVP_aes_128_gcm(), NULL, made,
                                           NULL, self->seals) == 1;
    memcpy(self->nonce, made + 16, sizeof self->nonce);
    explicit_bzero(made, sizeof made);
    return is_set;
}

int kvn_tcp_cipher_next(kvn_tcp_cipher *self, const uint8_t *header, size_t header_nbytes,
                        uint8_t *bytes, size_t nbytes, uint8_t tag[KVN_TCP_TAG_NBYTES])
{
    const kvn_tcp_crypto *calls = &self->calls;
    uint8_t nonce[sizeof self->nonce];
    int out;

    if (self->count == UINT64_MAX)
        return -EOVERFLOW;
    if (self->count % RECORDS_OF_KEY == 0 && !change_key(self))
        return -EIO;
    memcpy(nonce, self->nonce, sizeof nonce);
    for (unsigned i = 0; i < sizeof self->count; i++)
        nonce[i] ^= (uint8_t)(self->count >> 8 * i);
    self->count++; /* also on failure: a nonce is never reused */
    if (calls->EVP_CipherInit_ex(self->context, NULL, NULL, NULL, nonce, -1) != 1 ||
        calls->EVP_CipherUpdate(self->context, NULL, &out, header, (int)header_nbytes) != 1 ||
        calls->EVP_CipherUpdate(self->context, bytes, &out, bytes, (int)nbytes) != 1)
        return -EIO;
    if (!self->seals &&
        calls->EVP_CIPHER_CTX_ctrl(self->context, SET_TAG, KVN_TCP_TAG_NBYTES, tag) != 1)
        return -EIO;
    if (calls->EVP_CipherFinal_ex(self->context, bytes + nbytes, &out) != 1)
        return self->seals ? -EIO : -EBADMSG;
    if (self->seals &&
        calls->EVP_CIPHER_CTX_ctrl(self->context, GET_TAG, KVN_TCP_TAG_NBYTES, tag) != 1)
        return -EIO;
    return 0;
}
