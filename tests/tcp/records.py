"""Records of encrypted connections, as in docs/internals/tcp-protocol.md, by libcrypto's AES."""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import struct
from ctypes.util import find_library

MOST, TAG = 32 << 10, 16
RECORDS_OF_KEY = 4096
_SEAL, _OPEN = 1, 0
_GET_TAG, _SET_TAG = 0x10, 0x11

_crypto = ctypes.CDLL(find_library("crypto") or "libcrypto.so.3")  # the search needs ldconfig
for _name in ("EVP_aes_128_gcm", "EVP_CIPHER_CTX_new"):
    getattr(_crypto, _name).restype = ctypes.c_void_p


class Records:
    """The records of one direction of one connection.

    Args:
        secret: the secret of the link.
        index: the index of the connection.
        answers: True for the direction of answers, from the serving to the requesting end.
    """

    def __init__(self, secret: bytes, index: int, *, answers: bool) -> None:
        self._secret = secret
        self._label = b"kvplan tcp keys\0" + bytes([index, answers]) + bytes(6)
        self._number = 0

    def seal(self, data: bytes) -> bytes:
        """Return a record with this data."""
        header = struct.pack("<I", len(data))
        return header + self._crypt(_SEAL, header, data)

    def open(self, header: bytes, sealed: bytes) -> bytes:
        """Return the data of a record, given its header and the bytes after the header."""
        return self._crypt(_OPEN, header, sealed)

    def _crypt(self, mode: int, header: bytes, data: bytes) -> bytes:
        label = self._label + struct.pack("<Q", self._number // RECORDS_OF_KEY)
        made = hmac.digest(self._secret, label, hashlib.sha256)
        first, rest = struct.unpack("<Q4s", made[16:28])
        nonce = struct.pack("<Q4s", first ^ self._number, rest)
        self._number += 1
        body = data if mode == _SEAL else data[:-TAG]
        out, nbytes = ctypes.create_string_buffer(len(body) + TAG), ctypes.c_int()
        context = ctypes.c_void_p(_crypto.EVP_CIPHER_CTX_new())
        tag = ctypes.create_string_buffer(data[-TAG:], TAG)
        cipher = ctypes.c_void_p(_crypto.EVP_aes_128_gcm())
        done = [
            _crypto.EVP_CipherInit_ex(context, cipher, None, made[:16], nonce, mode),
            _crypto.EVP_CipherUpdate(context, None, ctypes.byref(nbytes), header, len(header)),
            _crypto.EVP_CipherUpdate(context, out, ctypes.byref(nbytes), body, len(body)),
            mode == _SEAL or _crypto.EVP_CIPHER_CTX_ctrl(context, _SET_TAG, TAG, tag),
            _crypto.EVP_CipherFinal_ex(context, None, ctypes.byref(nbytes)),
            mode == _OPEN or _crypto.EVP_CIPHER_CTX_ctrl(context, _GET_TAG, TAG, tag),
        ]
        _crypto.EVP_CIPHER_CTX_free(context)
        assert all(outcome == 1 for outcome in done), "it was not sealed with this key"
        return out.raw[: len(body)] + (tag.raw if mode == _SEAL else b"")
