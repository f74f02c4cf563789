"""Drawings of a run's state: text, inline SVG, HTML, a matplotlib figure. No widget, no process, no thread.

`figure` is not imported here: it needs matplotlib, and only the end of a run does.

Runs in: kernel
"""

from .card import card, trouble
from .text import label, line, text_card

__all__ = ["card", "label", "line", "text_card", "trouble"]
