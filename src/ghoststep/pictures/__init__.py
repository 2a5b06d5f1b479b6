"""Facts as pictures, for the terminal and as SVG: who sees whom, and what the loss trains on. Nothing is measured here."""

from __future__ import annotations

from ghoststep.pictures.influence_matrix import influence_svg, influence_text
from ghoststep.pictures.label_strip import label_svg, label_text

__all__ = ["influence_svg", "influence_text", "label_svg", "label_text"]
