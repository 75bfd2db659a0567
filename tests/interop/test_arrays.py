"""Arrays of other libraries: taken by __array__ or DLPack wherever an array is, never written."""

import numpy as np
import pytest
from support.calls import CALLS, F32, PROGRAMS, everything, message, operands
from support.protocols import CopiedFromDevice, OnDevice, OnlyArray, OnlyDlpack

import sdpa


def mapped(convert, x):
    """x with every array in it converted, at any depth of lists and tuples."""
    if isinstance(x, np.ndarray):
        return convert(x)
    return type(x)(mapped(convert, y) for y in x) if type(x) in (list, tuple) else x


def arrays(x):
    """The arrays in x, at any depth."""
    if isinstance(x, np.ndarray):
        return [x]
    return [a for y in x for a in arrays(y)] if isinstance(x, (list, tuple)) else []


FUNCTIONS = [
    function
    for function, x in CALLS.items()
    if arrays(list(x().values()))
    and not function.__qualname__.startswith("KVCache.")
    and function not in PROGRAMS  # which return no arrays
]


def arguments(function, rng):
    """Arguments of a call with random arrays, and the names of the arrays it does not write."""

    def drawn(a):
        return rng.standard_normal(a.shape).astype(F32) if a.dtype.kind == "f" else a

    x = {name: mapped(drawn, value) for name, value in everything(function).items()}
    written = {"out"} if function in (sdpa.attention, sdpa.attention_forward) else set()
    return x, [name for name in x if name not in written]


def same_with(convert, function, rng):
    x, read = arguments(function, rng)
    before = mapped(np.copy, [x[name] for name in read])
    expected = arrays(function(**x))
    assert expected
    got = arrays(function(**(x | {name: mapped(convert, x[name]) for name in read})))
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    for after, name in zip(before, read, strict=True):
        np.testing.assert_equal(x[name], after)


def read_only(a):
    a.flags.writeable = False
    return a


@pytest.mark.parametrize(
    "convert",
    [lambda a: OnlyArray(read_only(a)), OnlyDlpack],
    ids=["__array__", "DLPack"],
)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__qualname__)
def test_protocols(function, convert, rng):
    same_with(convert, function, rng)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__qualname__)
def test_torch(function, torch, rng):
    same_with(torch.from_numpy, function, rng)
    same_with(lambda a: OnlyDlpack(torch.from_numpy(a)), function, rng)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__qualname__)
def test_jax(function, rng):
    """JAX's arrays are read-only, by __array__ and by DLPack."""
    jnp = pytest.importorskip("jax.numpy", reason="needs jax: pip install '.[peers]'")
    same_with(jnp.asarray, function, rng)
    same_with(lambda a: OnlyDlpack(jnp.asarray(a)), function, rng)
    assert not np.from_dlpack(jnp.zeros(3)).flags.writeable


def test_dlpack_shares_memory():
    """Nothing is copied on the way in: the result uses the current contents of the memory."""
    x = np.zeros((3, 4), F32)
    (view,) = sdpa._core._arrays(x=OnlyDlpack(x[:, ::2]))
    assert np.shares_memory(view, x)
    assert view.strides == (16, 8)


def test_tensors_that_numpy_cannot_take(torch):
    x = operands()
    tensor = torch.ones(x["query"].shape, dtype=torch.bfloat16)
    text = (
        "query: expected a dtype that NumPy takes, got <class 'torch.Tensor'> of torch.bfloat16; "
        "sdpa.interop.torch takes its tensors"
    )
    assert message(TypeError, sdpa.attention, **(x | {"query": tensor})) == text
    tensor = torch.ones(x["key"].shape, device="meta")
    start = "key: expected an array, got <class 'torch.Tensor'>, which NumPy cannot take: "
    assert message(TypeError, sdpa.attention, **(x | {"key": tensor})).startswith(start)


