"""The parameters of all tests: the ISAs of this machine, the dtypes, one seed."""

import os
import sys

import ml_dtypes
import numpy as np
import pytest

from sdpa import _core

SEED = int(os.environ.get("SDPA_SEED", "0"))
ROUNDS_TO_BFLOAT16 = ("avx512bf16", "amx", "amx_model", "neonbf16", "wide")
"""The ISAs that round the weights of a forward in bfloat16 to it."""

ISAS = [name for name, available in dict(_core._isas()).items() if available]
DTYPES = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}
POSIX = pytest.mark.skipif(os.name != "posix", reason="needs forks or signals of POSIX")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc or affinities of Linux")
