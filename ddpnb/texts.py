"""Text that is read: as a cell's value it shows as it is, without quotes and escapes.

Runs in: kernel
"""

from __future__ import annotations


class Text(str):
    """A str whose repr is itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Texts(dict[int, str]):
    """{rank: text}, which shows as one block per rank."""

    def __repr__(self) -> str:
        blocks = [f"rank {rank}\n{text.rstrip()}" for rank, text in self.items()]
        return "\n\n".join(blocks) if blocks else "{}"
