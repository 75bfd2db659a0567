"""The machine that the figures were measured on."""

import os
import platform
from contextlib import AbstractContextManager, nullcontext
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
    >>> import sdpa_lab as lab
    >>> config = lab.machine()["sdpa"]
    >>> config["isa"] in config["isas_available"]
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


def one_blas_thread() -> AbstractContextManager[Any]:
    """NumPy's products on one thread, where threadpoolctl is installed.

    The laboratory's products are small. More threads gain little on an idle machine; on a busy one
    each product waits for threads that spin, which has taken a hundred times as long. With one the
    order of summation does not depend on the machine's number of CPUs either.
    """
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        return nullcontext()
    limits: AbstractContextManager[Any] = threadpool_limits(1, user_api="blas")
    return limits


def _processor() -> str:
    # platform.processor() is empty or only the architecture on most Linux systems.
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() in ("model name", "Model"):
                    return value.strip()
    return platform.processor() or platform.machine()
