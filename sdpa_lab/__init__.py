"""The laboratory: what dividing scores by sqrt(d_k) changes, measured with the package's routines.

Every experiment is a function with a seed that returns rows of figures; `python -m sdpa` shows
them. A figure that is estimated comes as an `Estimate`: with its interval, the number of
independent draws behind it and, where a law predicts it, the prediction.
"""

from .experiments.correlation import correlated_growth, plot_correlated_growth
from .experiments.cost import cost, cost_exponents, cost_ratio, plot_cost
from .experiments.criteria import (
    averaging,
    best_sigma,
    gradients_over_sigma,
    plot_averaging,
    plot_best_sigma,
    plot_gradients_over_sigma,
)
from .experiments.decoder import decoder_heads, plot_decoder_heads, plot_decoder_layers
from .experiments.depth import (
    output_scale,
    plot_depth,
    plot_output_scale,
    plot_rank_collapse,
    plot_rank_step,
    rank_collapse,
    rank_step,
)
from .experiments.first_step import (
    first_step,
    first_step_exponents,
    plot_first_step,
    plot_first_step_exponents,
)
from .experiments.gradients import (
    exponents,
    gradients,
    plot_exponents,
    plot_gradient_rows,
    plot_gradients,
)
from .experiments.growth import (
    coverage,
    growth,
    initialisers,
    normality,
    plot_coverage,
    plot_growth,
    plot_initialisers,
    plot_normality,
)
from .experiments.heads import (
    inputs_compared,
    plot_inputs_compared,
    plot_trained_choice,
    plot_trained_growth,
    plot_trained_heads,
    trained_choice,
    trained_growth,
    trained_heads,
)
from .experiments.kernel_regression import (
    kernel_rounding,
    kernel_smoothing,
    plot_kernel_regression,
    plot_kernel_rounding,
    plot_kernel_smoothing,
)
from .experiments.length import critical, plot_critical, plot_scale_over_length, scale_over_length
from .experiments.longer import longer, plot_longer
from .experiments.memory import memory, plot_memory
from .experiments.overflow import overflow, plot_overflow
from .experiments.saturation import (
    freezing,
    plot_freezing,
    plot_saturation,
    plot_ten_weights,
    saturation,
)
from .experiments.scale import ScaleRow, plot_scale_effect, scale_effect
from .experiments.speed import SpeedRow, plot_speed, speed
from .experiments.symmetry import plot_symmetric_share, symmetric_share
from .experiments.tiling import online, plot_online
from .measure import measure, plot_measure
from .style import save
from .theory import best_scale
from .tools.drawn import drawn
from .tools.estimate import Draws, Estimate
from .tools.inputs import digits, normal
from .tools.machine import machine
from .tools.table import Table

__all__ = [
    "Draws",
    "Estimate",
    "ScaleRow",
    "SpeedRow",
    "Table",
    "averaging",
    "best_scale",
    "best_sigma",
    "correlated_growth",
    "cost",
    "cost_exponents",
    "cost_ratio",
    "coverage",
    "critical",
    "decoder_heads",
    "digits",
    "drawn",
    "exponents",
    "first_step",
    "first_step_exponents",
    "freezing",
    "gradients",
    "gradients_over_sigma",
    "growth",
    "initialisers",
    "inputs_compared",
    "kernel_rounding",
    "kernel_smoothing",
    "longer",
    "machine",
    "measure",
    "memory",
    "normal",
    "normality",
    "online",
    "output_scale",
    "overflow",
    "plot_averaging",
    "plot_best_sigma",
    "plot_correlated_growth",
    "plot_cost",
    "plot_coverage",
    "plot_critical",
    "plot_decoder_heads",
    "plot_decoder_layers",
    "plot_depth",
    "plot_exponents",
    "plot_first_step",
    "plot_first_step_exponents",
    "plot_freezing",
    "plot_gradient_rows",
    "plot_gradients",
    "plot_gradients_over_sigma",
    "plot_growth",
    "plot_initialisers",
    "plot_inputs_compared",
    "plot_kernel_regression",
    "plot_kernel_rounding",
    "plot_kernel_smoothing",
    "plot_longer",
    "plot_measure",
    "plot_memory",
    "plot_normality",
    "plot_online",
    "plot_output_scale",
    "plot_overflow",
    "plot_rank_collapse",
    "plot_rank_step",
    "plot_saturation",
    "plot_scale_effect",
    "plot_scale_over_length",
    "plot_speed",
    "plot_symmetric_share",
    "plot_ten_weights",
    "plot_trained_choice",
    "plot_trained_growth",
    "plot_trained_heads",
    "rank_collapse",
    "rank_step",
    "saturation",
    "save",
    "scale_effect",
    "scale_over_length",
    "speed",
    "symmetric_share",
    "trained_choice",
    "trained_growth",
    "trained_heads",
]
