"""What the tests of PyTorch's door know of its versions."""

import pytest

# Warnings of PyTorch about its own code, which callers cannot avoid.
ITS_OWN_WARNINGS = pytest.mark.filterwarnings(
    # Forward mode, the compiler and opcheck load decompositions that PyTorch itself scripts; the
    # category is another one since 2.14.
    "ignore:`torch.jit.script:DeprecationWarning",
    "ignore:`torch.jit.script:FutureWarning",
    # opcheck, since 2.14, reads `.grad` of copies of its arguments that are no leaves.
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)
