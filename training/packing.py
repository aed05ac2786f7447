"""Rows of trees as one sequence in which every unique token stands once.

Rows that begin with the same token ids share those tokens, whichever tree they come from: for a causal model they are
the same computation. So the rows of a forward pass are merged into one trie, token by token, and laid out depth first.

Invariants:

- A token sees the tokens on its path and no other. As descendants of a token are contiguous in depth-first order,
  token ``q`` sees token ``k`` iff ``k <= q < ends[k]`` (TRACE.md section 10).
- Its position is its depth. It is predicted by its predecessor on the path, not by the token before it in the layout.
- Log-probabilities are computed once per unique token and gathered to rows, so whatever a loss does with rows is
  exact: autograd adds the gradients of a token over the rows it stands in.
- Only scored tokens meet the language-model head.

Attention is computed by torch's scaled dot product, where each row's new tokens look at the row's path and nothing
else is multiplied (rows of like shape in one call), or by flex attention with a block mask where the model was loaded
with it. Everything else of a model works token by token.

Letters: B rows, C completion columns, N unique tokens, S scored ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

TREE_ATTENTION = "trace_gym_tree"
MAX_SCORES = 2**26  # query-key pairs of one attention call

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Branches:
    """New tokens of rows of like shape, and the paths they look at.

    Attributes:
        queries: Places of the new tokens, [G, n]; padded on the right with place 0.
        keys: Places of the paths, [G, m]; padded on the right with place 0.
        mask: Which keys a query sees, [G, 1, n, m]; None where a path has no token before its new ones, so that
            causal order says it all.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The layout of one forward pass.

    Attributes:
        token_ids: Unique tokens in depth-first order, [1, N].
        position_ids: Their depths, [1, N].
        ends: Place after the last descendant of each token, [N].
        sources: Place of the predecessor of each scored token, [S].
        targets: Ids of the scored tokens, [1, S].
        columns: Which scored token stands in a row's column, [B, C]; S where none does.
        branches: The attention of all tokens, each as a query once.
        order: Where a token's query stands among those of all branches, [N].
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    ends: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor
    columns: torch.Tensor
    branches: tuple[_Branches, ...]
    order: torch.Tensor

    def model_inputs(self, flex: bool) -> dict[str, Any]:
        """Return the arguments of a model that `prepare_model` has prepared and that has TRL's fused head."""
        # transformers leaves a mask of four dimensions alone: without one it would build its own.
        nothing = torch.zeros(1, 1, 1, 1, device=self.ends.device)
        return {
            "input_ids": self.token_ids,
            "attention_mask": self.block_mask() if flex else nothing,
            "position_ids": self.position_ids,
            "shift_labels": self.targets,
            "packed_rows": self,
        }

    def block_mask(self) -> BlockMask:
        """Return what a token sees, for flex attention."""

        def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return (key <= query) & (query < self.ends[key])

        size = self.ends.numel()
        return create_block_mask(sees, None, None, size, size, device=str(self.ends.device))

    def to_rows(self, scored: torch.Tensor) -> torch.Tensor:
        """Gather values of the scored tokens, [1, S], to rows, [B, C]; 0 where none stands."""
        values = torch.cat([scored[0], scored.new_zeros(1)])
        return values.index_select(0, self.columns.flatten()).view_as(self.columns)


def common_prefix(a: Ids, b: Ids) -> int:
    """Return the number of ids that two sequences begin with alike."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if differ.size else size


def pack_rows(input_ids: torch.Tensor, attention_mask: torch.Tensor, scored: torch.Tensor) -> PackedRows:
    """Merge padded rows into one layout.

    Args:
        input_ids: Prompts and completions, [B, P + C], padded anywhere.
        attention_mask: 0 on padding, [B, P + C].
        scored: Which completion tokens need a log-probability, [B, C].
    """
    real = attention_mask.bool().cpu().numpy()
    paths = [ids[keep] for ids, keep in zip(input_ids.cpu().numpy(), real, strict=True)]
    rows = _merge(paths)
    size = 1 + max(int(row.places[-1]) for row in rows)
    tokens, depths, sources, ends = (np.zeros(size, np.int64) for _ in range(4))
    after = np.full(max(map(len, paths)), size)  # by depth: the end of a token's descendants, seen from the last row
    for row in reversed(rows):
        new, depth = row.places[row.shared :], np.arange(row.shared, len(row.places))
        tokens[new], depths[new], ends[new] = paths[row.index][row.shared :], depth, after[depth]
        sources[new] = row.places[np.maximum(depth - 1, 0)]
        after[row.shared :] = new[0] if new.size else after[row.shared :]

    columns = np.full(real.shape, -1)
    for row in rows:
        columns[row.index, real[row.index]] = row.places
    width = scored.size(1)
    columns = np.where(scored.bool().cpu().numpy(), columns[:, -width:], -1)
    wanted = np.unique(columns[columns >= 0])
    columns = np.where(columns >= 0, np.searchsorted(wanted, columns), wanted.size)

    def tensor(values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(input_ids.device)

    branches, order = _branches(rows, size)
    return PackedRows(
        token_ids=tensor(tokens)[None],
        position_ids=tensor(depths)[None],
        ends=tensor(ends),
        sources=tensor(sources[wanted]),
        targets=tensor(tokens[wanted])[None],
        columns=tensor(columns),
        branches=tuple(
            _Branches(tensor(queries), tensor(keys), None if mask is None else tensor(mask))
            for queries, keys, mask in branches
        ),
        order=tensor(order),
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """A row's place in the layout: ``index`` in the batch, ``places`` of its tokens, how many are ``shared``."""

    index: int
    places: Ids
    shared: int


