"""The service of examples/embeddings.py with sdpa and with ONNX Runtime, the same weights in both.

python -m benchmarks.embeddings [--clients 8] [--requests 40] [--save build/bench/embeddings.json]
python -m benchmarks.embeddings --profile 8

Clients ask for one text each, again and again; the service, its tokeniser and its batches are the
same. Shown are half of the answers' and the slowest hundredth's times, texts a second, resident
memory, the time from the start of the process to the first answer, and the size of the packages
that either engine needs on disk. The graph for ONNX Runtime is of its fused operators. With
--profile, instead: where the time of a batch of so many texts goes, on one thread.
"""

import argparse
import cProfile
import http.client
import importlib.util
import json
import pstats
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import sdpa
from benchmarks.machine import ROOT
from sdpa_lab import minilm
from sdpa_lab.corpus import passages

PACKAGES = {
    "sdpa": ("sdpa", "numpy", "safetensors"),
    "ONNX Runtime": ("onnxruntime", "numpy", "flatbuffers", "packaging", "protobuf"),
}
"""What runs, and what it needs; weights, the server and Python not counted."""

Run = dict[str, Any]


def graph(weights: dict[str, Any]) -> Any:
    """The encoder as an ONNX model: ids, mask (batch, length) to embeddings (batch, 384)."""
    from onnx import TensorProto, helper, numpy_helper

    nodes: list[Any] = []
    constants = {name: np.ascontiguousarray(array) for name, array in weights.items()}

    def node(kind: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        out = f"{kind}_{len(nodes)}"
        nodes.append(helper.make_node(kind, inputs, [out], domain=domain, **attributes))
        return out

    def linear(x: str, name: str) -> str:
        constants[f"{name}.t"] = np.ascontiguousarray(weights[f"{name}.weight"].T)
        return node("Add", node("MatMul", x, f"{name}.t"), f"{name}.bias")

    def normalised(x: str, name: str) -> str:
        parts = (f"{name}.LayerNorm.weight", f"{name}.LayerNorm.bias")
        return node("LayerNormalization", x, *parts, epsilon=minilm.EPSILON)

    constants |= {"zero": np.array([0]), "one": np.array([1]), "last": np.array([2])}
    x = node("Gather", "embeddings.word_embeddings.weight", "ids")
    length = node("Slice", node("Shape", "ids"), "one", "last")
    places = node("Slice", "embeddings.position_embeddings.weight", "zero", length, "zero")
    constants["kind"] = constants["embeddings.token_type_embeddings.weight"][0]
    x = normalised(node("Add", node("Add", x, places), "kind"), "embeddings")
    for number in range(minilm.LAYERS):
        name = f"encoder.layer.{number}"
        roles = (linear(x, f"{name}.attention.self.{role}") for role in ("query", "key", "value"))
        out = node(
            "MultiHeadAttention",
            *(*roles, "", "mask"),
            domain="com.microsoft",
            num_heads=minilm.HEADS,
        )
        out = linear(out, f"{name}.attention.output.dense")
        x = normalised(node("Add", x, out), f"{name}.attention.output")
        inner = node("Gelu", linear(x, f"{name}.intermediate.dense"))
        x = normalised(node("Add", x, linear(inner, f"{name}.output.dense")), f"{name}.output")
    kept = node("Unsqueeze", node("Cast", "mask", to=TensorProto.FLOAT), "last")
    total = node("ReduceSum", node("Mul", x, kept), "one", keepdims=0)
    nodes.append(helper.make_node("LpNormalization", [total], ["out"], axis=-1, p=2))
    used = {name for item in nodes for name in item.input}
    shape = ["batch", "length"]
    return helper.make_model(
        helper.make_graph(
            nodes,
            minilm.MODEL,
            [
                helper.make_tensor_value_info("ids", TensorProto.INT64, shape),
                helper.make_tensor_value_info("mask", TensorProto.INT32, shape),
            ],
            [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["batch", minilm.D_MODEL])],
            [numpy_helper.from_array(a, name) for name, a in constants.items() if name in used],
        ),
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)],
        ir_version=9,
    )


class OnnxMiniLM(minilm.MiniLM):
    """The tokeniser of the laboratory, the encoder in ONNX Runtime."""

    def __init__(self, file: Path) -> None:
        import onnxruntime

        vocabulary = (minilm.installed() / "vocab.txt").read_text(encoding="utf-8")
        super().__init__({}, vocabulary.removesuffix("\n").split("\n"))
        self.session = onnxruntime.InferenceSession(file)

    def embed(self, texts: Any, *, scale: float | None = None) -> Any:
        result = np.empty((len(texts), minilm.D_MODEL), np.float32)
        for chosen, tokens in self.batches(texts):
            ids = np.zeros((len(tokens), max(map(len, tokens))), np.int64)
            mask = np.zeros(ids.shape, np.int32)
            for i, row in enumerate(tokens):
                ids[i, : len(row)], mask[i, : len(row)] = row, 1
            result[chosen] = self.session.run(None, {"ids": ids, "mask": mask})[0]
        return result


