"""Text sampled from a model that may lie in several parts.

For a look at what a run has learned: each token is a forward over the whole context so far (no cache), at most `seq_len` tokens
of it. Sampling runs from probabilities in fp64 and one seeded numpy stream, so a seed gives the same text on the same machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from plnode.data import Tokenizer
from plnode.model import StagePart


@torch.no_grad()
def sample(
    parts: Sequence[StagePart], tokenizer: Tokenizer, prompt: str, tokens: int, *, temperature: float = 0.8, seed: int = 0
) -> str:
    """`prompt` continued by so many tokens.  `parts` are the stages in order (all of them, or the whole model as one).

    `temperature` 0 takes the likeliest token each time.  Raises ValueError for an empty prompt or a negative temperature.
    """
    ids = tokenizer.encode(prompt)
    if not ids or temperature < 0.0:
        raise ValueError("sampling needs a prompt of at least one token and a temperature of at least 0")
    uniform = np.random.Generator(np.random.Philox(key=seed)).random(tokens)
    for draw in uniform:
        context = torch.tensor([ids[-parts[0].config.seq_len :]])
        x = None
        for part in parts:
            x = part.logits(x, context)
        assert x is not None
        logits = x[0, -1].double()
        if temperature == 0.0:
            ids.append(int(logits.argmax()))
            continue
        cumulative = torch.softmax(logits / temperature, dim=-1).cumsum(0)
        # The last sum may be below 1 by rounding, and the draw above it.
        ids.append(min(int(torch.searchsorted(cumulative, float(draw))), len(logits) - 1))
    return tokenizer.decode(ids)
