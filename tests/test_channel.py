"""Messages over a rank's pipe: what goes in comes out, in order, and the reader never waits."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from ddpnb.channel import Inbox, Outbox, OutputReader, decode, encode, pipe
from ddpnb.messages import FromWorker, Metrics, Phase, Progress, Raised, Returned, Started, Stopping

MESSAGES: list[FromWorker] = [
    Started(rank=0, time=1.5, pid=7, device="cuda:0"),
    Phase(rank=0, time=1.5, phase="running"),
    Metrics(rank=0, time=1.5, name="loss/ü", steps=b"\0" * 8, values=b"\xff" * 8, times=b"abcdefgh"),
    Progress(rank=0, time=1.5, depth=1, done=3, total=None, description="step"),
    Stopping(rank=0, time=1.5, check=12),
    Returned(rank=0, time=1.5, value=b""),
    Raised(
        rank=0,
        time=1.5,
        phase="running",
        type_name="E",
        text='quotes " and \ud800 surrogates',
        traceback="a\nb",
        location=None,
        is_echo=False,
        exception=b"\x80\x05",
    ),
]


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    read_end, write_end = pipe(1 << 16)
    yield read_end, write_end
    for descriptor in (read_end, write_end):
        try:
            os.close(descriptor)
        except OSError:
            pass  # the test closed it


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_kind_comes_out_as_it_went_in(message: FromWorker) -> None:
    assert message == decode(encode(message)[8:])


def test_messages_arrive_in_order(ends: tuple[int, int]) -> None:
    inbox, outbox = Inbox(ends[0]), Outbox(ends[1])

    outbox.send(*MESSAGES[:3])
    outbox.send(*MESSAGES[3:])

    assert MESSAGES == inbox.read()
    assert not inbox.has_ended


def test_an_empty_pipe_gives_nothing_and_does_not_wait(ends: tuple[int, int]) -> None:
    inbox = Inbox(ends[0])

    assert [] == inbox.read()
    assert not inbox.has_ended


def test_half_a_message_waits_for_its_end_and_holds_up_nobody(ends: tuple[int, int]) -> None:
    inbox, frame = Inbox(ends[0]), encode(MESSAGES[0])

    for position in range(len(frame) - 1):
        os.write(ends[1], frame[position : position + 1])
        assert [] == inbox.read()
    os.write(ends[1], frame[-1:])

    assert [MESSAGES[0]] == inbox.read()


def test_a_writer_that_dies_within_a_message_ends_the_pipe(ends: tuple[int, int]) -> None:
    inbox = Inbox(ends[0])
    os.write(ends[1], encode(MESSAGES[0]) + encode(MESSAGES[1])[:20])
    os.close(ends[1])

    assert [MESSAGES[0]] == inbox.read()
    assert [] == inbox.read()
    assert inbox.has_ended


def test_a_message_larger_than_the_pipe_arrives_whole(ends: tuple[int, int]) -> None:
    inbox, outbox = Inbox(ends[0]), Outbox(ends[1])
    large = Returned(rank=0, time=0.0, value=os.urandom(10_000_000))
    sender = threading.Thread(target=outbox.send, args=(large,))
    sender.start()

    received: list[FromWorker] = []
    while not received:
        received = inbox.read()
    sender.join()

    assert [large] == received


def test_threads_that_send_at_once_do_not_mix_their_messages(ends: tuple[int, int]) -> None:
    inbox, outbox = Inbox(ends[0]), Outbox(ends[1])
    batches = [[Progress(rank=rank, time=0.0, depth=0, done=n, total=9, description="") for n in range(200)]
               for rank in range(4)]  # fmt: skip
    senders = [
        threading.Thread(target=lambda batch=batch: [outbox.send(one, one) for one in batch]) for batch in batches
    ]
    for sender in senders:
        sender.start()

    received: list[FromWorker] = []
    while len(received) < 1600:
        received += inbox.read()
    for sender in senders:
        sender.join()

    assert received[::2] == received[1::2]
    for batch in batches:
        assert batch == [message for message in received[::2] if message in batch]


def test_a_kernel_that_is_gone_is_no_error_of_the_sender(ends: tuple[int, int]) -> None:
    outbox = Outbox(ends[1])
    os.close(ends[0])

    outbox.send(MESSAGES[0])


def test_a_character_cut_in_two_by_a_read_is_whole_again(ends: tuple[int, int]) -> None:
    reader, text = OutputReader(ends[0]), "ü€🙂"

    read = ""
    for byte in text.encode():
        os.write(ends[1], bytes([byte]))
        read += reader.read()

    assert text == read


def test_what_is_no_text_is_marked_and_loses_nothing_else(ends: tuple[int, int]) -> None:
    os.write(ends[1], b"before \xff after")

    assert "before \ufffd after" == OutputReader(ends[0]).read()


def test_output_is_read_in_bounded_portions(ends: tuple[int, int]) -> None:
    os.write(ends[1], b"x" * 5000)
    reader = OutputReader(ends[0])

    assert [4000, 1000, 0] == [len(reader.read(4000)), len(reader.read(4000)), len(reader.read(4000))]
