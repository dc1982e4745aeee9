"""GGUF files byte by byte, for headers that no writer would write."""

import struct
from collections.abc import Sequence

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def u32(name: str, value: int) -> bytes:
    return key(name, U32, struct.pack("<I", value))


def f32(name: str, value: float) -> bytes:
    return key(name, F32, struct.pack("<f", value))


def string(name: str, value: str | bytes) -> bytes:
    return key(name, STRING, text(value))


def array(name: str, kind: int, count: int, elements: bytes = b"") -> bytes:
    return key(name, ARRAY, struct.pack("<IQ", kind, count) + elements)


def tensor(name: str, dims: Sequence[int], kind: int = 0, offset: int = 0, num_dims: int | None = None) -> bytes:
    """An entry of the tensor list; `dims` innermost first."""
    count = len(dims) if num_dims is None else num_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


def gguf_bytes(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    counts = (len(tensors) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys)
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return header + b"\0" * (-len(header) % alignment) + data
