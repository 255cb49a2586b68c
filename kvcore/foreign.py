"""What is read although somebody else wrote it: blobs, manifests, snapshots, specs, records, questions of peers."""

import msgspec

UNREADABLE = (msgspec.MsgspecError, UnicodeError, RecursionError, TypeError, ValueError)
"""What decoders raise for bytes that are none of theirs: malformed, of other types, not UTF-8, nested too deep."""

LONGEST = 2**31 - 1
"""Tokens that a request can say to have: positions are int32 on every backend."""

LARGEST_ID = 2**64 - 1
"""Of a token: ids enter keys as 8 bytes."""
