"""The pool of RocketMQ's protocol messages: one of its own, so that others may register the same names elsewhere."""

from __future__ import annotations

from typing import Final

from google.protobuf import duration_pb2, timestamp_pb2
from google.protobuf.descriptor_pool import DescriptorPool

POOL: Final = DescriptorPool()
for _file in (duration_pb2, timestamp_pb2):
    POOL.AddSerializedFile(_file.DESCRIPTOR.serialized_pb)
