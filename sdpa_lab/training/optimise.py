"""Gradient descent on dictionaries of arrays, which it changes in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from math import cos, pi
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Rate = float | Array
"""Learning rate: a number, or an array that broadcasts to the parameter (one rate per run)."""


class Descent:
    """Plain gradient descent: w -= rate * gradient.

    Parameters
    ----------
    rate : float, array, or mapping of parameter names to these
        An array broadcasts to the parameter.

    Examples
    --------
    >>> import numpy as np
    >>> from sdpa_lab.training import Descent
    >>> parameters = {"w": np.array([1.0, 2.0])}
    >>> Descent(0.5).step(parameters, {"w": np.array([2.0, 0.0])})
    >>> parameters["w"]
    array([0., 2.])
    """

    def __init__(self, rate: Rate | Mapping[str, Rate]) -> None:
        self.rate = rate

    def step(self, parameters: Arrays, gradients: Arrays, factor: float = 1.0) -> None:
        """One step, all rates times `factor`."""
        for name, w in parameters.items():
            rate = self.rate[name] if isinstance(self.rate, Mapping) else self.rate
            w -= (rate * factor * self.direction(name, gradients[name])).astype(w.dtype)

    def direction(self, name: str, gradient: Array) -> Array:
        """What the rate multiplies."""
        return gradient


class Adam(Descent):
    """Kingma and Ba, "Adam: a method for stochastic optimization" (2015), algorithm 1.

    The size of its steps does not depend on that of the gradients.

    Parameters
    ----------
    rate : as for `Descent`
    decay : (float, float)
        Of the means of the gradient and of its square.

    Examples
    --------
    >>> import numpy as np
    >>> from sdpa_lab.training import Adam
    >>> parameters = {"w": np.array([1.0, 2.0])}
    >>> Adam(0.5).step(parameters, {"w": np.array([2.0, -0.1])})
    >>> parameters["w"].round(6)
    array([0.5, 2.5])
    """

    def __init__(
        self, rate: Rate | Mapping[str, Rate], decay: tuple[float, float] = (0.9, 0.95)
    ) -> None:
        super().__init__(rate)
        self.decay = decay
        self.moments: dict[str, tuple[Array, Array]] = {}
        self.steps: int = 0

    def __copy__(self) -> Adam:
        """Independent of this one, whose moments are changed in place."""
        return copy.deepcopy(self)

    def step(self, parameters: Arrays, gradients: Arrays, factor: float = 1.0) -> None:
        """One step, all rates times `factor`."""
        self.steps += 1
        super().step(parameters, gradients, factor)

    def direction(self, name: str, gradient: Array) -> Array:
        """The mean gradient over the root of the mean square, both without bias."""
        if name not in self.moments:
            self.moments[name] = (np.zeros_like(gradient), np.zeros_like(gradient))
        mean, square = self.moments[name]
        # In place where it can be: a step of small models is a matter of passes over memory.
        mean *= self.decay[0]
        mean += (1 - self.decay[0]) * gradient
        new = gradient * gradient
        new *= 1 - self.decay[1]
        square *= self.decay[1]
        square += new
        unbiased = [1 - decay**self.steps for decay in self.decay]
        size = np.divide(square, unbiased[1], out=new)
        np.sqrt(size, out=size)
        size += 1e-8
        step = mean / unbiased[0]
        step /= size
        return step


def warm_up_and_cosine(steps: int, warm_up: int) -> Callable[[int], float]:
    """Factor of the learning rate at each step: up in a line, down in half a cosine.

    Examples
    --------
    >>> from sdpa_lab.training import warm_up_and_cosine
    >>> factor = warm_up_and_cosine(100, 10)
    >>> [round(factor(step), 3) for step in (0, 9, 50, 99)]
    [0.1, 0.98, 0.5, 0.0]
    """
    return lambda step: min((step + 1) / warm_up, (1 + cos(pi * step / steps)) / 2)
