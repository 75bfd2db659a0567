"""How a program shows itself: its arrays and its operations, one a line."""

from __future__ import annotations

from sdpa._programs._graph import Graph, Node, Source, reached
from sdpa._programs._operations import INPUTS

WORDS = {"r": "floats", "i": "integers", "b": "booleans"}
_LINES = 24


def program_text(is_mask: bool, graph: Graph, root: Node, sources: list[Source]) -> str:
    """The `__repr__` of a program."""
    head = [f"{'mask' if is_mask else 'score'} program of {graph.function}"]
    head += [f"  {source.name}: {WORDS[source.kind]} {source.shape}" for source in sources]
    steps = [
        node
        for node in reached([root])
        if not (node.op in INPUTS or node.is_constant or node.op == "index" or _is_offset(node))
    ]
    names: dict[Node, str] = {}
    width = len(str(len(steps)))
    lines = []
    for number, node in enumerate(steps, start=1):
        text = graph.text(node, names)
        names[node] = f"x{number}"
        own = "" if node is root else f"x{number} = "
        lines.append(f"  {number:{width}}  {own}{text}")
    if not steps:
        lines = [f"  {graph.text(root)}"]
    if len(lines) > _LINES:
        cut = len(lines) - _LINES + 1
        lines[_LINES // 2 : _LINES // 2 + cut] = [f"  {'':{width}}  ({cut} more)"]
    return "\n".join([*head, *lines])


def _is_offset(node: Node) -> bool:
    """Whether it adds the strides of an array's axes, which the text of a gather shows."""
    return node.op == "add_i" and any(arg.op == "index" for arg in node.args)
