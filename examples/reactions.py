"""Map the atoms of reactants to the atoms of the product by the attention of one head.

python examples/reactions.py ["CCO.CC(=O)Cl>>CCOC(C)=O" ...]

RXNMapper (Schwaller et al., "Extraction of organic chemistry grammar from unsupervised learning of
chemical reactions", Science Advances 7 (2021)) is an ALBERT that guesses masked tokens of reactions
written as SMILES. Head 5 of its layer 10 attends from each atom of the product to the same atom in
the reactants. Weights: pip install '.[model]' and make models; they are read without PyTorch.
The reaction is taken as it is written; RXNMapper itself first rewrites it with RDKit.
"""

import argparse
import io
import pickle
import re
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

import sdpa
from sdpa_lab.tools import wheels
from sdpa_lab.tools.gelu import gelu

FILES = {
    "pytorch_model.bin": "8541f3f500dae71abe678d546bd035ca946e2d1c819f6b2cf41a97faedd7e6a2",
    "vocab.txt": "399868a653e85549ce150af4a1f6cd2776240c6a3d951ced2120565f00f027fd",
}
HEADS, LONGEST = 8, 512
LAYER, HEAD = 10, 5
NEIGHBOURS = 90.0
"""Factor for neighbours of a mapped pair, because most bonds survive a reaction."""

PUBLISHED = [
    "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F",
    "C1COCCO1.CC(C)(C)OC(=O)CONC(=O)NCc1cccc2ccccc12.Cl>>O=C(O)CONC(=O)NCc1cccc2ccccc12",
]
"""The reactions of RXNMapper's own first example."""


# ---------------------------------------------------------------------- weights


class Stored(NamedTuple):
    """A tensor whose numbers follow later in the file."""

    storage: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


ALLOWED = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "FloatStorage"): np.dtype("<f4"),
    ("torch._utils", "_rebuild_tensor_v2"): lambda storage, *of: Stored(storage, *of[:3]),
}


class TensorUnpickler(pickle.Unpickler):
    """Reads dictionaries of float tensors and refuses everything else."""

    def find_class(self, module, name):
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"expected a file of tensors, got {module}.{name}")
        return ALLOWED[module, name]

    def persistent_load(self, pid):
        return pid[2]  # ("storage", type, key, device, count, view)


def tensors(content):
    """{name: float32 array} of a file that torch.save wrote before version 1.6 of PyTorch.

    The file holds five pickles (a magic number, a version, the machine, the tensors, the names of
    their storages), then for each storage the count of its numbers and the numbers.
    """
    file = io.BytesIO(content)
    *_, stored, names = (TensorUnpickler(file).load() for _ in range(5))
    storages = {}
    for name in names:
        count = int.from_bytes(file.read(8), "little")
        storages[name] = np.frombuffer(file.read(4 * count), "<f4")
    return {
        name: np.lib.stride_tricks.as_strided(
            storages[t.storage][t.offset :], t.shape, [4 * step for step in t.strides]
        )
        for name, t in stored.items()
    }


# ---------------------------------------------------------------------- model


