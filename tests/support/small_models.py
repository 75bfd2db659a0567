"""Small models of transformers with random weights, on its eager attention and on ours."""

import copy

import pytest
import torch

from sdpa.interop import transformers as bridge

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
LENGTH = 12
# The largest relative difference that two orders of summation may leave in float32 over two layers.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
# Older versions of transformers do not say which weights they collect.
COLLECTED = pytest.mark.skipif(bridge._active_collector is None, reason="an older transformers")
PADDING = {
    "none": lambda n: torch.ones(2, n, dtype=torch.long),
    "left": lambda n: torch.stack([torch.ones(n).long(), (torch.arange(n) >= 5).long()]),
    "right": lambda n: torch.stack([torch.ones(n).long(), (torch.arange(n) < n - 3).long()]),
}


def pair(make):
    """A model on its own attention, and a copy on ours.

    Weights are large enough for scores that differ, and gates are open.
    """
    torch.manual_seed(0)
    eager = make()
    for parameter in eager.parameters():
        if parameter.ndim > 1 or not parameter.any():
            parameter.data.normal_(std=0.25)
    ours = copy.deepcopy(eager)
    eager.set_attn_implementation("eager")
    ours.set_attn_implementation("c_attention")
    return eager.eval(), ours.eval()


def inputs(padding="none", is_seq2seq=False, end=64):
    """Tokens below `end`, two texts, of which one is padded."""
    torch.manual_seed(1)
    found = {
        "input_ids": torch.randint(2, end, (2, LENGTH)),
        "attention_mask": PADDING[padding](LENGTH),
    }
    if is_seq2seq:
        found["decoder_input_ids"] = torch.randint(2, end, (2, 7))
    return found
