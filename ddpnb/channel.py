"""A rank's own pipe to the kernel: messages in, messages out, and no pickle.

A frame is a length, a JSON head with the message's kind and fields, and the raw bytes of its `bytes` fields. The kernel
reads without ever waiting for a frame's end, so that a rank that is stopped or dies in the middle of one cannot hold
up another; a rank that floods only fills its own pipe.

Runs in: both
"""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import fields
from typing import get_args

from .messages import FromWorker

_FRAME = struct.Struct("=QI")  # length of what follows, and of the JSON head in it
_KINDS = {kind.__name__: kind for kind in get_args(FromWorker)}
_FIELDS = {kind: tuple(field.name for field in fields(kind)) for kind in _KINDS.values()}
_READ = 1 << 16  # more would be paid for in fresh pages at each read, however little is there
_F_SETPIPE_SZ = getattr(fcntl, "F_SETPIPE_SZ", 1031)


def encode(message: FromWorker) -> bytes:
    """One message as a frame."""
    head: dict[str, object] = {"kind": type(message).__name__}
    blobs: list[bytes] = []
    for name in _FIELDS[type(message)]:
        value = getattr(message, name)
        if isinstance(value, bytes):
            head[name] = [len(value)]  # a list stands for bytes: no field is a list
            blobs.append(value)
        else:
            head[name] = value
    text = json.dumps(head).encode()
    length = 4 + len(text) + sum(map(len, blobs))
    return b"".join((_FRAME.pack(length, len(text)), text, *blobs))


def decode(frame: bytes | memoryview) -> FromWorker:
    """The message of one frame, without its length."""
    (head_length,) = struct.unpack_from("=I", frame)
    position = 4 + head_length
    head = json.loads(bytes(frame[4:position]))
    for name, value in head.items():
        if isinstance(value, list):
            head[name] = bytes(frame[position : position + value[0]])
            position += value[0]
    message: FromWorker = _KINDS[head.pop("kind")](**head)
    return message


class Outbox:
    """A worker's end. Several threads may send; each call's messages stay together."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def send(self, *messages: FromWorker) -> None:
        """Write the messages; waits while the kernel is behind."""
        rest = memoryview(b"".join(map(encode, messages)))
        with self._lock:
            try:
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except BrokenPipeError:
                pass  # the kernel is gone: the lifeline ends this process


class _Reader:
    """The kernel's end of a pipe: never waits. The descriptor belongs to whoever made the pipe."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.has_ended = False
        """Nobody can write any more. May never come: a grandchild may hold the other end."""

    def _take(self, most: int) -> bytes:
        """Up to `most` bytes of what is there now; empty where nothing is."""
        try:
            data = os.read(self.descriptor, most)
        except BlockingIOError:
            return b""
        self.has_ended = not data
        return data


class Inbox(_Reader):
    """Messages of one rank."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self._waiting = bytearray()

    def read(self) -> list[FromWorker]:
        """The messages completed by one read; empty when nothing more is there *now*.

        One read at a time, so that a rank that floods does not hold up the others.
        """
        messages: list[FromWorker] = []
        while not messages:
            data = self._take(_READ)
            if not data:
                break
            self._waiting += data
            messages = list(self._complete())
        return messages

    def _complete(self) -> Iterator[FromWorker]:
        position = 0
        while len(self._waiting) - position >= _FRAME.size:
            (length, _) = _FRAME.unpack_from(self._waiting, position)
            end = position + 8 + length
            if len(self._waiting) < end:
                break
            with memoryview(self._waiting) as waiting, waiting[position + 8 : end] as frame:
                message = decode(frame)
            position = end
            yield message
        del self._waiting[:position]


class OutputReader(_Reader):
    """Text of one rank: its stdout and stderr, or its stack dumps."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        # A character may be cut in two by a read.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self, most: int = _READ) -> str:
        """Up to `most` bytes of what has arrived, as text; empty when nothing is there *now*."""
        chunks = []
        while most > 0 and (data := self._take(min(most, 1 << 16))):
            most -= len(data)
            chunks.append(data)
        return self._decoder.decode(b"".join(chunks))


def pipe(size: int) -> tuple[int, int]:
    """A pipe (read end, write end) with a buffer of about `size` bytes where the system lets us choose."""
    read_end, write_end = os.pipe()
    try:
        fcntl.fcntl(write_end, _F_SETPIPE_SZ, size)
    except OSError:
        pass  # not Linux, or the user's pipe quota is used up: a smaller buffer works too
    return read_end, write_end
