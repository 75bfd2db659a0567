"""An interpreter of the codes of programs in NumPy, written from the layout in src/program.h."""

import numpy as np

from sdpa._programs._operations import NUMBERS

NAMES = {number: name for name, number in NUMBERS.items()}
# What each section may read of the pair.
_INPUTS = (
    {"batch", "head"},
    {"query"},
    {"key"},
    {"query", "score", "tangent", "upstream", "second"},
)
_ALL = frozenset().union(*_INPUTS)


def _divide(a, b):
    return np.where(b == 0, 0, a // np.where(b == 0, 1, b))


def _remainder(a, b):
    return np.where(b == 0, 0, a - np.where(b == 0, 1, b) * (a // np.where(b == 0, 1, b)))


UNARY = {
    "negative": lambda a: -a,
    "absolute": np.abs,
    "sqrt": np.sqrt,
    "exp": np.exp,
    "log": np.log,
    "tanh": np.tanh,
    "logical_not": lambda a: ~a,
    "real_of": lambda a: a.astype(np.float64),
    "integer_of_b": lambda a: a.astype(np.int64),
    "integer_of_r": lambda a: np.trunc(a).astype(np.int64),
}
BINARY = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "floor_divide": _divide,
    "remainder": _remainder,
    "bitwise_and": lambda a, b: a & b,
    "bitwise_or": lambda a, b: a | b,
    "bitwise_xor": lambda a, b: a ^ b,
    "left_shift": lambda a, b: a << b,
    "right_shift": lambda a, b: a >> b,
    "less": lambda a, b: a < b,
    "less_equal": lambda a, b: a <= b,
    "equal": lambda a, b: a == b,
    "not_equal": lambda a, b: a != b,
    "logical_and": lambda a, b: a & b,
    "logical_or": lambda a, b: a | b,
    "logical_xor": lambda a, b: a ^ b,
}


# Of two operands, of which the second is of keys or, turned, the first.
OF_KEYS = {
    "difference_i": lambda a, b, _: a - b,
    "difference_r": lambda a, b, _: (a - b).astype(np.float64),
    "less_key": lambda a, b, _: a < b,
    "less_equal_key": lambda a, b, _: a <= b,
    "equal_key": lambda a, b, _: a == b,
    "within": lambda a, b, c: np.abs(a - b) <= c,
}


def instructions(code):
    """The four sections of a code as lists of (name, dst, a, b, c), and its registers' number."""
    words = np.frombuffer(code, np.uint16).tolist()
    counts, n_registers = words[:4], words[4]
    assert len(words) == 5 + 5 * sum(counts)
    rows = [words[i : i + 5] for i in range(5, len(words), 5)]
    sections = []
    for count in counts:
        sections.append([(NAMES[row[0]], *row[1:]) for row in rows[:count]])
        rows = rows[count:]
    return sections, n_registers


def live_at_most(code):
    """The registers of the section of pairs, beside those that the sections before it have set."""
    sections, n_registers = instructions(code)
    return n_registers - sum(map(len, sections[:3]))


def registers_read(name, a, b, c):
    """The registers that an operation with a result reads."""
    if name in _ALL or name.startswith("constant"):
        return ()
    if name == "index":
        return (c,)
    if name.startswith("gather"):
        return (b,)
    if name.startswith("select") or name.endswith("_product"):
        return (a, b, c)
    if name in OF_KEYS:
        return (a, c) if name == "within" else (a,)
    is_unary = name in UNARY or name[:-2] in UNARY or name.startswith(("spread", "real_of"))
    return (a,) if is_unary else (a, b)


@np.errstate(all="ignore")
def run(prepared, variant, inputs, tangents=()):
    """(outputs by number, gradients by array) of one code on arrays that broadcast.

    inputs: what the core provides, by name; tangents: one array for each array of the program.
    Out-of-range indices raise an IndexError, as the core's.
    """
    sections, n_registers = instructions(prepared.codes[variant])
    reals = np.frombuffer(prepared.reals, np.float64)
    integers = np.frombuffer(prepared.integers, np.int64)
    arrays = [np.asarray(x, order="C") for x in prepared.arrays]
    shape = np.broadcast_shapes(*(np.shape(x) for x in inputs.values()))
    registers, kept, of_keys = {}, set(), set()
    outputs, gradients = {}, {}

    def read(name, a, b, c):
        if name in inputs:
            dtype = np.int64 if name in ("batch", "head", "query", "key") else np.float64
            return np.asarray(inputs[name], dtype)
        if name == "constant_r":
            return reals[a]
        if name == "constant_i":
            return integers[a]
        if name == "constant_b":
            return np.bool_(a)
        if name == "index":
            return indexed(arrays[a], b, registers[c])
        if name == "gather_tangent":
            return np.asarray(tangents[a], np.float64).reshape(-1)[registers[b]]
        if name.startswith("spread_"):
            return registers[a]
        if name.startswith("gather_"):
            found = arrays[a].reshape(-1)[registers[b]]
            return found.astype({"r": np.float64, "i": np.int64, "b": np.bool_}[name[-1]])
        if name.startswith("select_"):
            return np.where(registers[a], registers[b], registers[c])
        if name in OF_KEYS:
            first, second = (b, a) if name != "within" and c else (a, b)
            return OF_KEYS[name](registers[first], registers[second], registers.get(c))
        if name.endswith("_product"):
            product = registers[b] * registers[c]
            return registers[a] + (product if name == "add_product" else -product)
        for table, operands in ((UNARY, (a,)), (BINARY, (a, b))):
            for word in (name, name[:-2]):
                if word in table:
                    return table[word](*(np.asarray(registers[x]) for x in operands))
        raise AssertionError(name)

    for number, section in enumerate(sections):
        for name, dst, a, b, c in section:
            if name == "output":
                outputs[dst] = np.broadcast_to(registers[a], shape)
            elif name == "scatter":
                grad = gradients.setdefault(a, np.zeros(arrays[a].shape))
                index, added = np.broadcast_arrays(registers[b], registers[c], np.empty(shape))[:2]
                np.add.at(grad.reshape(-1), index, added)
            else:
                assert dst < n_registers
                assert dst not in kept
                assert name not in _ALL or name in _INPUTS[number] or name in _INPUTS[0]
                if name.startswith("spread"):
                    assert number == 3
                    assert a in of_keys
                else:
                    assert number == 2 or not of_keys & set(registers_read(name, a, b, c))
                if number == 2:
                    of_keys.add(dst)
                registers[dst] = read(name, a, b, c)
                if number < 3:
                    kept.add(dst)
    return outputs, gradients


def indexed(array, axis, index):
    """The offset of an index along one axis, checked."""
    size = array.shape[axis]
    if np.any((np.asarray(index) < 0) | (np.asarray(index) >= size)):
        raise IndexError(f"{axis}: {index}")
    return np.asarray(index) * int(np.prod(array.shape[axis + 1 :]))
