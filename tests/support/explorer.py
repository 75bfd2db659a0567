"""What the explorer's page holds, for its tests."""

import numpy as np

D_V = 64


def current(page):
    """The page's current results, arrays with their shapes."""
    found = page.evaluate(
        """() => {
          const plain = (x) => ArrayBuffer.isView(x) ? Array.from(x)
            : x && typeof x === "object" && !Array.isArray(x)
              ? Object.fromEntries(Object.entries(x).map(([k, v]) => [k, plain(v)])) : x;
          return plain(Explorer.current());
        }"""
    )
    n, d_k = found["state"]["n"], found["state"]["d_k"]
    for group, widths in (
        ("operands", {"q": d_k, "k": d_k, "v": D_V, "g": D_V}),
        ("result", {"s": n, "p": n, "out": D_V, "ds": n, "dq": d_k, "dk": d_k, "dv": D_V}),
    ):
        arrays = found[group]
        found[group] = {name: np.reshape(arrays[name], (n, w)) for name, w in widths.items()}
    return found


def go(page, address):
    page.evaluate("(address) => { location.hash = address; }", address or "#input=random")
    page.wait_for_function(
        "(seed) => String(Explorer.current().state.seed) === seed",
        arg=dict(pair.split("=") for pair in address[1:].split("&")).get("seed", "0")
        if address
        else "0",
    )
