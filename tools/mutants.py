"""What `make mutation` changes: one token, one number or one statement of a file in C or Python.

Tokens are told apart by how clang-format and ruff lay the code out: an operator of two operands has
spaces on both sides, a sign or a pointer has not; a statement has a whole line.
"""

import ast
import io
import os
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SWAPS = {
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
    **{"+": "-", "-": "+", "*": "/", "/": "*", "%": "/", "//": "*", "<<": ">>", ">>": "<<"},
    **{"&&": "||", "||": "&&", "&": "|", "|": "&", "and": "or", "or": "and", "!": "", "not": ""},
    **{"+=": "-=", "-=": "+=", "*=": "/=", "/=": "*=", "|=": "&=", "&=": "|="},
    **{"true": "false", "false": "true", "True": "False", "False": "True", "is": "is not"},
}
# Signs, pointers and `*args` are written without a space behind them.
SPACED = {"+", "-", "*", "&", "|"}
C_TOKEN = re.compile(
    r"(?P<skip>/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|^[ \t]*\#"
    r"(?:\\\n|.)*?$)"
    r"|(?P<word>[A-Za-z_]\w*)|(?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)"
    r"|(?P<op>->|\+\+|--|<<=|>>=|[<>=!+\-*/|&%^]=|<<|>>|&&|\|\||[-+*/%<>=!&|^?:;,.~(){}\[\]])",
    re.MULTILINE | re.DOTALL,
)
C_STATEMENT = re.compile(
    r"^[ ]+(?:(?:else )?if \(.*\) |for \(.*\) )?"
    r"(?:[\w\->.\[\]()* +]*?[\w\])] (?:[-+*/|&]|<<|>>)?= [^;]*|\w+\([^;]*\)"
    r"|\w+(?:\+\+|--)|continue|break|return);$"
)
C_DECLARATION = re.compile(r"^\s*(?:(?:const|static|struct|unsigned)\b|\w+ [\w*])[^=(]*=")


class Mutant(NamedTuple):
    """One change of one line of a file."""

    file: str
    start: int
    end: int
    new: str
    line: int
    was: str
    now: str
    index: int
    """Which of the equal changes of equal lines of the file."""

    @property
    def change(self) -> str:
        """What an answer of mutants.toml is searched in."""
        return f"{self.file}: {self.was}  ->  {self.now}"

    @property
    def name(self) -> str:
        """What it is called in the record, which lines added elsewhere do not change."""
        return f"{self.file} | {self.was} | {self.now} | {self.index}"


def changed_number(text: str, odd: bool) -> str | None:
    """One more or less; None where that says nothing, as in a table of coefficients."""
    match = re.fullmatch(r"(\d+)([uUlL]*)", text)
    if not match:
        return None
    value = int(match[1])
    return f"{value - 1 if odd and value > 0 else value + 1}{match[2]}"


def replaced(text: str, source: str, start: int, end: int) -> str | None:
    """What stands in the place of this token in a mutant."""
    if text[0].isdigit():
        return changed_number(text, (start - source.rfind("\n", 0, start)) % 2 == 1)
    if text not in SWAPS or (text in SPACED and source[start - 1] + source[end] != "  "):
        return None
    if text == "is" and source.startswith(" not ", end):
        return None
    return SWAPS[text]


def c_changes(source: str) -> Iterator[tuple[int, int, str]]:
    """(start, end, what stands there instead) of each mutant of a C file."""
    comments = [match.span() for match in C_TOKEN.finditer(source) if match["skip"]]
    for match in C_TOKEN.finditer(source):
        new = None if match["skip"] else replaced(match[0], source, *match.span())
        line = source[source.rfind("\n", 0, match.start()) + 1 : match.start()]
        if new is not None and "assert(" not in line:
            yield *match.span(), new
    start = 0
    for line in source.splitlines(keepends=True):
        text = re.sub(r"\s*/\*.*\*/\s*$", "", line.rstrip())
        inside = any(a <= start + len(line) - 2 < b and a <= start for a, b in comments)
        declares = C_DECLARATION.match(text) or "assert(" in text
        if C_STATEMENT.match(text) and not declares and not inside:
            yield start + len(text) - len(text.lstrip()), start + len(text), ";"
        start += len(line)


def python_changes(source: str) -> Iterator[tuple[int, int, str]]:
    """The same of a Python file; types and what only a type checker reads are left alone."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    encoded = [line.encode() for line in source.splitlines(keepends=True)]

    def at(line: int, column: int) -> int:
        return starts[line - 1] + len(encoded[line - 1][:column].decode())

    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    notes = [n.annotation for n in nodes if isinstance(n, ast.arg | ast.AnnAssign) and n.annotation]
    notes += [n.returns for n in nodes if isinstance(n, ast.FunctionDef) and n.returns]
    notes += [n for n in nodes if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    types = [(at(n.lineno, n.col_offset), at(n.end_lineno, n.end_col_offset)) for n in notes]

    def counts(start: int) -> bool:
        return not any(a <= start < b for a, b in types)

    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (tokenize.OP, tokenize.NAME, tokenize.NUMBER):
            continue
        start = starts[token.start[0] - 1] + token.start[1]
        new = replaced(token.string, source, start, start + len(token.string))
        if new is not None and counts(start):
            yield start, start + len(token.string), new
    for node in nodes:
        # Without a name's only assignment, or a result, nothing would run.
        plain = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name | ast.Tuple)
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.Raise | ast.Expr) and not plain | text:
            start, end = at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)
            if node.lineno == node.end_lineno and node.col_offset and counts(start):
                yield start, end, "pass"


def is_listed(file: str, dependencies: str) -> bool:
    """Whether what a compiler listed has this file, of which a path may lead through ``..``."""
    return any(os.path.normpath(name).endswith(f"/{file}") for name in dependencies.split())


def mutants_of(file: str) -> Iterator[Mutant]:
    """All mutants of a file."""
    source = (ROOT / file).read_text(encoding="utf-8")
    seen: dict[tuple[str, str], int] = {}
    for start, end, new in (python_changes if file.endswith(".py") else c_changes)(source):
        a, b = source.rfind("\n", 0, start) + 1, source.find("\n", end)
        was, now = source[a:b].strip(), (source[a:start] + new + source[end:b]).strip()
        index = seen[was, now] = seen.get((was, now), -1) + 1
        yield Mutant(file, start, end, new, source.count("\n", 0, start) + 1, was, now, index)
