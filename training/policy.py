"""The default policy: a small Llama and its tokenizer, built from nothing on the spot.

It exists so that the whole of trace_gym runs on a laptop without a model hub. The tokenizer learns whole phrases (it
does not split at spaces unless asked to) but keeps every digit a token of its own, so that numbers are copied digit by
digit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trace_gym.errors import require

# One token opens a message, one closes it. Tools are listed as a signature each.
CHAT_TEMPLATE = (
    "{%- if tools -%}{{ '<|tools|>' }}{%- for tool in tools -%}"
    "{{ tool.function.name + '(' + (tool.function.parameters.properties.keys() | join(', ')) + ')' }}"
    "{%- endfor -%}{{ '<|end|>' }}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
_WORDS = r" ?</?\w+>| ?\w+|\s|[^\w\s]"  # a tag is a word
SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|tools|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")


@dataclass(frozen=True)
class PolicyShape:
    """Size of the default policy.

    Attributes:
        hidden: Width.
        layers: Transformer blocks.
        heads: Attention heads.
        mlp: Width of the feed-forward part.
        vocabulary: Most tokens the tokenizer may learn, bytes and markup included.
        context: Longest conversation, in tokens.
    """

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    mlp: int = 384
    vocabulary: int = 768
    context: int = 512


def build_tokenizer(texts: Iterable[str], shape: PolicyShape, splits_words: bool = False) -> Any:
    """Train a byte-level BPE tokenizer with a chat template that carries tools.

    Args:
        texts: Contents of messages; split at message borders, so that no token spans two messages.
        shape: Bounds the vocabulary and the context.
        splits_words: No token spans two words then, so that a name is the same tokens wherever it stands.
    """
    tokenizers = require("tokenizers", "train")
    transformers = require("transformers", "train")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    words = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated")] if splits_words else []
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            *words,
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=shape.vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        model_max_length=shape.context,
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: Any, shape: PolicyShape, seed: int) -> Any:
    """Build a Llama with random weights; equal seeds give equal weights."""
    torch = require("torch", "train")
    transformers = require("transformers", "train")
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        intermediate_size=shape.mlp,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    # transformers draws initial weights from the global generator; leave it as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config)
