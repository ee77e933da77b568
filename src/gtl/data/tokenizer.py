"""Tokenizers: any fast one, from a Hugging Face name, a folder, a tokenizer.json or a BERT vocab.txt.

transformers and tokenizers are imported where they are used, for they are slow to import.
"""

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["add_mask", "hub_reachable", "load_tokenizer", "num_ids", "separator_of"]

SPECIAL = {
    "mask_token": ("[MASK]", "<mask>", "<|mask|>", "<|mdm_mask|>"),
    "sep_token": ("[SEP]",),
    "eos_token": ("</s>", "<|endoftext|>", "<eos>", "<|end_of_text|>"),
    "pad_token": ("[PAD]", "<pad>"),
    "unk_token": ("[UNK]", "<unk>"),
    "cls_token": ("[CLS]",),
    "bos_token": ("<s>", "<bos>", "<|begin_of_text|>"),
}
"""What special tokens are called where nothing beside a tokenizer says so."""


def load_tokenizer(name: str) -> "PreTrainedTokenizerFast":
    """A fast tokenizer by Hugging Face name, from a folder, a `tokenizer.json` or a BERT `vocab.txt`."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "tokenizer.json").is_file() and (path / "vocab.txt").is_file():
            return _from_vocabulary(path / "vocab.txt")
        return _from_pretrained(str(path), name)
    if path.is_file():
        if path.suffix == ".txt":
            return _from_vocabulary(path)
        if path.suffix == ".json":
            beside = path.name == "tokenizer.json" and (path.parent / "tokenizer_config.json").is_file()
            return _from_pretrained(str(path.parent), name) if beside else _from_json(path)
        raise ValueError(f"tokenizer {name}: expected a folder, a tokenizer.json or a BERT vocab.txt")
    if path.suffix in (".json", ".txt") or path.is_absolute() or name.startswith(".") or name.count("/") > 1:
        raise FileNotFoundError(f"tokenizer {name}: no such file or folder")
    return _from_hub(name)


def _from_hub(name: str) -> "PreTrainedTokenizerFast":
    """A tokenizer by its Hugging Face name: from the cache, else from the hub if it can be reached."""
    try:
        return _from_pretrained(name, name, local_files_only=True)
    except ValueError:
        if not hub_reachable():
            raise FileNotFoundError(
                f"tokenizer {name}: no such file or folder, not in the Hugging Face cache, and the hub cannot be "
                "reached; give the path of a folder, a tokenizer.json or a vocab.txt"
            ) from None
    return _from_pretrained(name, name)


def _from_pretrained(where: str, name: str, **options: Any) -> "PreTrainedTokenizerFast":
    """What transformers makes of a folder or a name; anything but a fast tokenizer is refused."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind = PreTrainedTokenizerFast if (Path(where) / "tokenizer.json").is_file() else AutoTokenizer
    try:
        tokenizer: Any = kind.from_pretrained(where, **options)
    except Exception as error:  # transformers and tokenizers raise plain Exceptions among others
        raise ValueError(f"tokenizer {name}: cannot be loaded ({first_line(error)})") from None
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"tokenizer {name}: is not a fast tokenizer; give one that has a tokenizer.json")
    return tokenizer


def _from_json(path: Path) -> "PreTrainedTokenizerFast":
    """A tokenizer from its tokenizer.json alone; special tokens are known by their usual names."""
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exceptions
        raise ValueError(f"tokenizer {path}: not a tokenizer.json ({first_line(error)})") from None
    return _wrapped(backend)


def _from_vocabulary(path: Path) -> "PreTrainedTokenizerFast":
    """BERT's tokenizer over a vocab.txt, with one token a line; lower case if no token of it has upper case."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    try:
        words = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"tokenizer {path}: not a vocabulary, for it is not UTF-8 text") from None
    ids = {word.rstrip("\r"): number for number, word in enumerate(words)}
    if "[UNK]" not in ids:
        raise ValueError(f"tokenizer {path}: not a BERT vocabulary (one token a line), for it has no [UNK]")
    special = [name for names in SPECIAL.values() for name in names if name in ids]
    cased = any(word != word.lower() for word in ids if not (word.startswith("[") and word.endswith("]")))
    backend = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(special)
    if "[CLS]" in ids and "[SEP]" in ids:
        backend.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    return _wrapped(backend)


def _wrapped(backend: Any) -> "PreTrainedTokenizerFast":
    """A `tokenizers.Tokenizer` as transformers has them, its special tokens by their usual names."""
    from transformers import PreTrainedTokenizerFast

    found = {
        role: next(name for name in names if backend.token_to_id(name) is not None)
        for role, names in SPECIAL.items()
        if any(backend.token_to_id(name) is not None for name in names)
    }
    return PreTrainedTokenizerFast(tokenizer_object=backend, **found)


def add_mask(tokenizer: "PreTrainedTokenizerFast", token: str | None, name: str) -> int:
    """The id of the mask; `token` is added as one, and without it a tokenizer that has none is refused."""
    if token == "":
        raise ValueError("mask_token must not be empty")
    if token is not None and tokenizer.mask_token != token:
        tokenizer.add_special_tokens({"mask_token": token})
    if tokenizer.mask_token_id is None:
        raise ValueError(f"tokenizer {name} has no mask token; add one with --mask_token '<mask>'")
    return int(tokenizer.mask_token_id)


def separator_of(tokenizer: "PreTrainedTokenizerFast", token: str | None, name: str) -> int:
    """The id of the token that ends a document: the one named, or the tokenizer's sep or eos."""
    if token is None:
        for found in (tokenizer.sep_token_id, tokenizer.eos_token_id):
            if found is not None:
                return int(found)
        raise ValueError(f"tokenizer {name} has no separator (sep or eos) token; name a token with --separator")
    found = tokenizer.get_vocab().get(token)
    if found is None:
        raise ValueError(f"separator {token!r} is not a token of {name}; name one that is")
    return int(found)


def num_ids(tokenizer: "PreTrainedTokenizerFast") -> int:
    """One more than the largest id, the added tokens' among them; there may be gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def hub_reachable(seconds: float = 3.0) -> bool:
    """Whether it is worth asking the Hugging Face hub, whose own library tries for a minute before it gives up."""
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false", "no", "off"):
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    url = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.create_connection((url.hostname or "", url.port or 443), timeout=seconds).close()
    except OSError:
        return False
    return True


def first_line(error: Exception) -> str:
    """The first line of what an exception says, or its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
