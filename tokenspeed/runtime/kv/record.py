"""A stored page: a header that says what it is, then the page's bytes. Invariant: `opened` gives exactly the bytes that were
sealed under the same namespace and key, or `Damaged`; whatever a disk, a crash or another program made of a record, a page that
is not what was asked for is never read.

The namespace is a digest of everything that a page's bytes depend on beside its tokens (see identity.py); the key is the
scheduler's chained hash of the tokens and the cache salt. All numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import struct

FORMAT = 1  # of the header; a part of the namespace too
MAGIC = b"TSPKVPG\n"
NAMESPACE_BYTES = KEY_BYTES = SUM_BYTES = 16
_FIELDS = struct.Struct("<8sI4x16s16sQ")  # magic, format, namespace, key, bytes of the page
HEADER_BYTES = _FIELDS.size + SUM_BYTES

Bytes = bytes | bytearray | memoryview


class Damaged(Exception):
    """A record that is not the page asked for; the text says in what."""


def header(namespace: bytes, key: bytes, page: Bytes) -> bytes:
    """The header of `page` (its bytes follow it): the fields, then 16 bytes of the SHA-256 of the fields and the page."""
    if len(namespace) != NAMESPACE_BYTES or len(key) != KEY_BYTES:
        raise ValueError(f"a namespace has {NAMESPACE_BYTES} bytes and a key {KEY_BYTES}")
    fields = _FIELDS.pack(MAGIC, FORMAT, namespace, key, len(page))
    return fields + _checksum(fields, page)


def opened(namespace: bytes, key: bytes, record: Bytes, size: int) -> memoryview:
    """The page of `size` bytes in a record. Raises Damaged."""
    view = memoryview(record)
    if len(view) != HEADER_BYTES + size:
        raise Damaged(f"{len(view)} bytes instead of {HEADER_BYTES + size}")
    fields, page = view[: _FIELDS.size], view[HEADER_BYTES:]
    if fields != _FIELDS.pack(MAGIC, FORMAT, namespace, key, size):
        raise Damaged("the header is of another page")
    if view[_FIELDS.size : HEADER_BYTES] != _checksum(fields, page):
        raise Damaged("the checksum differs")
    return page


def _checksum(fields: Bytes, page: Bytes) -> bytes:
    h = hashlib.sha256(fields)  # processors have instructions for it
    h.update(page)
    return h.digest()[:SUM_BYTES]