@pytest.mark.parametrize("attribute", ["__dlpack_device__", "dtype"])
def test_interruptions_pass(attribute):
    def interrupted(self):
        raise KeyboardInterrupt

    def refused(self, dtype=None, copy=None):
        raise TypeError

    made = interrupted if attribute == "__dlpack_device__" else property(interrupted)
    broken = type("Broken", (), {"__array__": refused, attribute: made})()
    with pytest.raises(KeyboardInterrupt):
        sdpa.softmax(broken)


def test_a_cache_keeps_what_it_is_given(rng):
    """The methods return nothing, so the arrays that the cache kept are compared."""
    cache = sdpa.KVCache(1, 2, 4, capacity=3)
    key, value = rng.standard_normal((2, 1, 2, 3, 4)).astype(F32)
    cache.append(OnlyDlpack(key), OnlyArray(value))
    np.testing.assert_array_equal(cache.key, key)
    np.testing.assert_array_equal(cache.value, value)


@pytest.mark.parametrize("attribute", ["__array_interface__", "__array_struct__"])
def test_older_protocols(attribute):
    """They come before DLPack, which is not asked."""
    x = np.arange(6.0)
    made = {attribute: property(lambda self: getattr(x, attribute)), "__dlpack__": None}
    assert np.array_equal(sdpa.softmax(type("Older", (), made)()), sdpa.softmax(x))


@pytest.mark.parametrize("device", [(1, 0), (3, 0), (11, 0), (13, 0), ("cpu", 0), 1])
def test_devices_that_numpy_reads(device):
    made = {"__dlpack__": OnlyDlpack.__dlpack__, "__dlpack_device__": lambda self: device}
    tensor = type("Tensor", (OnlyDlpack,), made)(np.arange(6.0))
    assert np.array_equal(sdpa.softmax(tensor), sdpa.softmax(np.arange(6.0)))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__qualname__)
def test_nothing_is_copied_from_another_device(function):
    """An array of JAX on a GPU has an __array__ that would copy it to the host."""
    x = everything(function)
    names = [name for name, value in x.items() if isinstance(value, np.ndarray) and name != "out"]
    assert names or function is sdpa.merge_attention
    for name in names:
        elsewhere = CopiedFromDevice(2, 1, contents=x[name])
        text = message(TypeError, function, **(x | {name: elsewhere}))
        assert text == f"{name}: expected an array on the CPU, got {CopiedFromDevice} on cuda:1"


@pytest.mark.parametrize("name", ["query", "keys", "values", "attn_mask"])
def test_an_array_on_another_device_is_no_store(name):
    """It has a shape, a dtype and slices, as stores have."""
    x = {f"{n}s" if n != "query" else n: a for n, a in operands().items()}
    x["attn_mask"] = np.zeros((5, 7), F32)
    x[name] = CopiedFromDevice(2, 1, contents=x[name])
    text = message(TypeError, sdpa.blocks.attend, **x)
    argument = name if name == "attn_mask" else name.removesuffix("s")
    assert text == f"{argument}: expected an array on the CPU, got {CopiedFromDevice} on cuda:1"


def test_arrays_of_jax_on_the_cpu_say_so():
    """By a member of an enumeration, which is an integer."""
    jnp = pytest.importorskip("jax.numpy", reason="needs jax: pip install '.[peers]'")
    device, index = jnp.zeros(3).__dlpack_device__()
    assert (int(device), index) == (1, 0)
    assert np.array_equal(sdpa.softmax(jnp.zeros(3)), sdpa.softmax(np.zeros(3, F32)))


def test_a_device_without_a_name():
    text = message(TypeError, sdpa.softmax, OnDevice(0, 2))
    assert text.endswith("on device type 0:2")


def test_no_elements_and_no_memory():
    """Such an array may lie at address 0."""
    made = {"data": (0, False), "shape": (0, 4), "typestr": "<f4", "version": 3}
    x = type("Empty", (), {"__array_interface__": made})()
    assert sdpa.attention(np.ones((2, 4), F32), x, x).tolist() == [[0] * 4] * 2