class Albert:
    """Twelve times the same layer."""

    def __init__(self, weights, vocabulary):
        self.weights = weights
        self.numbers = {token: number for number, token in enumerate(vocabulary)}

    @classmethod
    def load(cls):
        folder = wheels.folder("rxnmapper", "RXNMapper's ALBERT")
        folder = folder / "models/transformers/albert_heads_8_uspto_all_1310k"
        weights, vocabulary = (wheels.checked(folder / name, sha) for name, sha in FILES.items())
        return cls(tensors(weights), vocabulary.decode().splitlines())

    def attention(self, tokens, layer=LAYER, head=HEAD):
        """Weights of one head over a text, (n, n) float32; no other head's are computed."""
        if len(tokens) > LONGEST:
            raise ValueError(f"reaction: expected at most {LONGEST} tokens, got {len(tokens)}")
        unknown = self.numbers["[UNK]"]
        x = self.embedded([self.numbers.get(token, unknown) for token in tokens])
        for _ in range(layer):
            x = self.layer(x)
        query, key, _ = self.projected(x)
        return sdpa.attention_weights(query[head], key[head])

    def embedded(self, numbers):
        name = "albert.embeddings"
        x = self.weights[f"{name}.word_embeddings.weight"][numbers]
        x = x + self.weights[f"{name}.position_embeddings.weight"][: len(numbers)]
        x = x + self.weights[f"{name}.token_type_embeddings.weight"][0]
        x = self.normalised(x, f"{name}.LayerNorm")
        return self.linear(x, "albert.encoder.embedding_hidden_mapping_in")

    NAME = "albert.encoder.albert_layer_groups.0.albert_layers.0"

    def layer(self, x):
        out = sdpa.attention(*self.projected(x))
        out = self.linear(out.swapaxes(0, 1).reshape(x.shape), f"{self.NAME}.attention.dense")
        x = self.normalised(x + out, f"{self.NAME}.attention.LayerNorm")
        inner = gelu(self.linear(x, f"{self.NAME}.ffn"))
        out = self.linear(inner, f"{self.NAME}.ffn_output")
        return self.normalised(x + out, f"{self.NAME}.full_layer_layer_norm")

    def projected(self, x):
        """Query, key and value: (heads, n, 32) each."""
        names = (f"{self.NAME}.attention.{role}" for role in ("query", "key", "value"))
        return [self.linear(x, name).reshape(len(x), HEADS, -1).swapaxes(0, 1) for name in names]

    def linear(self, x, name):
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def normalised(self, x, name):
        x = x - x.mean(axis=-1, keepdims=True)
        x /= np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(1e-12))
        return x * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]


# ---------------------------------------------------------------------- chemistry


TOKEN = re.compile(r"\[[^\[\]]+\]|Br|Cl|>>|%\d\d|.")
BRACKET = re.compile(r"\[(\d*)(\*|[A-Za-z][a-z]?)(@*)(?:H(\d*))?([+-]*\d*)(?::(\d+))?\]")
BONDS = {"-": 1, "/": 1, "\\": 1, "~": 1, ":": 1, "=": 2, "#": 3, "$": 4}
VALENCES = {"B": (3,), "C": (4,), "N": (3, 5), "O": (2,), "P": (3, 5), "S": (2, 4, 6)}
VALENCES |= dict.fromkeys(("F", "Cl", "Br", "I"), (1,))


def tokenised(reaction):
    """Tokens of SMILES: atoms, bonds, brackets, ring numbers, dots and the arrow."""
    tokens = TOKEN.findall(reaction)
    if tokens.count(">>") != 1 or any(not reaction.isascii() or t.isspace() for t in tokens):
        raise ValueError(f"reaction: expected SMILES 'reactants>>products', got {reaction!r}")
    return tokens


def is_atom(token):
    return token[0].isalpha() or token[0] in "[*"


def element(atom):
    """The symbol, without charge, hydrogens and aromaticity."""
    return (BRACKET.match(atom)[2] if atom[0] == "[" else atom).capitalize()


def bonds(tokens):
    """{(i, j): order} between the atoms of SMILES tokens, in the order in which they come."""
    found, rings, branches = {}, {}, []
    atom, last, order = -1, None, 1
    for token in tokens:
        if is_atom(token):
            atom += 1
            if last is not None:
                found[last, atom] = order
            last, order = atom, 1
        elif token == "(":
            branches.append(last)
        elif token == ")":
            last = branches.pop()
        elif token in BONDS:
            order = BONDS[token]
        elif token in (".", ">>"):
            last = None
        elif token[-1].isdigit():
            other, before = rings.pop(token, (None, 1))
            if other is None:
                rings[token] = (last, order)
            else:
                found[other, last] = max(order, before)
            order = 1
    return found


def adjacency(tokens):
    """(atoms, atoms) bool."""
    count = sum(map(is_atom, tokens))
    matrix = np.zeros((count, count), bool)
    for i, j in bonds(tokens):
        matrix[i, j] = matrix[j, i] = True
    return matrix


