"""Public names say the module that users know, wherever they are defined."""

from typing import Any


def publish(module: str, names: dict[str, Any]) -> None:
    """Give what `names["__all__"]` lists, and `module` holds in its private parts, its name.

    Pickles, tracebacks and help then do not depend on where it is defined.
    """
    for name in names["__all__"]:
        found = names[name]
        if getattr(found, "__module__", "").startswith(f"{module}."):
            found.__module__ = module