def serve(engine: str, file: Path) -> None:
    """The service, until it is told to stop."""
    spec = importlib.util.spec_from_file_location("embeddings", ROOT / "examples/embeddings.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = minilm.MiniLM.load() if engine == "sdpa" else OnnxMiniLM(file)
    module.serve(model.embed, 0, 64)


def measure(engine: str, file: Path, clients: int, requests: int) -> Run:
    """Figures of one service and its clients."""
    command = [sys.executable, "-m", "benchmarks.embeddings", "--serve", engine, str(file)]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout
    port = int(re.findall(r":(\d+)/", process.stdout.readline())[0])
    texts = passages(clients * requests, seed=0)
    answers([texts[0]], port)
    cold = time.perf_counter() - start
    answers(texts[:8], port)
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        parts = [texts[i::clients] for i in range(clients)]
        seconds = np.concatenate(list(pool.map(lambda part: answers(part, port), parts)))
    took = time.perf_counter() - start
    status = Path(f"/proc/{process.pid}/status").read_text()
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    p50, p99 = np.quantile(seconds, [0.5, 0.99])
    return {
        "engine": engine,
        "clients": clients,
        "p50": float(p50),
        "p99": float(p99),
        "rate": len(texts) / took,
        "peak": 1024 * int(re.findall(r"VmHWM:\s+(\d+)", status)[0]),
        "cold": cold,
        "installed": sum(map(installed, PACKAGES[engine])),
    }


def answers(texts: list[str], port: int) -> list[float]:
    """Seconds of each answer over one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    seconds = []
    for text in texts:
        start = time.perf_counter()
        connection.request("POST", "/embed", json.dumps({"texts": [text]}))
        answer = connection.getresponse()
        content = json.loads(answer.read())
        seconds.append(time.perf_counter() - start)
        assert answer.status == 200, content
    connection.close()
    return seconds


def installed(package: str) -> int:
    """Bytes of a package's files on disk; of an editable one, those of a wheel."""
    if package == "sdpa":
        folder = ROOT / "sdpa"
        files = [path for path in folder.rglob("*") if path.suffix in (".py", ".so", ".json")]
        return sum(path.stat().st_size for path in files)
    files = metadata.files(package) or []
    places = (Path(str(file.locate())) for file in files if file.suffix != ".pyc")
    return sum(place.stat().st_size for place in places if place.exists())


def table(runs: list[Run]) -> str:
    """The figures, one line per engine and number of clients."""
    lines = ["clients  engine          p50 ms   p99 ms  texts/s  peak MB  cold s  installed MB"]
    for run in runs:
        lines.append(
            f"{run['clients']:7d}  {run['engine']:13s} {1e3 * run['p50']:8.1f} "
            f"{1e3 * run['p99']:8.1f} {run['rate']:8.1f} {run['peak'] / 1e6:8.0f} "
            f"{run['cold']:7.2f} {run['installed'] / 1e6:13.0f}"
        )
    return "\n".join(lines)


PARTS = {
    "linear layers": "_linear",
    "GELU": "gelu",
    "layer norms": "_normalised",
    "attention": "attention",
    "tokeniser": "tokens",
}
"""Functions by what they do."""


def profile(texts: int) -> str:
    """The shares of the parts in the time of one batch, in the fastest of 20 runs."""
    from threadpoolctl import threadpool_limits

    model, batch = minilm.MiniLM.load(), passages(texts, seed=0)
    runs = []
    with threadpool_limits(1):
        sdpa.set_num_threads(1)
        for _ in range(20):
            profiler = cProfile.Profile()
            profiler.runcall(model.embed, batch)
            found: Any = pstats.Stats(profiler)
            runs.append((found.total_tt, found.stats))
    total, stats = min(runs, key=lambda run: run[0])
    seconds = dict.fromkeys(PARTS, 0.0)
    for part, name in PARTS.items():
        for (_, _, function), (*_, cumulative, _) in stats.items():
            if re.search(rf"(^|\W){name}(\W|$)", function):
                seconds[part] = max(seconds[part], cumulative)
    seconds["other"] = total - sum(seconds.values())
    lines = [f"{texts} texts, {1e3 * total:.1f} ms on one thread"]
    return "\n".join(lines + [f"{k:14s} {100 * s / total:3.0f} %" for k, s in seconds.items()])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.embeddings")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--requests", type=int, default=40, help="of each client")
    parser.add_argument("--save", type=Path, help="write the figures there")
    parser.add_argument("--profile", type=int, metavar="TEXTS", help="of one batch, nothing else")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve[0], Path(options.serve[1]))
        return
    if options.profile:
        print(profile(options.profile))
        return
    engines = ["sdpa"]
    file = ROOT / "build" / "minilm.onnx"
    if importlib.util.find_spec("onnxruntime") and importlib.util.find_spec("onnx"):
        engines.append("ONNX Runtime")
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(graph(minilm.MiniLM.load().weights).SerializeToString())
    else:
        print("ONNX Runtime is not installed and left out", file=sys.stderr)
    runs = [
        measure(engine, file, clients, options.requests)
        for clients in options.clients
        for engine in engines
    ]
    print(table(runs))
    if options.save:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
