"""Generative perplexity: how likely an independent causal language model finds the samples.

    exp( - sum_{text, i > 1} log p(y_i | y_1 .. y_{i-1}) / number of terms )

y are the language model's own tokens of the decoded text; the first of a text is not scored. A sampler that repeats
itself scores well, so the number is only worth reading beside the token entropy of the same samples, and beside the
perplexity of real text of the same length.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from gtl.evaluate.pretrained import load, longest

__all__ = ["generative_perplexity", "open_language_model"]

CELLS = 2**26
"""Most logits at once."""


@torch.no_grad()
def generative_perplexity(
    texts: list[str],
    tokenizer: Any,
    network: Any,
    batch: int = 32,
    on_progress: Callable[[float], None] | None = None,
) -> float:
    """Of texts under a causal language model; what exceeds its context is cut off; texts of one token do not count."""
    device, most = next(network.parameters()).device, longest(tokenizer, network)
    ids = [row[:most] for row in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    ids = sorted((row for row in ids if len(row) > 1), key=len)  # texts of one length together: less padding
    if not ids:
        raise ValueError("generative perplexity needs texts of at least two tokens; there is none")
    total, count, at = 0.0, 0, 0
    vocabulary = network.get_output_embeddings().weight.shape[0]
    while at < len(ids):
        longest_row = len(ids[min(at + batch, len(ids)) - 1])
        rows = ids[at : at + max(1, min(batch, CELLS // (longest_row * vocabulary)))]
        lengths = torch.tensor([len(row) for row in rows])
        tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
        for number, row in enumerate(rows):
            tokens[number, : len(row)] = torch.tensor(row)
        attended = torch.arange(tokens.shape[1]) < lengths.unsqueeze(1)
        tokens, attended = tokens.to(device), attended.to(device)
        logits = network(input_ids=tokens, attention_mask=attended.long()).logits[:, :-1].float()
        surprise = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        total += float(surprise[attended[:, 1:]].double().sum())
        count += int(lengths.sum()) - len(rows)
        at += len(rows)
        if on_progress is not None:
            on_progress(at / len(ids))
    return float(np.exp(min(total / count, math.log(np.finfo(np.float64).max))))


def open_language_model(name: str, device: str | torch.device) -> tuple[Any, Any]:
    """Tokenizer and network of a causal language model."""
    tokenizer, network = load(name, "language model", "AutoModelForCausalLM")
    return tokenizer, network.to(device)
