"""The README's picture and table of speed, from a page of figures that was committed.

python -m benchmarks.readme writes them; nothing in them is typed by hand.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance" / "zen4.md"
PICTURE = ROOT / "docs" / "performance" / "peers.svg"
README = ROOT / "README.md"
MARKS = ("<!-- speed: written by python -m benchmarks.readme -->", "<!-- end of speed -->")

Tables = dict[str, dict[str, dict[str, float]]]
"""{"forward, 1 thread, GF/s": {"8x1024x64": {"sdpa": 225.5, ...}, ...}, ...}"""

LIBRARIES = {
    "sdpa": ("sdpa",),
    "NumPy": ("numpy",),
    "PyTorch": ("torch",),
    "JAX": ("jax",),
    "ONNX Runtime": ("ort", "ort-mha"),
    "OpenVINO": ("openvino",),
}
"""Names of contenders; ONNX Runtime has two operators, of which the faster one counts."""


class Row(NamedTuple):
    """A row of the README's table, and where its figures stand on the page."""

    label: str
    table: str
    name: str

    @property
    def more_is_better(self) -> bool:
        return self.table.endswith("GF/s")


ROWS = (
    Row("forward, 8 heads, 1024 x 64, GF/s", "forward, 1 thread, GF/s", "8x1024x64"),
    Row("the same, causal", "forward, 1 thread, GF/s", "8x1024x64 causal"),
    Row("forward and backward, GF/s", "both, 1 thread, GF/s", "8x1024x64"),
    Row("the same, causal", "both, 1 thread, GF/s", "8x1024x64 causal"),
    Row("forward, one head of 10 x 64, us", "small, 1 thread, us", "(10, 64) forward"),
    Row("1 query, 8 heads, 4096 keys, us", "decode, 1 thread, us", "8:8 heads, 4096 keys"),
    Row("the same, 65536 keys", "decode, 1 thread, us", "8:8 heads, 65536 keys"),
    Row("the same, 8 heads share the keys", "decode, 1 thread, us", "8:1 heads, 65536 keys"),
    Row("softmax of (1000, 1000), us", "softmax, 1 thread, us", "(1000, 1000)"),
    Row("backward, 1797 heads of 8 x 64, us", "short, 1 thread, us", "1797x1x8x64 backward"),
)
PANELS = {"forward": ROWS[0], "forward, causal": ROWS[1], "forward and backward": ROWS[2]}


def tables(page: str) -> Tables:
    """The tables of a page that `benchmarks.report` wrote."""
    found: Tables = {}
    title, columns = "", list[str]()
    for line in page.splitlines():
        if re.fullmatch(r"[a-z]+, \d+ threads?, .+", line):
            title = line
            found[title] = {}
        elif not line:
            title = ""
        elif title and line.startswith(" " * 24):
            columns = line.split("  best peer")[0].split()
        elif title:
            name, cells = re.split(r"  +", line, maxsplit=1)
            # The ratio comes last.
            figures = zip(columns, map(_number, cells.split()), strict=False)
            found[title][name] = dict(figures)
    return found


def _number(cell: str) -> float:
    cell = cell.removeprefix("~")
    return 1e6 * float(cell[:-1]) if cell.endswith("M") else float(cell)


def figures(found: Tables, row: Row) -> dict[str, float]:
    """{library: figure} of those that were measured."""
    cells = found[row.table][row.name]
    best = max if row.more_is_better else min
    return {
        library: best(cells[name] for name in names if name in cells)
        for library, names in LIBRARIES.items()
        if any(name in cells for name in names)
    }


