"""The laboratory: what dividing scores by sqrt(d_k) changes, measured with the package's routines.

Every experiment is a function with a seed that returns rows of figures; `python -m sdpa` shows
them. A figure that is estimated comes as an `Estimate`: with its interval, the number of
independent draws behind it and, where a law predicts it, the prediction.
"""

from .estimate import Draws, Estimate
from .gradients import exponents, gradients, plot_gradients
from .growth import (
    coverage,
    growth,
    initialisers,
    normality,
    plot_coverage,
    plot_growth,
    plot_initialisers,
    plot_normality,
)
from .inputs import digits, normal
from .machine import machine
from .memory import memory, plot_memory
from .overflow import overflow, plot_overflow
from .saturation import freezing, plot_freezing, plot_saturation, saturation
from .scale import ScaleRow, plot_scale_effect, scale_effect
from .speed import SpeedRow, plot_speed, speed
from .table import Table
from .tiling import online, plot_online, tiles

__all__ = [
    "Draws",
    "Estimate",
    "ScaleRow",
    "SpeedRow",
    "Table",
    "coverage",
    "digits",
    "exponents",
    "freezing",
    "gradients",
    "growth",
    "initialisers",
    "machine",
    "memory",
    "normal",
    "normality",
    "online",
    "overflow",
    "plot_coverage",
    "plot_freezing",
    "plot_gradients",
    "plot_growth",
    "plot_initialisers",
    "plot_memory",
    "plot_normality",
    "plot_online",
    "plot_overflow",
    "plot_saturation",
    "plot_scale_effect",
    "plot_speed",
    "saturation",
    "scale_effect",
    "speed",
    "tiles",
]
