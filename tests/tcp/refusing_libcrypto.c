/* A libcrypto that encrypts one record for each context, by inverting its bytes, and refuses later records. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

void *EVP_CIPHER_CTX_new(void) { return calloc(1, sizeof(int)); }

void EVP_CIPHER_CTX_free(void *context) { free(context); }

int EVP_CIPHER_CTX_ctrl(void *context, int type, int number, void *pointer)
{
    (void)context, (void)type;
    memset(pointer, 0, (size_t)number);
    return 1;
}

int EVP_CipherInit_ex(void *context, const void *type, void *engine, const uint8_t *key,
                      const uint8_t *nonce, int encrypts)
{
    (void)type, (void)engine, (void)key, (void)encrypts;
    return !nonce || ++*(int *)context < 2;
}

int EVP_CipherUpdate(void *context, uint8_t *out, int *out_nbytes, const uint8_t *in, int nbytes)
{
    (void)context;
    for (int i = 0; out && i < nbytes; i++)
        out[i] = (uint8_t)~in[i];
    *out_nbytes = nbytes;
    return 1;
}

int EVP_CipherFinal_ex(void *context, uint8_t *out, int *out_nbytes)
{
    (void)context, (void)out;
    *out_nbytes = 0;
    return 1;
}

const void *EVP_aes_128_gcm(void) { return NULL; }

const void *EVP_sha256(void) { return NULL; }

uint8_t *HMAC(const void *type, const void *key, int key_nbytes, const uint8_t *data, size_t nbytes,
              uint8_t *out, unsigned *out_nbytes)
{
    (void)type, (void)key, (void)key_nbytes, (void)data, (void)nbytes;
    memset(out, 0, *out_nbytes = 32);
    return out;
}
