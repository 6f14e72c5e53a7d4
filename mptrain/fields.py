"""Types of configuration fields with their allowed ranges.

Dataclasses of the package annotate their fields with these types; `mptrain.config` checks the ranges and reports
violations. Nothing here imports the validation library.
"""

from __future__ import annotations

import math
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0), Lt(math.inf)]
NonNegativeFloat = Annotated[float, Ge(0), Lt(math.inf)]
AboveOne = Annotated[float, Gt(1), Lt(math.inf)]
AtLeastOne = Annotated[float, Ge(1), Lt(math.inf)]
Fraction = Annotated[float, Ge(0), Le(1)]
PositiveFraction = Annotated[float, Gt(0), Le(1)]
BelowOne = Annotated[float, Gt(0), Lt(1)]
BelowOneOrZero = Annotated[float, Ge(0), Lt(1)]
