"""A row more in the table of options reaches every interface, without a line for it there.

The extension is built with one more option, `dummy`: an array per head or a number, differentiable,
parsed, held and otherwise ignored.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import tiers

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=tiers.SLOW)
def tree(tmp_path_factory):
    """A copy of the package with the option, after `make stubs`."""
    folder = tmp_path_factory.mktemp("dummy")
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("src", "sdpa", "sdpa_lab", "tools", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    run(folder, "setup.py", "build_ext", "--inplace", CFLAGS="-DSDPA_DUMMY_OPTION")
    run(folder, "tools/stubs.py")
    return folder


def run(folder, *arguments, **environment):
    ours = {"LD_PRELOAD", "SDPA_SANITIZE", "SDPA_COVERAGE"}
    kept = {key: value for key, value in os.environ.items() if key not in ours}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=kept | {"PYTHONPATH": str(folder)} | environment,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


COMMON = """
import inspect
import numpy as np, sdpa
from sdpa import _options, _table
assert "dummy" in inspect.signature(sdpa.attention).parameters
rng = np.random.default_rng(0)
x = rng.standard_normal((3, 1, 2, 5, 4), np.float32)
dummy = np.ones(2, np.float32)
expected, lse = sdpa.attention_forward(*x)
"""
DOORS = {
    "numpy": """
from sdpa import blocks
for function in "attention_backward", "attention_weights", "additive_attention":
    assert "dummy" in inspect.signature(getattr(sdpa, function)).parameters
grads = sdpa.attention_backward(x[0], *x, expected, lse, dummy=dummy, needs=("dummy",))
assert grads.dummy.tolist() == [0, 0] and grads.query is None
out_t = sdpa.attention_jvp(*x, *x, dummy=dummy, dummy_t=dummy).out_t
assert np.array_equal(out_t, sdpa.attention_jvp(*x, *x).out_t)
for name in "BlockOptions", "CosineOptions", "ShawOptions", "LayerOptions", "T5Options":
    assert "dummy" in getattr(_options, name).__annotations__
out, lse = blocks.attend(*x, dummy=dummy, block=2)
assert np.allclose(out, expected, atol=1e-6)
grads = blocks.attend_backward(x[0], *x, out, lse, dummy=dummy, needs=("query", "dummy"), block=2)
assert grads.dummy.tolist() == [0, 0]
""",
    "torch": """
import torch
from sdpa.interop import torch as door
for name in "attention", "attention_forward":
    assert "dummy" in inspect.signature(getattr(door, name)).parameters
texts = {
    name: str(getattr(torch.ops.sdpa, name).default._schema)
    for name in ("attention_jvp", "attention_double_backward", "additive_forward")
}
assert all("Tensor? dummy, " in text for text in texts.values())
assert all("float? dummy_number" in text for text in texts.values())
assert "Tensor? dummy_t" in texts["attention_jvp"]
assert "Tensor? gg_dummy" in texts["attention_double_backward"]
q, k, v = (torch.from_numpy(y).requires_grad_() for y in x)
t = torch.from_numpy(dummy).requires_grad_()
for given in t, 0.5:
    assert np.array_equal(door.attention(q, k, v, dummy=given).detach().numpy(), expected)
out, lse = door.attention_forward(q, k, v, dummy=t)
grads = torch.autograd.grad(out.square().sum() + lse.sum(), (q, t), create_graph=True)
assert grads[1].tolist() == [0, 0]
assert torch.autograd.grad(grads[0].sum(), t)[0].tolist() == [0, 0]
f = lambda t: door.attention(q, k, v, dummy=t)
assert not torch.func.jvp(f, (t,), (t,))[1].any()
assert torch.func.vmap(f)(torch.ones(3, 2)).shape == (3, *expected.shape)
compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
assert torch.autograd.grad(compiled(t).sum(), t)[0].tolist() == [0, 0]
w = torch.ones(4, 3), torch.ones(4, 3), torch.ones(3)
added = door.additive_attention(q, k, v, *w, dummy=t)
assert torch.autograd.grad(added.sum(), t)[0].tolist() == [0, 0]
""",
    "jax": """
