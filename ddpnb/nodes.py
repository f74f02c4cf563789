"""The kernels of a run on several nodes: they meet before any worker starts, and hear of each other's end.

Node 0 listens where all nodes were told to come. Each other node connects, says who it is and how many ranks it has,
and is told how many every node has: with that all ranks are known. Then rank 0's store takes the listening socket over,
while the connections between the kernels stay. A failure goes over them in words, so that each node can name the rank
that is to blame, wherever it was; a node that goes without a word shows by the end of its connection.

The words are lines of JSON, a few in a run, and no pickle. As with torchrun, whoever reaches the port can take part.

Runs in: kernel
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import selectors
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, TypeGuard

import psutil

from .errors import LaunchError
from .messages import Lost, Met
from .plan import Plan
from .state import Failure

_LOOK = 0.2
"""Seconds between two tries to reach node 0, and between looks at whether the run is to end meanwhile."""
_CONNECT = 2.0
"""Seconds that one try may take."""
_SILENT = 8
"""Seconds without an answer from another node's operating system after which the node counts as gone."""
WORD_OF_PEERS = 10.0
"""Seconds that other nodes have to say what happened, where this one has only seen echoes: longer than `_SILENT`."""
_LONGEST_LINE = 1 << 16

Word = dict[str, Any]


