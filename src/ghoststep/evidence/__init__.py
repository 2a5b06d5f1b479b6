"""The typed facts, one file a family.

An evidence class is a frozen, slotted, keyword-only dataclass that derives from `Evidence` and states units and shapes.
Instruments make evidence, checks read it, nothing changes it. No torch and no numpy at import: arrays are only annotated.
Shape suffixes: R table rows, D embedding dimensions, V token ids.
"""

from ghoststep.evidence.base import Evidence, Missing

__all__ = ["Evidence", "Missing"]
