"""sdpa inside other libraries: one module for each, which needs that library to be installed.

`sdpa.interop.torch` imports itself at its first use. Checkers of types know what is in it after
`import sdpa.interop.torch`.
"""

import importlib
from types import ModuleType

__all__ = ["autograd", "dask", "jax", "onnx", "torch", "transformers"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module 'sdpa.interop' has no attribute '{name}'")
    return importlib.import_module(f"sdpa.interop.{name}")


def __dir__() -> list[str]:
    return __all__
