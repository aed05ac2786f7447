"""The default policy: a small Llama and its tokenizer, built from nothing on the spot.

It exists so that the whole of trace_gym runs on a laptop without a model hub. The tokenizer learns whole phrases (it
does not split at spaces unless asked to) but keeps every digit a token of its own, so that numbers are copied digit by
digit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
_EMBEDDING = 0.08  # spread of embeddings beside which the other parts of a fresh model with induction heads are small
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


def signatures(tools: Iterable[Mapping[str, Any]]) -> str:
    """Return the list of tools as `CHAT_TEMPLATE` writes it."""
    functions = [tool["function"] for tool in tools]
    return "".join(f"{each['name']}({', '.join(each['parameters']['properties'])})" for each in functions)


def build_tokenizer(texts: Iterable[str], shape: PolicyShape, splits_words: bool = False) -> Any:
    """Train a byte-level BPE tokenizer with a chat template that carries tools.

    Args:
        texts: Contents of messages, and lists of tools; split at message borders, so that no token spans two messages.
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


def build_model(tokenizer: Any, shape: PolicyShape, seed: int, copying: bool = False) -> Any:
    """Build a Llama with random weights; equal seeds give equal weights.

    Args:
        tokenizer: Decides the number of tokens.
        shape: Size of the model.
        seed: Seed of the weights.
        copying: Whether it repeats from the start what it has seen, see `add_induction_heads`.
    """
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
        # Slow rotations, by which tokens are found at any distance; the usual base has few.
        **({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}} if copying else {}),
    )
    # transformers draws initial weights from the global generator; leave it as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config)
        if copying:
            add_induction_heads(model)
        return model


def add_induction_heads(model: Any) -> None:
    """Set weights of a fresh model such that it repeats what it has seen, which takes long to learn from nothing.

    Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021): a head of the first layer looks one token
    back and writes down which it was; heads of the second look for where the present token is written down, which is
    right behind its earlier occurrence, and predict the token that stands there. All of this goes on learning.

    The head that looks back goes by the rotations of position alone. What it turns is a constant, the first coordinate
    of every embedding; the queries are one position behind.

    Args:
        model: A Llama of at least two layers and four heads, as `build_model` makes it.
    """
    torch = require("torch", "train")
    hidden, head = model.config.hidden_size, model.config.head_dim
    turning = 4  # pairs of a head that turn quickly: they tell neighbours apart
    angles = model.model.rotary_emb.inv_freq[:turning].float()
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        embeddings *= _EMBEDDING / model.config.initializer_range
        embeddings[:, 0] = 0.5 * _EMBEDDING * hidden**0.5
        # Orthonormal rows without the constant: what is read of a token, where it is written down, and the rest.
        basis = torch.linalg.qr(torch.cat([torch.eye(hidden)[:, :1], torch.randn(hidden, hidden - 1)], 1))[0].T[1:]
        read, written, rest = basis[:head], basis[head : 2 * head], basis[2 * head :]
        for projection in (first.q_proj, first.k_proj):
            projection.weight[:head] = 0
        first.k_proj.weight[:turning, 0] = 1
        first.q_proj.weight[:turning, 0] = torch.cos(angles)
        first.q_proj.weight[head // 2 : head // 2 + turning, 0] = -torch.sin(angles)
        first.v_proj.weight[:head] = read
        first.o_proj.weight[:, :head] = 0.2 * written.T
        slow = torch.ones(head, 1)
        slow[:turning] = slow[head // 2 : head // 2 + turning] = 0  # these would miss what is far away
        for number in range(2):
            rows = slice(number * head, (number + 1) * head)
            second.q_proj.weight[rows] = 4 * slow * read
            second.k_proj.weight[rows] = 4 * slow * written
            shown = rest[number * head : (number + 1) * head]
            second.v_proj.weight[rows] = torch.nn.functional.pad(shown, (0, 0, 0, head - len(shown)))
            second.o_proj.weight[:, rows] = 4 * second.v_proj.weight[rows].T
