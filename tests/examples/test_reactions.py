"""Atoms mapped by the attention of one head, as the authors' package maps them."""

import pickle
import time
from collections import Counter

import numpy as np
import pytest
from support.examples import load, need, run

example = load("reactions")

# What the package's documentation and its tests publish, of reactions that it does not rewrite.
PUBLISHED = [
    (
        example.PUBLISHED[0],
        "CN(C)C=O.F[c:5]1[n:6][cH:7][cH:8][cH:9][c:10]1[F:11].O=C([O-])[O-]."
        "[CH3:1][CH:2]([CH3:3])[SH:4].[K+].[K+]>>"
        "[CH3:1][CH:2]([CH3:3])[S:4][c:5]1[n:6][cH:7][cH:8][cH:9][c:10]1[F:11]",
        0.9565619900376546,
    ),
    (
        example.PUBLISHED[1],
        "C1COCCO1.CC(C)(C)[O:3][C:2](=[O:1])[CH2:4][O:5][NH:6][C:7](=[O:8])[NH:9][CH2:10][c:11]1"
        "[cH:12][cH:13][cH:14][c:15]2[cH:16][cH:17][cH:18][cH:19][c:20]12.Cl>>"
        "[O:1]=[C:2]([OH:3])[CH2:4][O:5][NH:6][C:7](=[O:8])[NH:9][CH2:10][c:11]1[cH:12][cH:13]"
        "[cH:14][c:15]2[cH:16][cH:17][cH:18][cH:19][c:20]12",
        0.9704424331552834,
    ),
    (
        "C(C)O.BrC(C)>>CCOCC",
        "[CH2:2]([CH3:1])[OH:3].Br[CH2:4][CH3:5]>>[CH3:1][CH2:2][O:3][CH2:4][CH3:5]",
        0.9754605679009868,
    ),
    (
        "CCO.BrCFC>>CCOCFC",
        "[CH3:1][CH2:2][OH:3].Br[CH2:4][F:5][CH3:6]>>[CH3:1][CH2:2][O:3][CH2:4][F:5][CH3:6]",
        0.9730222157275086,
    ),
    (
        "[1*]C=C.O>>*CCO",
        "[1*:1][CH:2]=[CH2:3].[OH2:4]>>[*:1][CH2:2][CH2:3][OH:4]",
        0.9988284870307568,
    ),
]


@pytest.fixture(scope="module")
def model():
    need("rxnmapper", "RXNMapper's ALBERT")
    return example.Albert.load()


def atoms(reaction):
    """For each side its atoms with their neighbours, however the SMILES orders them."""
    sides = []
    for side in reaction.split(">>"):
        tokens = example.TOKEN.findall(side)
        names = [token for token in tokens if example.is_atom(token)]
        near = example.adjacency(tokens)
        around = [tuple(sorted(np.array(names)[row])) for row in near]
        sides.append(Counter(zip(names, around, strict=True)))
    return sides


@pytest.mark.parametrize(("reaction", "expected", "confidence"), PUBLISHED)
def test_published_maps_are_reproduced(model, reaction, expected, confidence):
    result = example.mapped(model, reaction)
    assert atoms(result.text) == atoms(expected)
    # As closely as the package's own tests ask for.
    assert np.isclose(result.confidence, confidence)


def test_the_graph_of_a_reaction_tells_maps_apart():
    # What the test above compares with: order is nothing, numbers and bonds are everything.
    assert atoms("[CH3:1][OH:2]>>C") == atoms("[OH:2][CH3:1]>>C")
    assert atoms("[CH3:1][OH:2]>>C") != atoms("[CH3:2][OH:1]>>C")
    assert atoms("C1CC1O>>C") != atoms("C1CCO1>>C")


def test_the_weights_are_those_of_a_whole_layer(model):
    # ALBERT in float64, with every head's matrix.
    tokens = ["[CLS]", *example.tokenised(PUBLISHED[2][0]), "[SEP]"]
    wide = example.Albert({k: w.astype(np.float64) for k, w in model.weights.items()}, [])
    wide.numbers = model.numbers
    x = wide.embedded([wide.numbers[token] for token in tokens])
    for _ in range(example.LAYER + 1):
        query, key, _ = wide.projected(x)
        scores = query @ key.swapaxes(-1, -2) / 32**0.5
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        x = wide.layer(x)
    np.testing.assert_allclose(model.attention(tokens), weights[example.HEAD], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("smiles", "hydrogens"),
    [
        ("CCO", ["CH3", "CH2", "OH"]),
        ("C#N", ["CH", "N"]),
        ("O=S(=O)(O)C", ["O", "S", "O", "OH", "CH3"]),
        ("c1ccncc1", ["cH", "cH", "cH", "n", "cH", "cH"]),
        ("Cn1cccc1", ["CH3", "n", "cH", "cH", "cH", "cH"]),
        ("c1ccc2ccccc2c1", ["cH", "cH", "cH", "c", "cH", "cH", "cH", "cH", "c", "cH"]),
        ("C1CC1Br", ["CH2", "CH2", "CH", "Br"]),
        ("C%10CC%10", ["CH2", "CH2", "CH2"]),
        ("[nH]1cccc1", ["nH", "cH", "cH", "cH", "cH"]),
        ("[NH4+].[Cl-]", ["NH4+", "Cl-"]),
    ],
)
def test_hydrogens(smiles, hydrogens):
    tokens = example.TOKEN.findall(smiles)
    written = example.numbered(tokens, list(range(1, 1 + len(hydrogens))))
    found = [t[1:-1].split(":")[0] for t in example.TOKEN.findall(written) if t[0] == "["]
    assert found == hydrogens


@pytest.mark.parametrize("reaction", ["CCO", "C>>C>>C", "C >>C", "水>>C"])
def test_what_is_no_reaction_is_refused(model, reaction):
    with pytest.raises(ValueError, match=r"^reaction: expected SMILES"):
        example.mapped(model, reaction)


def test_long_reactions_are_refused(model):
    with pytest.raises(ValueError, match=r"^reaction: expected at most 512 tokens, got 1005"):
        example.mapped(model, f"{1000 * 'C'}>>CC")


def test_brackets_that_do_not_end_are_read_once():
    start = time.process_time()
    assert example.tokenised("[" * 100_000 + ">>C")[-2:] == [">>", "C"]
    assert time.process_time() - start < 1


def test_a_pickle_of_anything_else_is_refused():
    class Harmful:
        def __reduce__(self):
            return eval, ("1 / 0",)

    content = pickle.dumps(Harmful(), protocol=2)
    with pytest.raises(pickle.UnpicklingError, match=r"^expected a file of tensors, got"):
        example.tensors(content)


def test_tensors_are_those_that_torch_reads(model, torch, tmp_path):
    tensors = {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.ones(4)[1:3]}
    path = tmp_path / "old.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    found = example.tensors(path.read_bytes())
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor.numpy())


def test_the_program(model):
    out, _ = run("reactions")
    assert out.count("confidence") == 2
    assert "[CH3:1][CH:2]([CH3:3])[S:4][c:5]1[n:6]" in out
    assert "confidence 0.9566" in out


def test_without_the_weights_the_program_says_so():
    out, err = run("reactions", code=1, hide="rxnmapper")
    assert not out
    assert err.startswith("reactions.py was skipped: RXNMapper's ALBERT comes with a wheel")
