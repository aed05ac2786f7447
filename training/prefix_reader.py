"""What a language model thinks of prefixes: its last hidden state after each of them.

The policy reads every prefix anyway, when it samples the turn that follows. An agent that offers ``on_read`` tells of
it, and the hidden state that its language-model head is given is kept; a prefix that nobody has read yet, such as the
prompts before the first allocation, is read here. A rollout is read once for all its turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trace_gym.chat import ChatEncoder
from trace_gym.tree import Prefix

READ_TOKENS = 4096  # of one forward pass, padding included

Ids = tuple[int, ...]


class PrefixReader:
    """Hidden states of prefixes, [H] each, until they are forgotten.

    Args:
        model: A causal language model, peft-wrapped or not.
        encoder: Renders prefixes whose token ids are not known, or are those of another model.
        own_ids: Whether the token ids of prefixes are this model's.
    """

    def __init__(self, model: Any, encoder: ChatEncoder, own_ids: bool = True) -> None:
        """Start with nothing read."""
        self.encoder = encoder
        self.own_ids = own_ids
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model
        config = self._model.config.get_text_config(decoder=True)
        self.size = int(config.hidden_size)
        self._longest = getattr(config, "max_position_embeddings", None)
        self._known: dict[Ids, torch.Tensor] = {}
        self._last = torch.empty(0)
        self._hook: Any = None

    def listen(self, agent: Any) -> None:
        """Take hidden states from an agent that samples from this model, if it offers them."""
        if not hasattr(agent, "on_read"):
            return
        if self._hook is None:
            self._hook = self._model.get_output_embeddings().register_forward_pre_hook(self._keep_input)
        agent.on_read = self._keep

    def ids(self, prefix: Prefix) -> Ids:
        """Return the token ids of a prefix; of what the model cannot take, the end."""
        known = self.own_ids and prefix.token_ids
        ids = prefix.token_ids if known else self.encoder.prompt(prefix.messages)
        return ids if self._longest is None else ids[-self._longest :]

    def __call__(self, prefixes: Sequence[Prefix]) -> torch.Tensor:
        """Return the hidden state after each prefix, [N, H], in float32 on the CPU."""
        wanted = [self.ids(prefix) for prefix in prefixes]
        if missing := [ids for ids in dict.fromkeys(wanted) if ids not in self._known]:
            decoder, training = self._model.get_decoder(), self._model.training
            self._model.eval()
            with torch.no_grad():
                for rows, states in read_rows(decoder, missing):
                    self._known.update(zip(rows, states.float().cpu(), strict=True))
            self._model.train(training)
        return torch.stack([self._known[ids] for ids in wanted])

    def forget(self) -> None:
        """Forget everything that was read, as the weights are about to change."""
        self._known.clear()

    def share(self, gather: Any) -> None:
        """Let every process know what any of them has read; all must call it, and know the same numbers afterwards."""
        self._known = {ids: state for part in gather(self._known) for ids, state in part.items()}

    def _keep_input(self, module: Any, args: tuple[torch.Tensor, ...]) -> None:
        if not torch.is_grad_enabled():  # not when training, whose forward passes are long and of other rows
            self._last = args[0][:, -1].clone()

    def _keep(self, rows: Sequence[Ids]) -> None:
        """Keep what the head was given last: the states after these rows."""
        states = self._last.float().cpu()
        self._known.update(zip(rows, states, strict=True))


def read_rows(decoder: Any, prefixes: Sequence[Ids]) -> Any:
    """Yield prefixes and the hidden states after them, [n, H], batch by batch.

    A prefix of another prefix costs nothing: in a causal model its state stands in the longer one's row.

    Args:
        decoder: The model without its head; where gradients are wanted, they flow.
        prefixes: Each once.
    """
    rows: list[list[Ids]] = []  # the longest first
    for ids in sorted(prefixes, reverse=True):
        if rows and rows[-1][0][: len(ids)] == ids:
            rows[-1].append(ids)
        else:
            rows.append([ids])
    rows.sort(key=lambda row: len(row[0]))
    start = 0
    for end in range(1, len(rows) + 1):
        if end < len(rows) and len(rows[end][0]) * (end + 1 - start) <= READ_TOKENS:
            continue
        batch, start = rows[start:end], end
        width = len(batch[-1][0])
        ids = torch.zeros(len(batch), width, dtype=torch.long, device=decoder.device)
        mask = torch.zeros_like(ids)
        for place, (longest, *_) in enumerate(batch):
            ids[place, : len(longest)] = torch.tensor(longest)
            mask[place, : len(longest)] = 1
        states = decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        places = [(place, len(prefix) - 1) for place, row in enumerate(batch) for prefix in row]
        lines, columns = (torch.tensor(index, device=decoder.device) for index in zip(*places, strict=True))
        yield [prefix for row in batch for prefix in row], states[lines, columns]
