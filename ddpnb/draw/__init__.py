"""Drawings of a run's state: text, inline SVG, HTML, a matplotlib figure. No widget, no process, no thread.

`figure` is not imported here: it needs matplotlib, and only the end of a run does.

Runs in: kernel
"""

from .aspect import Aspect
from .autopsy import has_failed, last_page
from .card import card, trouble
from .lens import Lens
from .style import STYLE
from .text import label, line, text_card

__all__ = ["STYLE", "Aspect", "Lens", "card", "has_failed", "label", "last_page", "line", "text_card", "trouble"]
