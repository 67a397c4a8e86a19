/* AES-128-GCM by the system's libcrypto, which is opened on demand: seals the records that one end of a connection
 * sends, and opens them at the other. Keys are derived from a secret that comes over a control connection. Its
 * encryption (Curve25519) has 128 bits of strength, so longer keys would add none. */
#ifndef KVN_TCP_CIPHER_H
#define KVN_TCP_CIPHER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/failure.h"

#define KVN_TCP_SECRET_NBYTES 32u
#define KVN_TCP_TAG_NBYTES 16u

/* The used calls of libcrypto, the same in 1.1 and 3. */
typedef struct kvn_tcp_crypto {
    void *(*EVP_CIPHER_CTX_new)(void);
    void (*EVP_CIPHER_CTX_free)(void *context);
    int (*EVP_CIPHER_CTX_ctrl)(void *context, int type, int number, void *pointer);
    int (*EVP_CipherInit_ex)(void *context, const void *type, void *engine, const uint8_t *key,
                             const uint8_t *nonce, int encrypts);
    int (*EVP_CipherUpdate)(void *context, uint8_t *out, int *out_nbytes, const uint8_t *in,
                            int nbytes);
    int (*EVP_CipherFinal_ex)(void *context, uint8_t *out, int *out_nbytes);
    const void *(*EVP_aes_128_gcm)(void);
    const void *(*EVP_sha256)(void);
    uint8_t *(*HMAC)(const void *type, const void *key, int key_nbytes, const uint8_t *data,
                     size_t nbytes, uint8_t *out, unsigned *out_nbytes);
} kvn_tcp_crypto;

/* The purpose of derived keys: one direction of one connection of a link. */
typedef struct kvn_tcp_direction {
    uint8_t connection; /* index, as counted by the end that dialled */
    uint8_t answers;    /* 1: sent by the answering end, 0: by the requesting end */
} kvn_tcp_direction;

typedef struct kvn_tcp_cipher {
    kvn_tcp_crypto calls;
    void *context;
    uint8_t secret[KVN_TCP_SECRET_NBYTES];
    kvn_tcp_direction direction;
    bool seals;
    uint8_t nonce[12];
    uint64_t count; /* of records */
} kvn_tcp_cipher;

/* Returns KVN_OK, or KVN_UNSUPPORTED: no libcrypto, or the system refuses the calls that copy for streams. */
int kvn_tcp_crypto_open(kvn_tcp_crypto *out, kvn_failure *failure);

/* False: no memory. */
bool kvn_tcp_cipher_init(kvn_tcp_cipher *self, const kvn_tcp_crypto *calls, const uint8_t *secret,
                         kvn_tcp_direction direction, bool seals);
void kvn_tcp_cipher_fini(kvn_tcp_cipher *self);
/* Seals or opens the next record: encrypts or decrypts `bytes` in place, and authenticates `header`. 0; -EBADMSG: the
 * peer has not sealed it, and the bytes are useless; -EOVERFLOW: too many records; -EIO: libcrypto refuses. */
int kvn_tcp_cipher_next(kvn_tcp_cipher *self, const uint8_t *header, size_t header_nbytes,
                        uint8_t *bytes, size_t nbytes, uint8_t tag[KVN_TCP_TAG_NBYTES]);

#endif
