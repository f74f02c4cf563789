"""One binary tree over the shards of a global batch, along which their gradients are added, whoever has them.

Floats are rounded at each addition: (a + b) + c and a + (b + c) differ in the last bits. Where the tree says what is
added to what, the sum has the same bits for any number of ranks. A rank adds up what lies within its own range of
leaves; the ranks exchange the few nodes that this leaves, and finish the tree.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")
Add = Callable[[Value, Value], Value]
"""Adds up two values; it may do so in the first of them."""


@dataclass(frozen=True, slots=True)
class Node(Generic[Value]):
    """A node of the tree, with the sum of the leaves below it."""

    begin: int
    end: int
    """The leaves from `begin` to before `end`."""
    value: Value | None
    """Their sum; None where none of them has anything to add."""


class Tree:
    """The binary tree over so many leaves, each node of which is cut into halves.

    Where two cuts are equally even, it is the one before an even leaf: leaves 2i and 2i + 1 stay together more often,
    and ranks with a few leaves each have fewer nodes to exchange.
    """

    def __init__(self, num_leaves: int) -> None:
        self._num_leaves = num_leaves
        self._joints = frozenset(_joints(0, num_leaves))

    def extend(self, nodes: list[Node[Value]], more: Iterable[Node[Value]], add: Add[Value]) -> None:
        """Append nodes, each right of the last one; two that are the halves of a node become that one at once."""
        for node in more:
            nodes.append(node)
            while len(nodes) > 1 and (nodes[-2].begin, nodes[-1].begin, nodes[-1].end) in self._joints:
                right, left = nodes.pop(), nodes.pop()
                nodes.append(Node(left.begin, right.end, _sum(left.value, right.value, add)))

    def root(self, nodes: Iterable[Node[Value]], add: Add[Value]) -> Value | None:
        """The sum over all leaves, from nodes in order; leaves right of the last node have nothing to add."""
        joined: list[Node[Value]] = []
        self.extend(joined, nodes, add)
        rest = range(joined[-1].end if joined else 0, self._num_leaves)
        self.extend(joined, (Node(leaf, leaf + 1, None) for leaf in rest), add)
        (root,) = joined
        return root.value


def _sum(left: Value | None, right: Value | None, add: Add[Value]) -> Value | None:
    if left is None or right is None:
        return right if left is None else left
    return add(left, right)


def _joints(begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(begin, middle, end) of every node that has halves."""
    if end - begin > 1:
        middle = (begin + end) // 2
        if (begin + end) % 2:
            middle += middle % 2
        yield begin, middle, end
        yield from _joints(begin, middle)
        yield from _joints(middle, end)
