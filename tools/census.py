"""How the models of transformers scale their scores, read from its sources.

python tools/census.py            # prints what sdpa_lab/claims/cited.json holds under "census"

A folder of transformers/models counts if its modeling files define a class of attention and a
softmax, or a call that computes one. It has the scale if some line of them divides by, or
multiplies with the inverse of, the square root of a width; lines on initial weights, embeddings and
logits do not count. Neither the kind of width nor whether every class of the folder uses it is
checked. Queries and keys are normalised (QK-norm) if a module that is named so is applied to each.
"""

import json
import re
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

ATTENTION = re.compile(r"class \w*Attention\w*\(")
SOFTMAX = re.compile(r"softmax\(|attention_interface|scaled_dot_product_attention")
WIDTH = r"(?:head|dim|size|width|channels|d_k|depth)"
SCALE = re.compile(
    rf"{WIDTH}\w*\)* ?\*\* ?\(?-0\.5"  # self.head_dim**-0.5
    rf"|sqrt\((?:[^()]|\([^()]*\))*{WIDTH}"  # math.sqrt(self.head_dim)
    rf"|{WIDTH}\w*\)? ?\*\* ?\(?0\.5"  # query / head_dim**0.5
)
OTHER = re.compile(
    r"init\.|init_|std ?=|\bstd\b|embed_scale|normal_|\bgain\b|model_dim|sequence_output"
)

QUERY_NORM, KEY_NORM = (
    re.compile(rf"self\.(?:{name}_?(?:layer_?)?norm|norm_?{name})\w*\(")
    for name in ("(?:q|query)", "(?:k|key)")
)


def scaled(source: str) -> bool:
    """Whether some line has the factor."""
    lines = (line for line in source.splitlines() if not OTHER.search(line))
    return any(SCALE.search(line) for line in lines)


def normalised(source: str) -> bool:
    """Whether a norm of queries and one of keys is applied, or one of both."""
    both = re.search(r"self\.qk_?(?:layer_?)?norm\w*\(", source)
    return bool(both or (QUERY_NORM.search(source) and KEY_NORM.search(source)))


def sources(models: Path) -> dict[str, str]:
    """The modeling files of each folder with attention, as one text."""
    found = {}
    for folder in sorted(path for path in models.iterdir() if path.is_dir()):
        texts = [path.read_text(encoding="utf-8") for path in folder.glob("modeling_*.py")]
        source = "\n".join(texts)
        if ATTENTION.search(source) and SOFTMAX.search(source):
            found[folder.name] = source
    return found


def census(models: Path) -> dict[str, object]:
    """Counts, and the names of the folders without the factor."""
    read = sources(models)
    found = {name: scaled(source) for name, source in read.items()}
    return {
        "transformers": version("transformers"),
        "with attention": len(found),
        "with 1/sqrt of a width": sum(found.values()),
        "with QK-norm": sum(map(normalised, read.values())),
        "without": [name for name, has in found.items() if not has],
    }


if __name__ == "__main__":
    folder = Path(str(files("transformers"))) / "models"
    print(json.dumps(census(folder), indent=1))