def _merge(paths: Sequence[Ids]) -> list[_Row]:
    """Return the rows in the order of the layout, each after the row it shares most with."""
    found: list[_Row] = []
    last, places, size = np.empty(0, np.int64), np.empty(0, np.int64), 0
    for index in sorted(range(len(paths)), key=lambda i: paths[i].astype(">i8").tobytes()):
        shared = common_prefix(last, paths[index])
        last, new = paths[index], len(paths[index]) - shared
        places = np.concatenate([places[:shared], np.arange(size, size + new)])
        found.append(_Row(index, places, shared))
        size += new
    return found


def _branches(rows: Sequence[_Row], size: int) -> tuple[list[tuple[Ids, Ids, NDArray[np.bool_] | None]], Ids]:
    """Return queries, keys and mask of rows of like shape, and where each of the unique tokens is a query."""
    alike = defaultdict(list)
    for row in rows:
        length = len(row.places)
        if row.shared < length:
            alike[row.shared == 0, (length - row.shared).bit_length(), length.bit_length()].append(row)
    found: list[tuple[Ids, Ids, NDArray[np.bool_] | None]] = []
    order, start = np.zeros(size, np.int64), 0
    for (whole, *_), group in alike.items():
        n, m = max(len(row.places) - row.shared for row in group), max(len(row.places) for row in group)
        most = max(1, MAX_SCORES // (n * m))
        for chunk in (group[i : i + most] for i in range(0, len(group), most)):
            queries, keys = np.zeros((len(chunk), n), np.int64), np.zeros((len(chunk), m), np.int64)
            for g, row in enumerate(chunk):
                new = row.places[row.shared :]
                queries[g, : len(new)], keys[g, : len(row.places)] = new, row.places
                order[new] = start + g * n + np.arange(len(new))
            start += queries.size
            shared = np.array([row.shared for row in chunk])[:, None, None, None]
            mask = np.arange(m) <= shared + np.arange(n)[:, None]
            found.append((queries, keys, None if whole else mask))
    return found, order


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packed_rows: PackedRows | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as `sdpa_attention_forward` does, in packed rows along paths only.

    Args:
        module: The attention layer.
        query: [1, heads, N, d]; as are key and value, whose heads may be fewer.
        key: See ``query``.
        value: See ``query``.
        attention_mask: Unused where rows are packed.
        packed_rows: The layout; None outside packed forward passes, such as in generation.
        **kwargs: What the model says about scale and dropout.

    Returns:
        [1, N, heads, d], and None for the attention weights.
    """
    if packed_rows is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    def pick(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        picked = states[0].transpose(0, 1).index_select(0, places.flatten())
        return picked.unflatten(0, places.shape).transpose(1, 2)

    outputs = []
    for branch in packed_rows.branches:
        states = (pick(query, branch.queries), pick(key, branch.keys), pick(value, branch.keys))
        outputs.append(sdpa_attention_forward(module, *states, branch.mask, **kwargs)[0].flatten(0, 1))
    return torch.cat(outputs).index_select(0, packed_rows.order)[None], None


def prepare_model(model: Any) -> None:
    """Teach a causal language model with TRL's fused head to take packed rows; other calls are as before."""
    model = _without_adapter(model)
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(TREE_ATTENTION, tree_attention)
        AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)
        model.set_attn_implementation(TREE_ATTENTION)
    backbone = model.base_model
    if _keep_sources not in backbone._forward_hooks.values():
        backbone.register_forward_hook(_keep_sources, with_kwargs=True)


def why_not_packed(model: Any) -> str | None:
    """Return why a model cannot take packed rows, as half a sentence; None if it can."""
    adapter = getattr(model, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        return f"{adapter.peft_type} puts tokens of its own before every row"
    model = _without_adapter(model)
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config._attn_implementation not in ("sdpa", TREE_ATTENTION, "flex_attention"):
        return (
            f"the model's attention is {config._attn_implementation!r}; "
            "load it with attn_implementation='sdpa' or 'flex_attention'"
        )
    if not model._supports_attention_backend or model._is_stateful:
        return f"{type(model).__name__} computes attention in its own way"
    if layers != {"full_attention"}:
        return f"the model has layers of {', '.join(sorted(layers))}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "the model's attention has a sliding window"
    return None


def _without_adapter(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _keep_sources(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Leave of the hidden states those that predict scored tokens; the head stands behind the backbone."""
    packed: PackedRows | None = kwargs.get("packed_rows")
    if packed is not None:
        output.last_hidden_state = output.last_hidden_state.index_select(1, packed.sources)
    return output