import jax
from sdpa.interop.jax import attention
from sdpa.interop.jax._primitives import INNER
assert "dummy" in inspect.signature(attention).parameters
assert {"dummy", "dummy_t", "dummy_u"} <= set(INNER)
for given in dummy, 0.5:
    assert np.array_equal(attention(*x, dummy=given), expected)
f = jax.jit(lambda t: (attention(*x, dummy=t) ** 2).sum())
assert jax.grad(f)(dummy).tolist() == [0, 0]
assert jax.hessian(f)(dummy).tolist() == [[0, 0], [0, 0]]
assert jax.vmap(f)(np.ones((3, 2), np.float32)).shape == (3,)
""",
    "autograd": """
from autograd import grad, make_jvp
from sdpa.interop import autograd as door
for name in "attention", "attention_forward":
    assert "dummy" in inspect.signature(getattr(door, name)).parameters
f = lambda t: (door.attention(*x, dummy=t) ** 2).sum()
assert f(dummy) == (expected**2).sum()
assert grad(f)(dummy).tolist() == [0, 0]
assert grad(lambda t: grad(f)(t).sum())(dummy).tolist() == [0, 0]
assert not make_jvp(lambda t: door.attention(*x, dummy=t))(dummy)(dummy)[1].any()
w = np.ones((2, 4, 3), np.float32)
g = lambda t: door.additive_attention(*x, *w, np.ones(3, np.float32), dummy=t).sum()
assert grad(g)(dummy).tolist() == [0, 0]
""",
    "onnx": """
from sdpa.interop import onnx as door
# An attribute of the standard's that has the name of an option has its meaning.
out, *_ = door._attention(23, list(x), {"dummy": 0.5}, [True], {"": 23})
assert np.array_equal(out, expected)
try:
    door._attention(23, list(x), {"dummy": "x"}, [True], {"": 23})
except TypeError as error:
    refused = str(error)
assert refused.startswith("dummy: ")
""",
    "transformers": """
import torch
from sdpa.interop.transformers import c_attention, c_attention_mask
q, k, v = map(torch.from_numpy, x)
t = torch.from_numpy(dummy).requires_grad_()
# Options travel with the mask. Keywords are the models', whose names may mean something else.
mask = c_attention_mask(1, 5, q_length=5, q_offset=0)
mask.options["dummy"] = t
out, _ = c_attention(torch.nn.Module(), q, k, v, mask, scaling=0.5)
expected = sdpa.attention(*x, is_causal=True)
assert np.array_equal(out.transpose(1, 2).detach().numpy(), expected)
assert torch.autograd.grad(out.sum(), t)[0].tolist() == [0, 0]
try:
    c_attention(torch.nn.Module(), q, k, v, None, dummy=t)
except NotImplementedError as error:
    refused = str(error)
assert refused.startswith("dummy: expected None")
""",
    "dask": """
import dask.array as da
from sdpa.interop.dask import attention, attention_backward
q = da.from_array(x[0], (1, 2, 3, 4))
for split in "queries", "keys":
    out = attention(q, *x[1:], dummy=dummy, split=split, block=2, workers=1).compute()
    assert np.allclose(out, expected, atol=1e-6)
grads = attention_backward(x[0], *x, expected, lse, chunks=2, dummy=dummy, workers=1)
whole = sdpa.attention_backward(x[0], *x, expected, lse)
assert np.allclose(grads.key.compute(), whole.key, atol=1e-6)
""",
}


@pytest.mark.parametrize("door", DOORS)
def test_a_new_option_reaches(tree, door):
    if door != "numpy":
        pytest.importorskip(door)
    run(tree, "-c", COMMON + DOORS[door])


def test_a_new_option_is_documented(tree):
    page = (tree / "docs" / "api.md").read_text(encoding="utf-8")
    item = "- `dummy`: float or array_like, (..., heads), optional. Ignored. It has a gradient."
    assert f"\n{item}\n" in page
    assert "    dummy: float | ArrayLike | None = None," in (tree / "sdpa/_core.pyi").read_text()
