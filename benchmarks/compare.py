"""Attention of sdpa, plain NumPy and PyTorch on the same data, interleaved, the best of rounds.

    python benchmarks/compare.py [--threads N] [--rounds N] [--shape HEADS N D] [--peak PROGRAM]

FLOPs: forward 4 heads length^2 d, backward 2.5 times that, half for causal. PyTorch is left out
where it is not installed. PROGRAM is peak.c of this folder, compiled: the FMA peak of one core.
"""

import argparse
import subprocess
import time

import numpy as np

import sdpa


def numpy_forward(q, k, v, g, is_causal):
    s = q @ k.swapaxes(-1, -2) * np.float32(q.shape[-1] ** -0.5)
    if is_causal:
        s = np.where(np.tri(*s.shape[-2:], dtype=bool), s, np.float32(-np.inf))
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True) @ v


def numpy_backward(q, k, v, g, is_causal):
    scale = np.float32(q.shape[-1] ** -0.5)
    s = q @ k.swapaxes(-1, -2) * scale
    if is_causal:
        s = np.where(np.tri(*s.shape[-2:], dtype=bool), s, np.float32(-np.inf))
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    p = e / e.sum(axis=-1, keepdims=True)
    dp = g @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * scale
    return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ g


def contenders(q, k, v, g, is_causal, threads):
    """{name: (forward, backward)}, each a call without arguments and without the other's work."""
    out, lse = sdpa.attention_forward(q, k, v, is_causal=is_causal, workers=threads)
    found = {
        "sdpa": (
            lambda: sdpa.attention(q, k, v, is_causal=is_causal, workers=threads),
            lambda: sdpa.attention_backward(
                g, q, k, v, out, lse, is_causal=is_causal, workers=threads
            ),
        ),
        "numpy": (
            lambda: numpy_forward(q, k, v, g, is_causal),
            lambda: numpy_backward(q, k, v, g, is_causal),
        ),
    }
    try:
        import torch
    except ImportError:
        return found
    torch.set_num_threads(threads)
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    inputs = [x.clone().requires_grad_() for x in tensors]
    attention = torch.nn.functional.scaled_dot_product_attention
    result = attention(*inputs, is_causal=is_causal)
    upstream = torch.from_numpy(g)
    found["torch"] = (
        lambda: attention(*tensors, is_causal=is_causal),
        lambda: torch.autograd.grad(result, inputs, upstream, retain_graph=True),
    )
    return found


def best_times(calls, rounds):
    """Seconds of the fastest round of each call, all called in turn in every round."""
    best = dict.fromkeys(calls, np.inf)
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shape", type=int, nargs=3, action="append", metavar=("HEADS", "N", "D"))
    parser.add_argument("--peak", help="program that prints the FMA peak")
    options = parser.parse_args()
    from threadpoolctl import threadpool_limits

    config = sdpa.show_config(mode="dicts")
    print(f"kernel {config['isa']}, {options.threads} thread(s), float32, (1, heads, length, d)")
    if options.peak:
        peaks = subprocess.run([options.peak], capture_output=True, text=True, check=True).stdout
        print("FMA peak of one core, GF/s:", ", ".join(peaks.split("\n")[:-1]))
    print("heads length   d causal pass       sdpa GF/s    numpy    torch   sdpa/numpy sdpa/torch")
    shapes = options.shape or [(8, 1024, 64), (8, 512, 32), (8, 1024, 128), (8, 128, 64)]
    for heads, length, d in shapes:
        for is_causal in (False, True):
            rng = np.random.default_rng(0)
            x = rng.standard_normal((4, 1, heads, length, d), np.float32)
            with threadpool_limits(options.threads):
                calls = contenders(*x, is_causal, options.threads)
                for i, name in enumerate(("forward", "backward")):
                    these = {who: pair[i] for who, pair in calls.items()}
                    flops = 4e-9 * heads * length**2 * d * (2.5 if i else 1) / (1 + is_causal)
                    rate = {who: flops / t for who, t in best_times(these, options.rounds).items()}
                    ours, plain, torch = (rate.get(k, np.nan) for k in ("sdpa", "numpy", "torch"))
                    print(
                        f"{heads:5} {length:6} {d:3} {is_causal!s:6} {name:8} {ours:12.1f}"
                        f" {plain:8.1f} {torch:8.1f} {ours / plain:11.2f} {ours / torch:10.2f}"
                    )


if __name__ == "__main__":
    main()
