"""Facts as pictures, for the terminal and as SVG: who sees whom, and what the loss trains on."""

from __future__ import annotations

from ghoststep.pictures.influence_matrix import influence_svg, influence_text
from ghoststep.pictures.label_strip import label_svg, label_text
from ghoststep.pictures.of_setup import Pictures, pictures_of

__all__ = ["Pictures", "influence_svg", "influence_text", "label_svg", "label_text", "pictures_of"]
