"""What the notes say, sentence by sentence, and the row of the ledger that judges it.

`sentences.json` is the one place that joins rows and notes: `Claim.said`, docs/ledger.md and
docs/claims-map.md are made from it. It holds

    notes      by note, the SHA-256 of its text
    checked    what `stamp` gave when every quotation was last compared with these texts
    own        rows that no note asks for, with the reason for having them
    sentences  note, lines ("18" or "24-27"), words quoted from them, and the rows that judge them
               or why there is none

The notes themselves are not in the repository. `tools/claims_map.py --notes DIR` compares every
quotation with its lines and writes the stamp; without the notes a test still sees a quotation or a
line that was changed after it.
"""

import json
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any, NamedTuple


class Sentence(NamedTuple):
    """Words of a note, and how the ledger deals with them."""

    note: str
    lines: str
    words: str
    rows: tuple[str, ...] = ()
    why: str = ""
    """Why there is no row, where there is none."""

    @property
    def place(self) -> str:
        """Note and lines, as in "000 L18"."""
        return f"{self.note} L{self.lines}"

    def found_in(self, text: str) -> bool:
        """Whether the words stand in these lines of a note.

        Examples
        --------
        >>> from sdpa_lab.claims.sentences import Sentence
        >>> [Sentence("000", at, "b").found_in("a\\nb\\nc") for at in ("1", "1-2", "3")]
        [False, True, False]
        """
        first, _, last = self.lines.partition("-")
        return self.words in "\n".join(text.split("\n")[int(first) - 1 : int(last or first)])


@cache
def contents() -> dict[str, Any]:
    """The file as it is."""
    return dict(json.loads(files(__package__).joinpath("sentences.json").read_text("utf-8")))


@cache
def sentences() -> tuple[Sentence, ...]:
    """Every sentence, in the order of the notes."""
    found = (dict(entry) for entry in contents()["sentences"])
    return tuple(Sentence(**entry | {"rows": tuple(entry.get("rows", ()))}) for entry in found)


@cache
def of_row(name: str) -> tuple[Sentence, ...]:
    """The sentences that a row judges; none for a row of our own.

    Examples
    --------
    >>> from sdpa_lab.claims.sentences import of_row
    >>> [sentence.place for sentence in of_row("toy-512")]
    ['003 L95', '003 L99']
    """
    return tuple(sentence for sentence in sentences() if name in sentence.rows)


def stamp(notes: dict[str, str]) -> str:
    """A digest of every quotation with its place, and of the notes that it was compared with."""
    quoted = [sentence[:3] for sentence in sentences()]
    return sha256(json.dumps([notes, quoted]).encode()).hexdigest()
