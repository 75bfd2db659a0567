"""From expressions to codes: order of operations, registers, bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from sdpa._programs._graph import Graph, Node, reached
from sdpa._programs._operations import KEY, NUMBERS, OF_KEYS, TILE

_LARGEST = (1 << 16) - 1


class Effect(NamedTuple):
    """What a code does with a result: `output` number, or `scatter` into the array of a gather."""

    op: str
    number: int
    node: Node
    at: Node | None = None


class Constants:
    """The numbers of all codes of a program, each once."""

    def __init__(self) -> None:
        self.reals: dict[str, int] = {}
        self.integers: dict[int, int] = {}

    def position(self, node: Node) -> int:
        """Where the core finds the constant; a boolean is its own position."""
        if node.kind == "r":
            return self.reals.setdefault(node.payload.hex(), len(self.reals))
        if node.kind == "i":
            return self.integers.setdefault(node.payload, len(self.integers))
        return int(node.payload)

    def to_bytes(self) -> tuple[bytes, bytes]:
        reals = np.array([float.fromhex(value) for value in self.reals], np.float64)
        return reals.tobytes(), np.array(list(self.integers), np.int64).tobytes()


def code(graph: Graph, effects: list[Effect], constants: Constants) -> bytes:
    """The bytes of a code, in the layout that src/program.h describes."""
    needed = reached(node for effect in effects for node in _read(effect))
    early = [node for node in needed if node.section < TILE]
    early.sort(key=lambda node: node.section)
    registers = {node: register for register, node in enumerate(early)}
    sections = [
        [_instruction(node, node.args, registers, constants) for node in early if node.section == s]
        for s in range(TILE)
    ]
    operands = _Operands()
    steps = list(_ordered(effects, needed, operands))
    # The core leaves the score in the register of a first step.
    steps.sort(key=lambda step: not (isinstance(step, Node) and step.op == "score"))
    tile, n_registers = _allocated(steps, registers, constants, operands)
    sections.append(tile)
    counts = [len(section) for section in sections]
    if max(*counts, n_registers) > _LARGEST:
        raise graph.refused(f"at most {_LARGEST} operations", str(sum(counts)))
    words = [*counts, n_registers]
    for section in sections:
        for instruction in section:
            words.extend(instruction)
    return np.array(words, np.uint16).tobytes()


def _read(step: Node | Effect) -> tuple[Node, ...]:
    if isinstance(step, Node):
        return step.args
    return (step.node,) if step.at is None else (step.at, step.node)


class _Operands:
    """What a step reads; the section of pairs reads what belongs to a key spread over the lanes."""

    def __init__(self) -> None:
        self.spread: dict[Node, Node] = {}

    def __call__(self, step: Node | Effect) -> tuple[Node, ...]:
        read = _read(step)
        if isinstance(step, Node) and (step.section != TILE or step.op.startswith("spread")):
            return read
        kept = read[1] if isinstance(step, Node) and step.op in OF_KEYS else None
        spreads = [node.section == KEY and node is not kept for node in read]
        return tuple([self._spread(x) if y else x for x, y in zip(read, spreads, strict=True)])

    def _spread(self, node: Node) -> Node:
        if node not in self.spread:
            op = f"spread_{node.kind}"
            self.spread[node] = Node(op, (node,), None, node.kind, node.number, TILE)
        return self.spread[node]


def _ordered(
    effects: list[Effect], needed: list[Node], operands: _Operands
) -> Iterable[Node | Effect]:
    """The steps of the section of pairs; of two operands the one that needs more registers first.

    Sethi and Ullman, "The generation of optimal code for arithmetic expressions" (1970).
    """
    needs: dict[Node, int] = {}
    for node in needed:
        if node.section == TILE:
            each = [needs.setdefault(arg, 1) for arg in operands(node) if arg.section == TILE]
            each.sort(reverse=True)
            needs[node] = max((n + i for i, n in enumerate(each)), default=1)
    done: set[Node] = set()
    for effect in effects:
        stack = list(operands(effect))
        while stack:
            node = stack[-1]
            waiting = [arg for arg in operands(node) if arg.section == TILE and arg not in done]
            if node in done or node.section != TILE:
                stack.pop()
            elif waiting:
                stack.extend(sorted(waiting, key=lambda arg: needs.get(arg, 1)))
            else:
                done.add(stack.pop())
                yield node
        yield effect


def _allocated(
    steps: list[Node | Effect],
    registers: dict[Node, int],
    constants: Constants,
    operands: _Operands,
) -> tuple[list[tuple[int, ...]], int]:
    """The instructions of the section of pairs, and the number of registers of the whole code.

    A register is free again behind the last step that reads it, so no operation writes into one
    that it reads.
    """
    last = {arg: position for position, step in enumerate(steps) for arg in operands(step)}
    n_registers = len(registers)
    free: list[int] = []
    found = []
    for position, step in enumerate(steps):
        if isinstance(step, Node):
            if not free:
                free.append(n_registers)
                n_registers += 1
            registers[step] = free.pop()
        found.append(_instruction(step, operands(step), registers, constants))
        for arg in dict.fromkeys(operands(step)):
            if arg.section == TILE and last[arg] == position:
                free.append(registers[arg])
    return found, n_registers


def _instruction(
    step: Node | Effect,
    operands: tuple[Node, ...],
    registers: dict[Node, int],
    constants: Constants,
) -> tuple[int, ...]:
    """op, dst, a, b, c."""
    read = [registers[node] for node in operands]
    if isinstance(step, Effect):
        if step.at is None:
            return NUMBERS[step.op], step.number, *read, 0, 0
        return NUMBERS[step.op], 0, step.number, *read
    if step.is_constant:
        read = [constants.position(step)]
    elif step.op == "index":
        source, axis = step.payload
        read = [source.number, axis, *read]
    elif step.op in OF_KEYS:
        read = [*read, *([] if step.payload is None else [step.payload])]
    elif step.payload is not None:
        read = [step.payload.number, *read]
    return NUMBERS[step.op], registers[step], *read, *[0] * (3 - len(read))