class Nodes:
    """This node's links to the others; on node 0, which makes it at once, also the socket where they come.

    Args:
        plan: how many nodes there are, which one this is, and where they meet.
        selector: waits for what comes; each entry's `data` is called when there is something.
        on_loss: takes the failure of another node.
        on_ask: takes a stop or kill that was asked for on another node.

    Raises:
        LaunchError: node 0 cannot listen there.
    """

    def __init__(
        self,
        plan: Plan,
        selector: selectors.BaseSelector,
        on_loss: Callable[[Lost], None],
        on_ask: Callable[[Literal["stop", "kill"]], None],
    ) -> None:
        self._plan = plan
        self._selector = selector
        self._on_loss = on_loss
        self._on_ask = on_ask
        self._links: dict[int, _Link] = {}  # {node: its link}; node 0 has one to each, each other has one to node 0
        self._newcomers: set[_Link] = set()  # who has connected to node 0 and not said yet what it is
        self._num_ranks: dict[int, int] = {plan.node_rank: plan.local_world_size}  # of the nodes that are known
        self._host = ""
        self._has_failed = False
        self.listener: socket.socket | None = None
        if plan.node_rank == 0:
            self.listener = _listen(plan)
            self._host = self.listener.getsockname()[0]

    # ---- meeting

    def meet(self, is_to_end: Callable[[], bool]) -> Met | None:
        """Wait until all nodes have come; None where the run is to end before.

        Args:
            is_to_end: whether the user wants no more of it; asked a few times a second.

        Raises:
            LaunchError: a node did not come in time, or does not fit.
        """
        deadline = time.monotonic() + self._plan.timeout
        gathered = self._gather(deadline) if self._plan.node_rank == 0 else self._go(deadline)
        for _ in gathered:
            if is_to_end():
                return None
        before = [self._num_ranks[node] for node in range(self._plan.node_rank)]
        return Met(
            time=time.monotonic(),
            first_rank=sum(before),
            num_ranks=self._plan.local_world_size,
            world_size=sum(self._num_ranks.values()),
        )

    def interface(self) -> str | None:
        """Name of the interface that reaches the other nodes; None where the system does not tell."""
        for name, addresses in psutil.net_if_addrs().items():
            if any(address.address.partition("%")[0] == self._host for address in addresses):
                return name
        return None

    def _gather(self, deadline: float) -> Iterator[None]:
        """On node 0: welcome all nodes; yields whenever somebody may look at something else."""
        assert self.listener is not None
        self._selector.register(self.listener, selectors.EVENT_READ, self._welcome)
        try:
            while missing := [node for node in range(self._plan.nnodes) if node not in self._num_ranks]:
                if time.monotonic() > deadline:
                    text = self._did_not_come(missing)
                    self._say(refused=text)
                    raise LaunchError(text)
                for key, _ in self._selector.select(_LOOK):
                    if key.fd in self._selector.get_map():
                        key.data()
                yield
        finally:
            self._selector.unregister(self.listener)
            for stranger in list(self._newcomers):
                self._send_away(stranger)
        self._say(num_ranks=[self._num_ranks[node] for node in range(self._plan.nnodes)])

    def _welcome(self) -> None:
        assert self.listener is not None
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return  # whoever it was has gone already
        link = _Link(connection)
        self._newcomers.add(link)
        self._selector.register(link, selectors.EVENT_READ, partial(self._introduce, link))

    def _introduce(self, link: _Link) -> None:
        """A newcomer says who it is."""
        for word in link.read()[:1]:
            refusal = self._does_not_fit(word)
            if refusal is None:
                self._newcomers.remove(link)
                link.node_rank = word["node_rank"]
                self._num_ranks[link.node_rank], self._links[link.node_rank] = word["num_ranks"], link
                self._selector.modify(link, selectors.EVENT_READ, partial(self._hear, link))
                return
            link.say(refused=refusal)
            link.has_ended = True
        if link.has_ended:
            self._send_away(link)

    def _send_away(self, link: _Link) -> None:
        self._newcomers.remove(link)
        self._selector.unregister(link)
        link.close()

    def _does_not_fit(self, word: Word) -> str | None:
        own = {"nnodes": self._plan.nnodes, "backend": self._plan.backend}
        told = {name: word.get(name) for name in own}
        node, num_ranks = word.get("node_rank"), word.get("num_ranks")
        if not _is_count(node) or not _is_count(num_ranks) or told["nnodes"] is None:
            return "nodes of a ddpnb run meet here"
        if told != own:
            return f"node 0 was launched with {_options(own)}, node {node} with {_options(told)}"
        if node >= self._plan.nnodes or node in self._num_ranks:
            return f"there is a node {node} already; each has a node_rank of its own, 0 … {self._plan.nnodes - 1}"
        return None

    def _go(self, deadline: float) -> Iterator[None]:
        """On another node: go to node 0, and wait for its answer; yields as `_gather`."""
        plan = self._plan
        while time.monotonic() < deadline:
            yield
            try:
                connection = socket.create_connection((plan.master_addr, plan.master_port), _CONNECT)
            except OSError:
                time.sleep(_LOOK)
                continue
            self._links[0] = link = _Link(connection)
            self._host = connection.getsockname()[0]
            link.say(
                node_rank=plan.node_rank, nnodes=plan.nnodes, num_ranks=plan.local_world_size, backend=plan.backend
            )
            with selectors.DefaultSelector() as selector:
                selector.register(link, selectors.EVENT_READ)
                while not link.has_ended and time.monotonic() < deadline:
                    yield
                    for word in link.read() if selector.select(_LOOK) else []:
                        self._take_answer(word, link)
                    if len(self._num_ranks) == plan.nnodes:
                        self._selector.register(link, selectors.EVENT_READ, partial(self._hear, link))
                        return
            # It was the store of an earlier run, which is about to end, or a stranger.
            self._links.pop(0).close()
            time.sleep(_LOOK)
        raise LaunchError(self._did_not_come([0]))

    def _take_answer(self, word: Word, link: _Link) -> None:
        match word:
            case {"num_ranks": [*counts]} if len(counts) == self._plan.nnodes and all(map(_is_count, counts)):
                self._num_ranks = dict(enumerate(counts))
            case {"refused": str() as why}:
                raise LaunchError(why)
            case _:
                self._take(link, word)

    def _did_not_come(self, missing: list[int]) -> str:
        plan = self._plan
        who = f"node {missing[0]}" if len(missing) == 1 else f"nodes {', '.join(map(str, missing))}"
        return f"{who} of {plan.nnodes} did not come to {self._place()} within {plan.timeout:g} s (timeout=…)"

    def _place(self) -> str:
        return f"{self._plan.master_addr}:{self._plan.master_port}"

    # ---- afterwards

    @property
    def have_ended(self) -> bool:
        """No other node has a part in the run any more."""
        return all(link.has_ended or link.has_said_end for link in self._links.values())

    @property
    def have_spoken(self) -> bool:
        """Every other node has said how it fared, or is gone."""
        return all(link.has_ended or link.has_said_end or link.has_failed for link in self._links.values())

    def ask(self, how: Literal["stop", "kill"]) -> None:
        """Have the run ended on all nodes."""
        self._say(asked=how)

    def report(self, failure: Failure, headline: str) -> None:
        """Tell the other nodes of a failure here, once."""
        if not self._has_failed and not isinstance(failure.witness, Lost):
            self._has_failed = True
            self._say(failed=[self._plan.node_rank, failure.rank, headline, failure.is_echo])

    def leave(self, problem: str | None = None) -> None:
        """Say that this node's part is over, and why where it could not be played; close all."""
        if problem is not None and not self._has_failed:
            self._say(failed=[self._plan.node_rank, self._first_rank(self._plan.node_rank), problem, False])
        self._say(ended=True)
        for link in self._links.values():
            link.close()
        if self.listener is not None:
            self.listener.close()

    def _hear(self, link: _Link) -> None:
        for word in link.read():
            self._take(link, word)
        if not link.has_ended:
            return
        self._selector.unregister(link)
        link.close()
        if link.node_rank not in self._links:
            return
        if len(self._num_ranks) < self._plan.nnodes:  # it may come again
            del self._num_ranks[link.node_rank], self._links[link.node_rank]
        elif not link.has_said_end and not link.has_failed:
            gone = "it has gone without a word: its kernel was ended, or the network between the two is down"
            self._take(link, {"failed": [link.node_rank, self._first_rank(link.node_rank), gone, False]})

    def _take(self, link: _Link, word: Word) -> None:
        match word:
            case {"asked": "stop" | "kill" as how}:
                self._on_ask(how)  # which tells all nodes that do not know
            case {"failed": [int() as node, int() as rank, str() as text, bool() as is_echo]}:
                link.has_failed = True
                self._say(but=link, **word)  # node 0 passes it on: the others have no link between them
                self._on_loss(Lost(time=time.monotonic(), node_rank=node, rank=rank, text=text, is_echo=is_echo))
            case {"ended": True}:
                link.has_said_end = True
            case _:
                link.has_ended = True  # a stranger

    def _say(self, but: _Link | None = None, **word: Any) -> None:
        for link in self._links.values():
            if link is not but:
                link.say(**word)

    def _first_rank(self, node: int) -> int:
        return sum(count for other, count in self._num_ranks.items() if other < node)


