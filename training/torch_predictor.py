"""Predictors of success that need a language model; see `trace_gym.predictor` for the contract.

- `HiddenStatePredictor` ("hidden"): a small network on the policy's own hidden state at each turn boundary, which the
  policy computes anyway; nearly free, and it follows the policy.
- `ValueHeadPredictor` ("value_head"): a small language model with a value head, trained along; it costs forward and
  backward passes of that model.

Both start at the running batch mean and learn from the last steps; what they share with the predictor on text features
is in their base there.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from trace_gym.chat import ChatEncoder
from trace_gym.predictor import LearntPredictor, Predictor, View, get_predictor
from trace_gym.processes import ALONE, Processes
from trace_gym.training.prefix_reader import Ids, PrefixReader, read_rows
from trace_gym.tree import Prefix

EPOCHS = 12  # passes of a probe over what it learns from, per step
_FACTS = 3  # numbers beside the hidden state
_WIDTH = 32  # of a probe
_BATCH = 128

FloatArray = NDArray[np.float64]


class _Learner(LearntPredictor[View]):
    """What both have in common: a network, the steps that it learns from, and the processes that share the run."""

    def __init__(self, reader: PrefixReader, network: torch.nn.Module, optimizer: Any, window: int, seed: int) -> None:
        super().__init__()
        self.reader = reader
        self.size = reader.size
        self.processes: Processes = ALONE
        self.network = network
        self.optimizer = optimizer
        self._replay: deque[Any] = deque(maxlen=window)
        self._rng = np.random.default_rng(seed)

    def update(self, prefixes: Sequence[Prefix], successes: ArrayLike, counts: ArrayLike) -> None:
        """Learn from one step's pairs; see the base. All processes learn alike."""
        if self.processes.size > 1:
            self.reader.share(self.processes.gather)
        super().update(prefixes, successes, counts)
        self.reader.forget()

    def _facts(self, prefixes: Sequence[Prefix]) -> torch.Tensor:
        """Return what is known beside the text, [N, 3]: surprise of the prompt, rollouts behind it, turn."""
        surprise, evidence = self._surprise(prefixes)
        turns = np.array([prefix.turn for prefix in prefixes], dtype=np.float64)
        return torch.tensor(np.stack([surprise, np.log1p(evidence), turns / 8.0], axis=1), dtype=torch.float32)

    def _offsets(self, count: int) -> torch.Tensor:
        """Return what the log-odds of a step start from, [N]: those of the average prompt."""
        return torch.full((count,), self._average())

    def _fit(self, probe: _Probe, data: Sequence[torch.Tensor], epochs: int) -> None:
        """Fit a probe to columns of hidden states, facts, offsets, successes and counts."""
        for _ in range(epochs):
            for batch in torch.from_numpy(self._rng.permutation(len(data[0]))).split(_BATCH):
                states, facts, offset, won, played = (column[batch] for column in data)
                _descend(self.optimizer, probe(states, facts) + offset, won, played)

    def get_state(self) -> dict[str, Any]:
        """Return everything learnt, as `torch.save` can hold it."""
        return {
            **super().get_state(),
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "replay": list(self._replay),
            "rng": self._rng.bit_generator.state,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned.

        Raises:
            StateError: If the state is not one of this kind and size of predictor.
        """
        super().set_state(state)
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._replay.clear()
        kept = [[x.cpu() if isinstance(x, torch.Tensor) else x for x in step] for step in state["replay"]]
        self._replay.extend(kept)
        self._rng.bit_generator.state = state["rng"]


class _Probe(torch.nn.Module):
    """Hidden state and facts to a number that is 0 at first; knows the scale of what it is given."""

    def __init__(self, size: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        first = torch.randn(_WIDTH, size + _FACTS, generator=generator) / (size + _FACTS) ** 0.5
        self.first = torch.nn.Parameter(first)
        self.offset = torch.nn.Parameter(torch.zeros(_WIDTH))
        self.second = torch.nn.Parameter(torch.zeros(_WIDTH))
        self.direct = torch.nn.Parameter(torch.zeros(size + _FACTS))
        self.bias = torch.nn.Parameter(torch.zeros(()))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("deviation", torch.ones(size))
        self.register_buffer("seen", torch.zeros(()))

    def measure(self, states: torch.Tensor) -> None:
        """Follow the mean and the deviation of hidden states, [N, H]."""
        rate = 1.0 if not self.seen else 0.2
        self.mean.lerp_(states.mean(0), rate)
        self.deviation.lerp_(states.std(0, unbiased=False).clamp(min=1e-3), rate)
        self.seen += 1

    def forward(self, states: torch.Tensor, facts: torch.Tensor) -> torch.Tensor:
        scaled = ((states - self.mean) / self.deviation).clamp(-5, 5)
        x = torch.cat([scaled / scaled.shape[1] ** 0.5, facts], dim=1)
        return torch.tanh(x @ self.first.T + self.offset) @ self.second + x @ self.direct + self.bias


class HiddenStatePredictor(_Learner[tuple[torch.Tensor, torch.Tensor]]):
    """A small network on the policy's hidden states.

    Args:
        reader: Reads with the policy.
        seed: Seed of everything random.
        window: Steps that are learnt from, the latest ones: older states are of an older policy.
        learning_rate: Of Adam.
    """

    kind = "hidden"

    def __init__(self, reader: PrefixReader, seed: int = 0, *, window: int = 4, learning_rate: float = 1e-2) -> None:
        """Start with no outcome seen."""
        probe = _Probe(reader.size, seed)
        optimizer = torch.optim.AdamW(probe.parameters(), lr=learning_rate, weight_decay=0.1)
        super().__init__(reader, probe, optimizer, window, seed)

    def listen(self, agent: Any) -> None:
        """Take hidden states from an agent that samples from the policy."""
        self.reader.listen(agent)

    def _view(self, prefixes: Sequence[Prefix]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.reader(prefixes), self._facts(prefixes)

    @torch.no_grad()
    def _logits(self, view: tuple[torch.Tensor, torch.Tensor]) -> FloatArray:
        return _numbers(self.network(*view) + self._average())

    def _learn(self, view: tuple[torch.Tensor, torch.Tensor], won: FloatArray, played: FloatArray) -> None:
        states, facts = view
        self.network.measure(states)
        self._replay.append([states, facts, self._offsets(len(won)), _column(won), _column(played)])
        self._fit(self.network, [torch.cat(columns) for columns in zip(*self._replay, strict=True)], EPOCHS)


class ValueHeadPredictor(_Learner[tuple[list[Ids], torch.Tensor]]):
    """A language model with a value head on the text of a prefix.

    In every step the model makes one pass over the latest steps together with its head, then the head alone is fitted
    to what the model says now.

    Args:
        model: The language model; it is copied.
        encoder: Renders prefixes for it.
        own_ids: Whether prefixes carry token ids of this model.
        seed: Seed of everything random.
        window: Steps that are learnt from, the latest ones.
        learning_rate: Of Adam, for the model; the head learns a hundred times faster.
    """

    kind = "value_head"

    def __init__(
        self,
        model: Any,
        encoder: ChatEncoder,
        own_ids: bool = True,
        seed: int = 0,
        *,
        window: int = 4,
        learning_rate: float = 1e-4,
    ) -> None:
        """Copy the model; start with no outcome seen."""
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        decoder = copy.deepcopy(base.get_decoder()).float().requires_grad_()
        reader = PrefixReader(model, encoder, own_ids)
        head = _Probe(reader.size, seed).to(decoder.device)
        groups = [
            {"params": list(decoder.parameters()), "lr": learning_rate, "weight_decay": 0.01},
            {"params": list(head.parameters()), "lr": 100 * learning_rate, "weight_decay": 0.1},
        ]
        network = torch.nn.ModuleDict({"decoder": decoder, "head": head}).eval()
        super().__init__(reader, network, torch.optim.AdamW(groups), window, seed)

    def _view(self, prefixes: Sequence[Prefix]) -> tuple[list[Ids], torch.Tensor]:
        return [self.reader.ids(prefix) for prefix in prefixes], self._facts(prefixes)

    @torch.no_grad()
    def _logits(self, view: tuple[list[Ids], torch.Tensor]) -> FloatArray:
        rows, facts = view
        states = self._states(rows)
        return _numbers(self.network["head"](states, facts.to(states.device)) + self._average())

    def _states(self, rows: Sequence[Ids]) -> torch.Tensor:
        """Return the model's hidden states after rows of ids, [N, H]."""
        states: dict[Ids, torch.Tensor] = {}
        for read, found in read_rows(self.network["decoder"], list(dict.fromkeys(rows))):
            states.update(zip(read, found, strict=True))
        return torch.stack([states[row] for row in rows])

    def _learn(self, view: tuple[list[Ids], torch.Tensor], won: FloatArray, played: FloatArray) -> None:
        rows, facts = view
        self._replay.append([rows, facts, self._offsets(len(won)), _column(won), _column(played)])
        kept, *columns = zip(*self._replay, strict=True)
        everything = [tuple(row) for rows in kept for row in rows]
        data = [torch.cat(column).to(self.network["decoder"].device) for column in columns]
        head = self.network["head"]
        with torch.no_grad():
            head.measure(self._states(rows))
        # Neighbours stay together: they are the turns of one rollout, which is read once.
        for part in np.array_split(np.arange(len(everything)), -(-len(everything) // _BATCH)):
            states = self._states([everything[i] for i in part])
            facts, offset, s, n = (column[part.tolist()] for column in data)
            _descend(self.optimizer, head(states, facts) + offset, s, n)
        with torch.no_grad():
            states = self._states(everything)
        self._fit(head, [states, *data], EPOCHS)


def make_predictor(
    name: str, seed: int, model: Any, encoder: ChatEncoder, processes: Processes, model_name: str | None = None
) -> Predictor:
    """Make a predictor by name, for the trainer.

    Args:
        name: One of `trace_gym.predictor.PREDICTORS` or `trace_gym.predictor.MODEL_PREDICTORS`.
        seed: Seed of whatever is random in it.
        model: The policy.
        encoder: Of the policy.
        processes: Who shares the run.
        model_name: Name or folder of the language model of ``value_head``; None takes a copy of the policy.
    """
    if name == HiddenStatePredictor.kind:
        found: _Learner[Any] = HiddenStatePredictor(PrefixReader(model, encoder), seed)
    elif name == ValueHeadPredictor.kind and model_name is None:
        found = ValueHeadPredictor(model, encoder, seed=seed)
    elif name == ValueHeadPredictor.kind:
        small = AutoModelForCausalLM.from_pretrained(model_name).to(model.device)
        found = ValueHeadPredictor(small, ChatEncoder(AutoTokenizer.from_pretrained(model_name)), False, seed)
    else:
        return get_predictor(name, seed)
    found.processes = processes
    return found


def _numbers(logits: torch.Tensor) -> FloatArray:
    found: FloatArray = logits.double().cpu().numpy()
    return found


def _column(values: FloatArray) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _descend(optimizer: Any, logits: torch.Tensor, won: torch.Tensor, played: torch.Tensor) -> None:
    """Make a step on the mean negative log-likelihood of the outcomes."""
    loss = torch.nn.functional.softplus(logits) * played - logits * won
    optimizer.zero_grad()
    (loss.sum() / played.sum().clamp(min=1.0)).backward()
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    optimizer.step()
