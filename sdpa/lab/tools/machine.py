"""The machine that the figures were measured on."""

import os
import platform
from typing import Any

import numpy as np

import sdpa


def machine() -> dict[str, Any]:
    """Processor, versions, and the kernels and threads that `sdpa.show_config` reports.

    Returns
    -------
    dict
        processor, system, python, numpy, blas (of NumPy), sdpa (as `sdpa.show_config("dicts")`).

    Examples
    --------
    >>> from sdpa import lab
    >>> lab.machine()["sdpa"]["isa"] in ("generic", "avx2", "avx512", "neon")
    True
    """
    numpy_config: Any = np.show_config(mode="dicts")
    return {
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": numpy_config.get("Build Dependencies", {}).get("blas", {}).get("name", "unknown"),
        "sdpa": sdpa.show_config("dicts"),
    }


def _processor() -> str:
    # platform.processor() is empty or only the architecture on most Linux systems.
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() in ("model name", "Model"):
                    return value.strip()
    return platform.processor() or platform.machine()