def numbered(tokens, numbers):
    """SMILES with map numbers: a mapped C of three single bonds becomes [CH:7]."""
    used = np.zeros(len(numbers), int)
    for pair, order in bonds(tokens).items():
        used[list(pair)] += order
    atoms, written = 0, []
    for token in tokens:
        if is_atom(token):
            number, order = numbers[atoms], used[atoms]
            atoms += 1
            if number is not None:
                token = f"{token[:-1] if token[0] == '[' else '[' + with_hydrogens(token, order)}"
                token += f":{number}]"
        written.append(token)
    return "".join(written)


def with_hydrogens(atom, used):
    """An atom outside brackets with the hydrogens that its valence leaves room for."""
    if atom.islower():  # aromatic: one more electron is shared in the ring
        missing = VALENCES[element(atom)][0] - used - 1
    else:
        missing = next((v - used for v in VALENCES.get(atom, ()) if v >= used), 0)
    return atom + {0: "", 1: "H"}.get(max(missing, 0), f"H{missing}")


# ---------------------------------------------------------------------- mapping


class Mapping(NamedTuple):
    text: str
    """The reaction, with map numbers."""
    confidence: float
    """Product of the shares of attention by which the atoms were chosen."""
    pairs: list[tuple[int, int, float]]
    """(atom of the product, atom of the reactants, share), as they were chosen."""
    weights: np.ndarray
    """Attention between them, both directions added: (product atoms, reactant atoms)."""


def mapped(model, reaction):
    """The atoms of one reaction, by greedy choice of the largest share of attention."""
    tokens = tokenised(reaction)
    arrow = tokens.index(">>")
    weights = model.attention(["[CLS]", *tokens, "[SEP]"])[1:-1, 1:-1]
    atoms = np.array([is_atom(token) for token in tokens])
    left, right = atoms.copy(), atoms.copy()
    left[arrow:] = right[:arrow] = False
    both = (weights[np.ix_(right, left)] + weights[np.ix_(left, right)].T).astype(np.float64)

    elements = np.array([element(token) if is_atom(token) else "" for token in tokens])
    allowed = both * (elements[right][:, None] == elements[left])
    sides = tokens[:arrow], tokens[arrow + 1 :]
    pairs = chosen(allowed, *map(adjacency, sides))

    target = {p: r for p, r, _ in pairs}
    source = {r: p + 1 for p, r in target.items()}
    reactants = [source.get(r) for r in range(both.shape[1])]
    products = [p + 1 for p in range(both.shape[0])]
    text = f"{numbered(sides[0], reactants)}>>{numbered(sides[1], products)}"
    return Mapping(text, float(np.prod([share for *_, share in pairs])), pairs, both)


def chosen(weights, bound_left, bound_right):
    """Pairs of atoms, the surest first; each raises those of its neighbours."""
    factors = np.ones_like(weights)
    pairs = []
    for _ in range(len(weights)):
        shares = weights * factors
        totals = shares.sum(axis=1, keepdims=True)
        shares = np.divide(shares, totals, out=np.zeros_like(shares), where=totals > 0)
        p, r = np.unravel_index(shares.argmax(), shares.shape)
        if np.isclose(shares[p, r], 0):
            break
        pairs.append((int(p), int(r), float(shares[p, r])))
        factors[np.ix_(bound_right[p], bound_left[r])] *= NEIGHBOURS
        factors[p], factors[:, r] = 0, 0
    return pairs


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reactions", nargs="*", default=PUBLISHED, help="SMILES, with >>")
    options = parser.parse_args()
    try:
        model = Albert.load()
    except ImportError as error:
        raise SystemExit(f"reactions.py was skipped: {error}") from None
    for reaction in options.reactions:
        try:
            result = mapped(model, reaction)
        except ValueError as error:
            raise SystemExit(str(error)) from None
        print(f"{reaction}\n{result.text}\nconfidence {result.confidence:.4f}\n")


if __name__ == "__main__":
    main()
