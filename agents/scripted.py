"""The scripted demonstrator as an agent: an upper bound, and a source of demonstrations."""

from __future__ import annotations

from collections.abc import Sequence

from trace_gym.errors import BadInputError
from trace_gym.messages import Completion, Request


class ScriptedAgent:
    """Answers with the environment's own demonstration, ``request.hint``.

    How often it is right is the environment's choice: make it with ``demonstrator_skill`` in [0, 1]. Tokens
    are counted as whitespace-separated words; ``max_tokens`` is not applied, half a script is no script.
    """

    batched = True

    async def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Return the hint of every request.

        Raises:
            BadInputError: If a request has none.
        """
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Completion:
        if request.hint is None:
            raise BadInputError(
                "The scripted agent repeats the environment's demonstrations, and this request has none; "
                "make the environment with demonstrator_skill=1.0 (the share of right steps, in [0, 1])."
            )
        return Completion(request.hint, num_tokens=len(request.hint.split()))
