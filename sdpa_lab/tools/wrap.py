"""Text in columns of a terminal, where Chinese letters take two and need no space to break at."""

import re
from collections.abc import Iterator
from unicodedata import east_asian_width

CLOSING = "\0，。；：！？、）》」』”’％%"
"""No line begins with these; \\0 stands for a space at which no line ends."""

OPENING = "（《「『“‘"
"""No line ends with these."""


def width(text: str) -> int:
    """Columns that `text` takes.

    Examples
    --------
    >>> from sdpa_lab.tools.wrap import width
    >>> width("entropy"), width("熵")
    (7, 2)
    """
    return sum(2 if _wide(letter) else 1 for letter in text)


def fill(
    text: str,
    columns: int,
    *,
    initial_indent: str = "",
    subsequent_indent: str = "",
    max_lines: int | None = None,
    placeholder: str = " ...",
) -> str:
    """`textwrap.fill`, by columns, which also breaks between two Chinese letters.

    Words are kept whole, hyphens included, and so are "d_k = 16", "12 %" and what has
    a no-break space, which becomes a space.

    Examples
    --------
    >>> from sdpa_lab.tools.wrap import fill
    >>> print(fill("梯度没有消失，而是向少数行集中。", 14))
    梯度没有消失，
    而是向少数行集
    中。
    """
    kept = text.replace(" = ", "\0=\0").replace(" %", "\0%").replace("\u00a0", "\0")
    lines: list[list[str]] = [[initial_indent]]
    for piece in _pieces(kept):
        if len(lines[-1]) > 1 and width("".join([*lines[-1], piece]).rstrip()) > columns:
            lines.append([subsequent_indent])
        lines[-1].append(piece)
    if max_lines is not None and len(lines) > max_lines:
        lines = lines[:max_lines]
        last = lines[-1]
        while len(last) > 2 and width("".join(last).rstrip() + placeholder) > columns:
            last.pop()
        last.append(placeholder if last[-1][-1:] != " " else placeholder.lstrip())
    return "\n".join("".join(line).rstrip() for line in lines).replace("\0", " ")


def _pieces(text: str) -> Iterator[str]:
    """What stays on one line: a word, or a wide letter with its punctuation; then its spaces."""
    piece = ""
    for part in re.findall(r"\s+|\S", text):
        space, last = part.isspace(), piece[-1:]
        together = (
            not piece
            or space
            or part in CLOSING
            or last in OPENING
            or not (last.isspace() or _wide(part) or _wide(last))
        )
        if not together:
            yield piece
            piece = ""
        piece += part if not space else " "
    yield piece


def _wide(letter: str) -> bool:
    return east_asian_width(letter) in ("W", "F")
