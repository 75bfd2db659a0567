"""Objects that are no arrays and offer one by a single protocol."""

import numpy as np


class OnlyArray:
    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


class OnlyDlpack:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OnDevice:
    """An array on another device, which is asked for nothing but its device."""

    def __init__(self, *device):
        self.device = device

    def __dlpack__(self, **kwargs):
        raise AssertionError("exported, though it is not on the CPU")

    def __dlpack_device__(self):
        return self.device


class OnDeviceArray(OnDevice):
    """A DLPack object whose __array__ refuses, like those of PyTorch and CuPy."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("copy it to the host first")


class CopiedFromDevice(OnDevice):
    """A DLPack object whose __array__ copies to the host, like a JAX array on a GPU."""

    def __init__(self, *device, contents=0.0):
        super().__init__(*device)
        self.contents = np.array(contents)
        self.shape, self.dtype = self.contents.shape, self.contents.dtype

    def __getitem__(self, index):
        return CopiedFromDevice(*self.device, contents=self.contents[index])

    def __array__(self, dtype=None, copy=None):
        return self.contents


class Bfloat16Tensor:
    """An object that looks like a bfloat16 tensor of PyTorch in either protocol."""

    dtype = "torch.bfloat16"

    def __array__(self, dtype=None, copy=None):
        raise TypeError("unsupported")

    def __dlpack_device__(self):
        return 1, 0


def no_number(name):
    """The rows of tests/refusals for what float() would read, or cut to its real part."""
    text = f"{name}: expected a finite number, got"
    return {
        f"{name} text": (TypeError, f"{text} '30'", {name: "30"}),
        f"{name} array of text": (
            TypeError,
            f"{text} array('30', dtype='<U2')",
            {name: np.array("30")},
        ),
        **{
            f"{name} {x.dtype}": (TypeError, f"{text} {x!r}", {name: x})
            for x in (
                np.complex64(2 + 1j),
                np.complex128(30 + 1j),
                np.array("30", np.dtypes.StringDType()),
                np.void(b"30"),
            )
        },
    }


def elsewhere(name):
    """The rows of tests/refusals for an argument that NumPy cannot take."""
    text = f"{name}: expected an array on the CPU, got"
    return {
        f"{name} on a GPU": (TypeError, f"{text} {OnDevice} on cuda:1", {name: OnDevice(2, 1)}),
        f"{name} on a GPU, with __array__": (
            TypeError,
            f"{text} {OnDeviceArray} on rocm:0",
            {name: OnDeviceArray(10, 0)},
        ),
        f"{name} on a GPU, whose __array__ copies": (
            TypeError,
            f"{text} {CopiedFromDevice} on cuda:0",
            {name: CopiedFromDevice(2, 0)},
        ),
        f"{name} on a device without a name": (
            TypeError,
            f"{text} {OnDevice} on device type 99:3",
            {name: OnDevice(99, 3)},
        ),
        f"{name} of PyTorch's bfloat16": (
            TypeError,
            f"{name}: expected a dtype that NumPy takes, got {Bfloat16Tensor} of torch.bfloat16; "
            "sdpa.interop.torch takes its tensors",
            {name: Bfloat16Tensor()},
        ),
    }