class _Link:
    """A connection to another kernel: lines of JSON, each a dictionary. A child that the kernel forks has none."""

    def __init__(self, connection: socket.socket) -> None:
        self.node_rank = 0
        self.has_failed = False
        self.has_said_end = False
        self.has_ended = False
        """Nothing more will come."""
        self._socket = connection
        self._rest = b""
        connection.settimeout(_CONNECT)
        _notice_silence(connection)
        _open.add(connection)

    def fileno(self) -> int:
        return self._socket.fileno()

    def say(self, **word: Any) -> None:
        """Send a word. That nobody takes it shows when the link is read."""
        try:
            self._socket.sendall(json.dumps(word).encode() + b"\n")
        except OSError:
            pass

    def read(self) -> list[Word]:
        """The words that have come; called when there is something to read."""
        try:
            received = self._socket.recv(_LONGEST_LINE)
        except OSError:
            received = b""
        *lines, self._rest = (self._rest + received).split(b"\n")
        words = list(map(_parse, lines))
        self.has_ended = not received or None in words or len(self._rest) > _LONGEST_LINE
        return [word for word in words if word is not None]

    def close(self) -> None:
        self._socket.close()


_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_links() -> None:
    """In a forked child, which may outlive the kernel: the other nodes would not notice the kernel's end."""
    for connection in list(_open):
        connection.close()


os.register_at_fork(after_in_child=_close_links)


def _parse(line: bytes) -> Word | None:
    try:
        word = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return word if isinstance(word, dict) else None


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _options(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _listen(plan: Plan) -> socket.socket:
    assert plan.master_addr is not None
    place = f"{plan.master_addr}:{plan.master_port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(plan.master_addr, plan.master_port, type=socket.SOCK_STREAM)[0]
        _refuse_private_name(plan, str(address[0]))
        return socket.create_server(address, family=family, backlog=max(128, plan.nnodes * plan.local_world_size))
    except socket.gaierror as error:
        raise LaunchError(f"master_addr={plan.master_addr!r} is no address that is known here: {error}") from error
    except OSError as error:
        match error.errno:
            case errno.EADDRINUSE:
                why = "something listens there already; choose another master_port, the same on every node"
            case errno.EADDRNOTAVAIL:
                why = "it is no address of this machine, and node 0 has to be the one that has it"
            case _:
                why = str(error)
        raise LaunchError(f"node 0 cannot listen on {place}: {why}") from error


def _refuse_private_name(plan: Plan, address: str) -> None:
    """Refuse a name that leads to this machine alone: Debian and others write their own one into /etc/hosts so."""
    is_meant = plan.nnodes == 1 or plan.master_addr in (address, "localhost")
    if not is_meant and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise LaunchError(
            f"master_addr={plan.master_addr!r} is {address} on node 0 itself, which no other node reaches; "
            "pass an address instead of the name"
        )


def _notice_silence(connection: socket.socket) -> None:
    """Have the operating system ask the other one whether it still lives: a pulled cable says nothing."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        options = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 1000 * _SILENT}
        for name, value in options.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
