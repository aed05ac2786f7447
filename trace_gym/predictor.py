"""How likely a prefix is to end in success: the contract and two predictors.

The prediction serves allocation only; it never enters the policy's loss. Both predictors answer for
prompts (prefixes of turn 0) and for visited prefixes, start at the running batch mean, and learn
from pairs (prefix, s successes of n) that are handed in once per step, after they were predicted.

- `PosteriorPredictor`: a Beta posterior per prompt, as MoPPS (arXiv 2507.04632) keeps it.
- `TextFeaturePredictor`: logistic regression on hashed text and turn statistics, learnt online.

Pairs of a tree come from `trace_gym.targets`. Predictors that need a language model are made by the trainer
(`trace_gym.training.torch_predictor`); here stand their names and their base, `LearntPredictor`. Left out: Thompson
sampling.

Letters: N prefixes or pairs, n nodes of a tree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trace_gym.errors import BadInputError, StateError, unknown_name
from trace_gym.text_features import NUM_DENSE, Features, TextHasher
from trace_gym.tree import Prefix

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
View = TypeVar("View")  # what a predictor reads from prefixes

# Predictions stay inside [EPS, 1 - EPS]: at 0 or 1 the allocator would never play the prompt again.
EPS = 0.02


class Predictor(Protocol):
    """Predicts success from a prefix and learns from outcomes."""

    def predict(self, prefixes: Sequence[Prefix]) -> FloatArray:
        """Return the success probability of each prefix, ``[N]`` in (0, 1)."""
        ...

    def update(self, prefixes: Sequence[Prefix], successes: ArrayLike, counts: ArrayLike) -> None:
        """Learn from one step: `successes` of `counts` continuations of each prefix, ``[N]``."""
        ...

    def get_state(self) -> dict[str, Any]:
        """Return everything learnt, as JSON can hold it; a predictor that needs torch may return tensors."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned.

        Raises:
            StateError: If the state belongs to another kind or size of predictor.
        """
        ...


class PosteriorPredictor:
    """A running Beta posterior per prompt; a prefix gets the value of its prompt.

    The update of MoPPS: ``alpha <- discount * alpha + (1 - discount) * alpha0 + s`` and the same
    for failures. One difference: the prior's mean is the running mean of the batches instead of a
    half, so a prompt that was never played is predicted at that mean.

    Args:
        discount: Weight of what was known about a prompt when it is played again, in (0, 1].
            MoPPS uses 1 or .5; a policy in training makes old outcomes stale.
        strength: Rollouts that the prior is worth.
    """

    def __init__(self, discount: float = 0.5, strength: float = 2.0) -> None:
        """Start with no outcome seen."""
        if not 0.0 < discount <= 1.0 or not strength > 0.0:
            raise BadInputError(
                f"discount is {discount} and strength {strength}; they must be in (0, 1] and above "
                "0. The defaults are 0.5 and 2."
            )
        self.discount = discount
        self.strength = strength
        self._seen: dict[str, tuple[float, float]] = {}  # task -> successes, rollouts; discounted
        self._batch = (1.0, 2.0)  # the same over all prompts; starts at one half

    @property
    def batch_mean(self) -> float:
        """Running success rate of the prompts that were played; 0.5 at first."""
        return self._batch[0] / self._batch[1]

    def evidence(self, prefixes: Sequence[Prefix]) -> tuple[FloatArray, FloatArray]:
        """Return each prompt's posterior mean and the discounted rollouts behind it, ``[N]`` each."""
        nothing = (0.0, 0.0)
        pairs = [self._seen.get(prefix.task_id, nothing) for prefix in prefixes]
        seen = np.array(pairs, dtype=np.float64).reshape(-1, 2)
        prior = self.strength * self.batch_mean
        return (seen[:, 0] + prior) / (seen[:, 1] + self.strength), seen[:, 1]

    def predict(self, prefixes: Sequence[Prefix]) -> FloatArray:
        """Return the posterior mean of each prefix's prompt, ``[N]`` in [.02, .98]."""
        return np.clip(self.evidence(prefixes)[0], EPS, 1.0 - EPS)

    def update(self, prefixes: Sequence[Prefix], successes: ArrayLike, counts: ArrayLike) -> None:
        """Learn from the pairs of prompts (turn 0); pairs of deeper prefixes are ignored.

        Raises:
            BadInputError: If the arrays disagree in length or hold impossible counts.
        """
        won, played = check_pairs(prefixes, successes, counts)
        fresh: dict[str, tuple[float, float]] = {}
        for prefix, s, n in zip(prefixes, won.tolist(), played.tolist(), strict=True):
            if prefix.turn == 0 and n > 0:
                before = fresh.get(prefix.task_id, (0.0, 0.0))
                fresh[prefix.task_id] = (before[0] + s, before[1] + n)
        for task_id, (s, n) in fresh.items():
            old = self._seen.get(task_id, (0.0, 0.0))
            self._seen[task_id] = (self.discount * old[0] + s, self.discount * old[1] + n)
        if fresh:
            total = np.sum(list(fresh.values()), axis=0).tolist()
            # Half is forgotten with every step: the mean follows the policy within a few.
            self._batch = (0.5 * self._batch[0] + total[0], 0.5 * self._batch[1] + total[1])

    def get_state(self) -> dict[str, Any]:
        """Return the posteriors, as JSON can hold them."""
        seen = {task_id: list(pair) for task_id, pair in self._seen.items()}
        return {"kind": "posterior", "seen": seen, "batch": list(self._batch)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned.

        Raises:
            StateError: If the state is not one of this predictor.
        """
        expect(state, {"kind": "posterior"})
        self._seen = {task_id: (pair[0], pair[1]) for task_id, pair in state["seen"].items()}
        self._batch = (state["batch"][0], state["batch"][1])


class LearntPredictor(ABC, Generic[View]):
    """What predictors that learn log-odds have in common: where they start, what they recall, how they are calibrated.

    They know what was seen of a prompt before, by a `PosteriorPredictor`. A global temperature and bias are fitted on
    the last steps' predictions made before they were learnt. Subclasses say what they read from prefixes, which
    log-odds that has, and how they learn; their ``kind`` and ``size`` tell their states apart.

    Args:
        window: Steps whose predictions calibrate.
    """

    kind: str
    size: int

    def __init__(self, window: int = 4) -> None:
        """Start with no outcome seen."""
        self.posterior = PosteriorPredictor()
        self._pairs: deque[FloatArray] = deque(maxlen=window)  # [3, N]: logit, successes, counts
        self._scale, self._bias = 1.0, 0.0
        self._steps = 0

    @abstractmethod
    def _view(self, prefixes: Sequence[Prefix]) -> View:
        """Return what is known of prefixes before this step is learnt."""

    @abstractmethod
    def _logits(self, view: View) -> FloatArray:
        """Return uncalibrated log-odds, ``[N]``."""

    @abstractmethod
    def _learn(self, view: View, won: FloatArray, played: FloatArray) -> None:
        """Learn one step's pairs."""

    def predict(self, prefixes: Sequence[Prefix]) -> FloatArray:
        """Return the success probability of each prefix, ``[N]`` in [.02, .98]."""
        if not prefixes:
            return np.zeros(0)
        logits = self._logits(self._view(prefixes))
        return np.clip(sigmoid(self._scale * logits + self._bias), EPS, 1.0 - EPS)

    def update(self, prefixes: Sequence[Prefix], successes: ArrayLike, counts: ArrayLike) -> None:
        """Learn from one step's pairs; hand them in after the step's predictions were used.

        Raises:
            BadInputError: If the arrays disagree in length or hold impossible counts.
        """
        won, played = check_pairs(prefixes, successes, counts)
        if not played.any():
            return
        view = self._view(prefixes)
        if self._steps > 0:  # before the first step there is no prediction to calibrate
            self._pairs.append(np.stack([self._logits(view), won, played]))
        self._learn(view, won, played)
        self.posterior.update(prefixes, won, played)
        self._steps += 1
        self._scale, self._bias = _calibrate(self._pairs)

    def _surprise(self, prefixes: Sequence[Prefix]) -> tuple[FloatArray, FloatArray]:
        """Return each prompt's log-odds above the average prompt's, and the rollouts behind them, ``[N]`` each."""
        mean, evidence = self.posterior.evidence(prefixes)
        return _safe_logit(mean) - self._average(), evidence

    def _average(self) -> float:
        """Return the log-odds of the average prompt."""
        return float(_safe_logit(np.array(self.posterior.batch_mean)))

    def get_state(self) -> dict[str, Any]:
        """Return everything learnt; see `Predictor.get_state`."""
        return {
            "kind": self.kind,
            "size": self.size,
            "pairs": [pairs.tolist() for pairs in self._pairs],
            "calibration": [self._scale, self._bias],
            "steps": self._steps,
            "posterior": self.posterior.get_state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned.

        Raises:
            StateError: If the state is not one of this kind and size of predictor.
        """
        expect(state, {"kind": self.kind, "size": self.size})
        self._pairs.clear()
        self._pairs.extend(np.array(pairs, dtype=np.float64) for pairs in state["pairs"])
        self._scale, self._bias = state["calibration"]
        self._steps = state["steps"]
        self.posterior.set_state(state["posterior"])


class TextFeaturePredictor(LearntPredictor[Features]):
    """Bayesian logistic regression on hashed text and turn statistics, learnt online.

    Features: words of the task, of the last thing the agent said and of the last observation
    (numbers collapsed to their length), the latter two also by turn; turn, tokens, tool errors,
    text lengths; and the surprise of the prompt's `PosteriorPredictor` as one feature. After each
    step the weights are the posterior mode of a diagonal Gaussian prior centred on the old weights
    (two Newton steps, each by conjugate gradients), and the prior's precision grows by the
    curvature after it was discounted: a diagonal Laplace approximation with forgetting.

    Args:
        seed: Salt of the hash. It decides which words share a weight.
        size: Number of weights.
        discount: Weight of the earlier steps' precision, in (0, 1].
        precision: Precision of the prior of a word's weight.
        window: Steps whose predictions calibrate.
    """

    kind = "text"

    def __init__(
        self,
        seed: int = 0,
        size: int = 8192,
        discount: float = 0.9,
        precision: float = 4.0,
        window: int = 4,
    ) -> None:
        """Start with no outcome seen."""
        if size <= 2 * NUM_DENSE or not 0.0 < discount <= 1.0 or precision <= 0.0 or window < 1:
            raise BadInputError(
                f"size {size}, discount {discount}, precision {precision}, window {window}: need "
                f"more than {2 * NUM_DENSE} weights, a discount in (0, 1], a precision above 0 and "
                "a window of at least 1. The defaults are 8192, 0.9, 4 and 4."
            )
        super().__init__(window)
        self.size = size
        self.seed = seed
        self.discount = discount
        self._hasher = TextHasher(size, seed)
        self._prior = np.full(size, float(precision))
        self._prior[:NUM_DENSE] = 0.5
        self._prior[0] = 0.01  # the overall mean is learnt from the first step on
        self._precision = self._prior.copy()
        self._weights = np.zeros(size)

    def _view(self, prefixes: Sequence[Prefix]) -> Features:
        return self._hasher(prefixes, *self._surprise(prefixes))

    def _logits(self, view: Features) -> FloatArray:
        return view.times(self._weights)

    def _learn(self, view: Features, won: FloatArray, played: FloatArray) -> None:
        """Move the weights to the posterior mode and tighten the prior for the next step."""
        old, weights = self._weights, self._weights.copy()
        for _ in range(2):
            chance = sigmoid(view.times(weights))
            curvature = played * np.maximum(chance * (1.0 - chance), 1e-3)
            downhill = view.transposed(won - played * chance, self.size)
            downhill -= self._precision * (weights - old)
            diagonal = self._precision + view.transposed(curvature, self.size, 2)
            step = _conjugate_gradients(partial(self._times_curvature, view, curvature), downhill, diagonal)
            weights += step
            if np.abs(step).max() < 1e-3:
                break
        self._weights = weights
        self._precision = self._prior + self.discount * (diagonal - self._prior)

    def _times_curvature(self, features: Features, curvature: FloatArray, vector: FloatArray) -> FloatArray:
        """Return the Hessian of the negative log posterior times a vector, ``[size]``."""
        rows = curvature * features.times(vector)
        return features.transposed(rows, self.size) + self._precision * vector

    def get_state(self) -> dict[str, Any]:
        """Return everything learnt, as JSON can hold it."""
        learnt = {"weights": self._weights.tolist(), "precision": self._precision.tolist()}
        return {**super().get_state(), "seed": self.seed, **learnt}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned.

        Raises:
            StateError: If the state is not one of this predictor, its size and its seed.
        """
        expect(state, {"kind": self.kind, "seed": self.seed})
        super().set_state(state)
        self._weights = np.array(state["weights"], dtype=np.float64)
        self._precision = np.array(state["precision"], dtype=np.float64)


def _conjugate_gradients(
    product: Callable[[FloatArray], FloatArray], target: FloatArray, diagonal: FloatArray
) -> FloatArray:
    """Solve ``product(x) = target`` roughly, preconditioned by the diagonal."""
    x = np.zeros_like(target)
    residual = target
    direction = residual / diagonal
    norm = first = float(residual @ direction)
    for _ in range(6):
        if norm <= 1e-3 * first or norm < 1e-10:
            break
        image = product(direction)
        length = norm / float(direction @ image)
        x = x + length * direction
        residual = residual - length * image
        scaled = residual / diagonal
        new = float(residual @ scaled)
        direction = scaled + (new / norm) * direction
        norm = new
    return x


def _calibrate(steps: Iterable[FloatArray]) -> tuple[float, float]:
    """Fit ``sigmoid(scale * logit + bias)`` to outcomes, pulled towards (1, 0) where data is thin."""
    parameters, neutral = np.array([1.0, 0.0]), np.array([1.0, 0.0])
    odds, won, played = np.concatenate([np.zeros((3, 0)), *steps], axis=1)
    design = np.stack([odds, np.ones_like(odds)])
    for _ in range(8):
        chance = sigmoid(parameters @ design)
        slope = design @ (won - played * chance) - 20.0 * (parameters - neutral)
        curvature = (design * (played * chance * (1.0 - chance))) @ design.T + 20.0 * np.eye(2)
        parameters = parameters + np.linalg.solve(curvature, slope)
        parameters[0] = np.clip(parameters[0], 0.1, 3.0)
    return float(parameters[0]), float(parameters[1])


PREDICTORS: dict[str, Callable[[int], Predictor]] = {
    "posterior": lambda seed: PosteriorPredictor(),
    "text": TextFeaturePredictor,
}


# Made by the trainer: "hidden" (a probe on the policy's hidden states) and "value_head" (a small language model).
MODEL_PREDICTORS = ("hidden", "value_head")


def get_predictor(name: str, seed: int = 0) -> Predictor:
    """Make a predictor by name.

    Args:
        name: ``"posterior"`` (memory of each prompt) or ``"text"`` (learns from the text as well).
        seed: Seed of whatever is random in it.

    Raises:
        BadInputError: If there is no such predictor.
    """
    if name not in PREDICTORS:
        raise unknown_name("predictor", name, PREDICTORS)
    return PREDICTORS[name](seed)


def check_pairs(prefixes: Sequence[Prefix], successes: ArrayLike, counts: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Check pairs and return them as floats."""
    won, played = np.asarray(successes, np.float64), np.asarray(counts, np.float64)
    if won.shape != (len(prefixes),) or played.shape != won.shape:
        raise BadInputError(
            f"{len(prefixes)} prefixes, but successes of shape {won.shape} and counts of shape "
            f"{played.shape}. Give one of each per prefix."
        )
    possible = (won >= 0.0) & (won <= played) & np.isfinite(played)
    if not possible.all():
        worst = int(np.argmin(possible))
        raise BadInputError(
            f"successes[{worst}] is {won[worst]} of counts[{worst}] {played[worst]}; need 0 <= "
            "successes <= counts. Leave failed rollouts out of both."
        )
    return won, played


def expect(state: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Refuse a state of another predictor."""
    for key, expected in facts.items():
        if state.get(key) != expected:
            raise StateError(
                f"The state's {key} is {state.get(key)!r}, but this predictor's is {expected!r}. "
                "Make the predictor as it was when the state was saved."
            )


def sigmoid(x: FloatArray) -> FloatArray:
    """Return 1 / (1 + exp(-x)) without overflow."""
    result: FloatArray = 0.5 + 0.5 * np.tanh(0.5 * x)
    return result


def _safe_logit(p: FloatArray) -> FloatArray:
    """Return the log-odds of probabilities, which are kept away from 0 and 1."""
    inside = np.clip(p, EPS, 1.0 - EPS)
    result: FloatArray = np.log(inside / (1.0 - inside))
    return result
