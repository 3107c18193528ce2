"""What peers send one another: codecs, frames over connected sockets in a ring, and a digest to compare.

Neither names nor dialling: whoever calls brings descriptors that are connected, and a key for each.
"""

from bloomery.elastic.wire.codec import Codec, decode, encode, encoded_size
from bloomery.elastic.wire.pace import Delivered, Pace
from bloomery.elastic.wire.parity import digest
from bloomery.elastic.wire.ring import ReduceResult, Ring, RingError

__all__ = [
    "Codec",
    "Delivered",
    "Pace",
    "ReduceResult",
    "Ring",
    "RingError",
    "decode",
    "digest",
    "encode",
    "encoded_size",
]
