"""Sentence encoders: any encoder model by name or folder, with the settings of E5 as defaults.

E5 (Wang et al., "Text Embeddings by Weakly-Supervised Contrastive Pre-training", https://arxiv.org/abs/2212.03533)
wants ``query: `` and ``passage: `` before the texts, the mean of the last layer over the real tokens, and unit length;
left out, nothing fails and the results are worse. Another model needs its own prefixes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trace_gym.errors import BadInputError, require, unknown_name

POOLINGS = ("mean", "cls")


@dataclass(frozen=True)
class EncoderConfig:
    """What decides a text's vector.

    Attributes:
        model: Name at the model hub, or a folder.
        query_prefix: Put before every query.
        passage_prefix: Put before every passage.
        pooling: ``"mean"`` over the real tokens, or ``"cls"``, the first token.
        normalize: Whether vectors get unit length.
        max_tokens: Longer texts are cut.
    """

    model: str = "intfloat/e5-base-v2"
    query_prefix: str = "query: "
    passage_prefix: str = "passage: "
    pooling: str = "mean"
    normalize: bool = True
    max_tokens: int = 256

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            BadInputError: If one is not allowed.
        """
        if self.pooling not in POOLINGS:
            raise unknown_name("pooling", self.pooling, POOLINGS)
        if self.max_tokens < 2:
            raise BadInputError(f"max_tokens must be at least 2, given {self.max_tokens}.")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)


class TextEncoder:
    """Encodes texts with a transformers model; safe in threads, one batch at a time.

    Args:
        config: The model and its settings.
        batch_size: Texts per forward pass.
        device: Such as ``"cuda"``; default: the first GPU if there is one.

    Attributes:
        dimension: Length of a vector.
    """

    def __init__(self, config: EncoderConfig, *, batch_size: int = 32, device: str | None = None) -> None:
        """Load the model.

        Raises:
            MissingExtraError: If torch or transformers is not installed.
            BadInputError: If there is no such model.
        """
        self._torch = torch = require("torch", "train")
        transformers = require("transformers", "train")
        self.config = config
        self._batch_size = batch_size
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
            self._model = transformers.AutoModel.from_pretrained(config.model).to(self._device).eval()
        except (OSError, ValueError) as error:
            first = str(error).strip().partition("\n")[0]
            raise BadInputError(f"No encoder {config.model!r}: give a folder or a name at the hub ({first})") from error
        self.dimension = int(self._model.config.hidden_size)
        self._lock = threading.Lock()  # a fast tokenizer is not for two threads

    def encode_queries(self, queries: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return float32 vectors ``[queries, dimension]``."""
        return self._encode([self.config.query_prefix + query for query in queries])

    def encode_passages(self, contents: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return float32 vectors ``[passages, dimension]``."""
        return self._encode([self.config.passage_prefix + text for text in contents])

    def _encode(self, texts: list[str]) -> npt.NDArray[np.float32]:
        vectors = np.empty((len(texts), self.dimension), np.float32)
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))  # less padding in a batch
        with self._lock, self._torch.inference_mode():
            for first in range(0, len(order), self._batch_size):
                batch = order[first : first + self._batch_size]
                vectors[batch] = self._forward([texts[number] for number in batch])
        return vectors

    def _forward(self, texts: list[str]) -> npt.NDArray[np.float32]:
        tokens = self._tokenizer(
            texts, padding=True, truncation=True, max_length=self.config.max_tokens, return_tensors="pt"
        ).to(self._device)
        states = self._model(**tokens).last_hidden_state.float()  # [texts, tokens, dimension]
        if self.config.pooling == "cls":
            pooled = states[:, 0]
        else:
            mask = tokens["attention_mask"].unsqueeze(-1).float()
            pooled = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
        if self.config.normalize:
            pooled = self._torch.nn.functional.normalize(pooled, dim=-1)
        result: npt.NDArray[np.float32] = pooled.cpu().numpy()
        return result
