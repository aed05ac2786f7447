"""A LoRA adapter and its base model to one model that loads by itself."""

from __future__ import annotations

import warnings
from pathlib import Path

from trace_gym.errors import BadInputError, require
from trace_gym.training.warm_start import quiet

ADAPTER = "adapter_config.json"
_HOMES = ("best", "model")  # of a method in a run, in order of preference


def find_adapter(source: str | Path) -> Path:
    """Return the folder of the adapter that a folder is or holds.

    Args:
        source: The adapter, the folder of a method, or of a run with a single method. Of a method the best model is
            taken, else the last.

    Raises:
        BadInputError: If there is none, or several; says what is there.
    """
    folder = Path(source)
    if (folder / ADAPTER).is_file():
        return folder
    methods = [folder, *sorted(path for path in folder.glob("*") if path.is_dir())]
    found = [next((m / home for home in _HOMES if (m / home / ADAPTER).is_file()), None) for m in methods]
    adapters = [path for path in found if path is not None]
    if not adapters:
        if (folder / "config.json").is_file() and list(folder.glob("*.safetensors")):
            raise BadInputError(f"{folder} is a whole model; there is nothing to merge. Load it as it is.")
        raise BadInputError(
            f"There is no adapter in {folder}: no {ADAPTER}, neither there nor in METHOD/best or METHOD/model. Give "
            "the folder of a run that trained with --lora-rank, or of an adapter."
        )
    if len(adapters) > 1:
        raise BadInputError(f"{folder} holds several adapters; give one of {', '.join(map(str, adapters))}.")
    return adapters[0]


def merge_adapter(source: str | Path, out: str | Path) -> Path:
    """Merge an adapter into its base model and save the result with its tokenizer, in the precision of the base.

    Args:
        source: See `find_adapter`.
        out: Folder of the merged model; must be new or empty.

    Returns:
        The adapter's folder.

    Raises:
        BadInputError: If there is no adapter, its base model cannot be loaded, or the folder is in use.
        MissingExtraError: If peft is not installed.
    """
    adapter, target = find_adapter(source), Path(out)
    if target.exists() and any(target.iterdir()):
        raise BadInputError(f"{target} is not empty; choose another folder.")
    peft, transformers = require("peft", "train"), require("transformers", "train")
    quiet()
    with warnings.catch_warnings():
        # peft asks transformers for an attribute by its old name.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        try:
            model = peft.AutoPeftModelForCausalLM.from_pretrained(adapter, dtype="auto")
        except (OSError, ValueError) as error:
            base = peft.PeftConfig.from_pretrained(adapter).base_model_name_or_path
            raise BadInputError(f"The base model {base!r} of {adapter} cannot be loaded: {error}") from error
        merged = model.merge_and_unload(safe_merge=True)
    merged.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(adapter).save_pretrained(target)
    return adapter