def table(page: str) -> str:
    """The README's table: the best of each row in bold."""
    found = tables(page)
    lines = ["| one core, float32 | " + " | ".join(LIBRARIES) + " |"]
    lines += ["|---" * (len(LIBRARIES) + 1) + "|"]
    for row in ROWS:
        shown = figures(found, row)
        best = (max if row.more_is_better else min)(shown.values())
        cells = [_cell(shown.get(library), best) for library in LIBRARIES]
        lines.append(f"| {row.label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(figure: float | None, best: float) -> str:
    if figure is None:
        return ""
    text = f"{figure:.1f}" if figure < 1e3 else f"{figure:.0f}"
    return f"**{text}**" if figure == best else text


STYLE = """
.page { fill: #ffffff } .text { fill: #1f2328 } .muted { fill: #59636e }
.other { fill: #b8c0c8 } .ours { fill: #0072b2 } .peak { stroke: #d55e00 } .note { fill: #b04a00 }
@media (prefers-color-scheme: dark) {
  .page { fill: #0d1117 } .text { fill: #f0f6fc } .muted { fill: #9198a1 }
  .other { fill: #4b535d } .ours { fill: #56b4e9 } .peak { stroke: #e69f00 } .note { fill: #e69f00 }
}
text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif }
.title { font-weight: 600; font-size: 14px } .ours-text { font-weight: 600 }
""".strip()

WIDTH, LEFT, BAR, STEP, TOP = 270, 110, 150, 24, 62


def picture(page: str) -> str:
    """Bars of three works beside every peer, and the machine's peak; light and dark."""
    found = tables(page)
    peak = float(re.findall(r"^FMA peak beside .*?([\d.]+)$", page, re.MULTILINE)[0])
    machine = re.findall(r"^```text\n([^,]*)", page, re.MULTILINE)[0]
    name, kernels = re.findall(r"^# Figures: (\w+), (.*)$", page, re.MULTILINE)[0]
    machine = f"{machine} ({name}), {kernels}"
    height = TOP + STEP * len(LIBRARIES) + 34
    width = WIDTH * len(PANELS) + 20
    words = f"Speed of attention on one core beside its peers, {machine}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}" role="img" aria-label="{escape(words)}">',
        f"<title>{escape(words)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}" rx="8"/>',
        _text(14, 24, "text title", "Speed on one core in GF/s: 8 heads of 1024 x 64, float32"),
        _text(width - 14, 24, "muted", machine, "end"),
    ]
    for i, (title, row) in enumerate(PANELS.items()):
        parts += _panel(10 + i * WIDTH, title, figures(found, row), peak)
    note = f"longer is faster; dashed: the most that the core can do, {peak:.0f} GF/s"
    parts += [_text(14, height - 12, "note", note), "</svg>"]
    return "\n".join(parts) + "\n"


def _panel(x: int, title: str, shown: dict[str, float], peak: float) -> Iterator[str]:
    yield _text(x + LEFT, TOP - 12, "text", title)
    for i, (library, figure) in enumerate(sorted(shown.items(), key=lambda item: -item[1])):
        ours, y = library == "sdpa", TOP + STEP * i
        length = BAR * figure / peak
        yield _text(x + LEFT - 8, y + 14, "text ours-text" if ours else "text", library, "end")
        yield (
            f'<rect class="{"ours" if ours else "other"}" x="{x + LEFT}" y="{y + 2}"'
            f' width="{length:.1f}" height="{STEP - 8}" rx="2"/>'
        )
        inside = length > BAR / 2
        place = x + LEFT + length + (-6 if inside else 6)
        kind = "page" if inside and ours else "text"
        yield _text(place, y + 14, kind, f"{figure:.0f}", "end" if inside else "start")
    edge, bottom = x + LEFT + BAR, TOP + STEP * len(shown)
    yield (
        f'<line class="peak" x1="{edge}" y1="{TOP - 4}" x2="{edge}" y2="{bottom}"'
        ' stroke-width="1.5" stroke-dasharray="4 3"/>'
    )


def _text(x: float, y: float, kind: str, words: str, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(words)}</text>'


def with_table(readme: str, page: str) -> str:
    """The README with the page's table between its marks."""
    before, mark, rest = readme.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not (mark and end):
        raise ValueError(f"README.md: expected the marks {MARKS[0]} and {MARKS[1]}, found none")
    return f"{before}{mark}\n{table(page)}\n{end}{after}"


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    PICTURE.write_text(picture(page), encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    README.write_text(with_table(readme, page), encoding="utf-8")


if __name__ == "__main__":
    main()
