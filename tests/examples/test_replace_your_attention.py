"""Twenty lines of NumPy and one call compute the same, and the program says what either takes."""

import re

import pytest
from support.bounds import AttentionBounds
from support.examples import load, run
from support.helpers import assert_within

from sdpa import reference

example = load("replace_your_attention")


@pytest.mark.parametrize("function", [example.before, example.after])
def test_both_compute_causal_attention(function):
    tensors = example.operands(2, 70)
    expected = reference.attention_forward(*tensors, is_causal=True).out
    bounds = AttentionBounds(*tensors, is_causal=True)
    assert_within(function(*tensors), expected, bounds.out)


def test_the_first_is_twenty_lines():
    # Its body, with blank lines and comments.
    with open(example.__file__) as file:
        source = file.read()
    body = re.search(r'as it is usually written.*?"""\n(.*?)\n\n\ndef ', source, re.DOTALL)[1]
    assert len(body.splitlines()) <= 20


@pytest.mark.slow
def test_the_table():
    out, _ = run("replace_your_attention", "--lengths", 1500, "--heads", 4)
    row = re.search(r"^ +1500 +([\d.]+) ms +([\d.]+) MB +([\d.]+) ms +([\d.]+) MB .* ", out, re.M)
    old, much, new, little = map(float, row.groups())
    scores = 4 * 1500 * 1500 * 4 / 1e6
    result = 4 * 1500 * 64 * 4 / 1e6
    assert old > 0 < new
    # The matrix of scores is held at least twice; sdpa holds the result and a block per thread.
    # The system counts resident pages in batches of up to a quarter of a megabyte per thread.
    assert much > 1.9 * scores
    assert result - 0.5 < little < 3 * result < scores / 7
