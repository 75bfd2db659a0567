"""The laboratory: what dividing scores by sqrt(d_k) changes, measured with the package's routines.

Every experiment is a function with a seed that returns rows of figures; `python -m sdpa` shows
them. A figure that is estimated comes as an `Estimate`: with its interval, the number of
independent draws behind it and, where a law predicts it, the prediction.
"""

from .estimate import Draws, Estimate
from .inputs import digits, normal
from .machine import machine
from .scale import ScaleRow, plot_scale_effect, scale_effect
from .speed import SpeedRow, plot_speed, speed
from .table import Table

__all__ = [
    "Draws",
    "Estimate",
    "ScaleRow",
    "SpeedRow",
    "Table",
    "digits",
    "machine",
    "normal",
    "plot_scale_effect",
    "plot_speed",
    "scale_effect",
    "speed",
]
