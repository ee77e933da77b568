"""Tiny pretrained networks with random weights, and a tokenizer of a few words, as folders on disk."""

from collections.abc import Sequence
from pathlib import Path

import torch

WORDS = [f"w{i}" for i in range(40)]
"""Ids 5 .. 44 of the tokenizer."""
SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


def save_tokenizer(folder: Path, words: Sequence[str] = WORDS) -> None:
    """One token a word, apart by blanks; others are unknown."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: number for number, word in enumerate([*SPECIAL.values(), *words])}
    backend = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL).save_pretrained(folder)


def save_encoder(folder: Path, words: Sequence[str] = WORDS) -> None:
    """A BERT of width 16, which tells texts of these words apart."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    known = len(SPECIAL) + len(words)
    config = BertConfig(vocab_size=known, max_position_embeddings=32, initializer_range=1.0, **sizes)
    BertModel(config).save_pretrained(folder)
    save_tokenizer(folder, words)


def save_language_model(folder: Path) -> None:
    """A GPT-2 of width 16."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=45, n_positions=24, n_embd=16, n_layer=2, n_head=2, initializer_range=0.5)
    GPT2LMHeadModel(config).save_pretrained(folder)
    save_tokenizer(folder)
