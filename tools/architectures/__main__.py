"""Every architecture of transformers, its eager attention beside c_attention.

python tools/architectures             all of AutoModel, going on where it stopped
python tools/architectures llama t5    these anew
python tools/architectures --page      the page alone

Each one is made small, with random weights, runs on random inputs (plain, padded on the left,
padded on the right, with another last token) in a process of its own with a limit of time and of
memory, and goes as a row into build/architectures.json. When all are there, the page gets its
table, and another run of all starts anew.

Models with a backbone of timm need timm and torchvision, one needs torchaudio.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import resource
import signal
import sys
import time
import warnings
from typing import Any

import page

SECONDS, BYTES = 300, 6 << 30
PACKAGES = ("transformers", "torch", "timm", "torchvision", "torchaudio")


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def in_a_process(judge: Any, name: str) -> dict[str, Any]:
    """What `judge` says of the architecture, or why it could not."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
        signal.alarm(SECONDS)
        try:
            found = judge.judge(name)
        except BaseException as error:
            what = "wrong" if "allocate memory" not in str(error) else "not built"
            found = {"verdict": what, "why": judge.said(error), "classes": []}
        with os.fdopen(writer, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if text:
        return dict(json.loads(text))
    ended = os.waitstatus_to_exitcode(status)
    why = f"took more than {SECONDS} s" if ended == -signal.SIGALRM else f"ended with {ended}"
    return {"verdict": "not built", "why": why, "classes": []}


def save(record: dict[str, Any]) -> None:
    """One row a line, so that a change of one is a change of one line."""
    rows = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(record["rows"].items())
    )
    text = f'{{"versions": {json.dumps(record["versions"])},\n"rows": {{\n{rows}\n}}}}\n'
    page.RECORD.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures, as in model_type")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    options = parser.parse_args()
    if options.page:
        page.write()
        return
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    # One thread, because a child of a process with more cannot start its own.
    os.environ["OMP_NUM_THREADS"] = "1"
    import judge
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    judge.register()
    record: dict[str, Any] = {"versions": versions(), "rows": {}}
    if page.RECORD.exists():
        before = json.loads(page.RECORD.read_text(encoding="utf-8"))
        is_whole = set(before["rows"]) == set(MODEL_MAPPING_NAMES)
        if before["versions"] == record["versions"] and (options.names or not is_whole):
            record = before
    page.RECORD.parent.mkdir(exist_ok=True)
    names = options.names or [name for name in MODEL_MAPPING_NAMES if name not in record["rows"]]
    for i, name in enumerate(names):
        start = time.perf_counter()
        row = record["rows"][name] = in_a_process(judge, name)
        seconds = time.perf_counter() - start
        why = row.get("why", "")[:90]
        print(f"{i + 1}/{len(names)} {name}: {row['verdict']} {why} ({seconds:.0f} s)", flush=True)
        save(record)
    if set(MODEL_MAPPING_NAMES) <= set(record["rows"]):
        page.write()
    wrong = [name for name, row in record["rows"].items() if row["verdict"] == "wrong"]
    print(f"wrong: {', '.join(wrong) or 'none'}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
