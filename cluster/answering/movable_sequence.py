"""One sequence on its way to its end: by one group, or from group to group when some are lost."""

import secrets

from msgspec.structs import replace

from actors.requests import Progress, Request, RequestUpdate, SequenceKey, TokenLogprob
from cluster.answering.group import Group


class MovableSequence:
    """What is known of it here, which is all that another group needs to go on.

    Noise depends on (seed, position, token): another group draws the tokens that the lost one would have.
    """

    __slots__ = (
        "_holding",
        "_newest",
        "_token_ids",
        "group",
        "num_moves",
        "num_moves_in_vain",
        "position",
        "request",
        "weights",
    )

    def __init__(self, request: Request, position: int = 0) -> None:
        self.position = position
        """Of its request among those of one call."""
        self.request = request
        """As it was submitted last."""
        self.group: Group | None = None
        """Where it runs; None: nowhere."""
        self.weights = 0
        """Of the group where it runs, or ran last."""
        self.num_moves = 0
        """Groups that were lost under it."""
        self.num_moves_in_vain = 0
        """Those since its newest token."""
        self._token_ids: list[int] = list(request.progress.token_ids) if request.progress else []
        """All that were told, those that are held too."""
        self._newest: RequestUpdate | None = None
        self._holding = Holding()

    @property
    def key(self) -> SequenceKey:
        return self.request.key

    def take(self, update: RequestUpdate) -> RequestUpdate:
        """Note what a group tells; the update as it may be passed on."""
        self.num_moves_in_vain = 0
        self._token_ids += update.token_ids
        self._newest = update
        return self._holding.pass_on(update)

    @property
    def weights_to_keep(self) -> int | None:
        """What its tokens are of; None before the first."""
        return self.weights if self._token_ids else None

    def move(self, *, is_lost: bool = True) -> None:
        """Its group is left: the request becomes the one that goes on from here, a new incarnation.

        is_lost: the group was, which is held against a sequence that sees it too often.

        The prompt's log probabilities come with the first update: who has that asks for none.
        """
        self.num_moves += is_lost
        self.num_moves_in_vain += is_lost
        self.group = None
        incarnation = secrets.randbits(63)
        newest = self._newest
        if newest is None:
            self.request = replace(self.request, incarnation=incarnation)
            return
        self.request = replace(
            self.request,
            incarnation=incarnation,
            params=replace(self.request.params, prompt_logprobs=None),
            progress=Progress(
                token_ids=tuple(self._token_ids),
                num_cached_tokens=newest.num_cached_tokens,
                num_draft_tokens=newest.num_draft_tokens,
                num_accepted_tokens=newest.num_accepted_tokens,
            ),
        )


class Holding:
    """The newest tokens of one sequence that wait, with their log probabilities."""

    __slots__ = ("_logprobs", "_token_ids")

    def __init__(self) -> None:
        self._token_ids: tuple[int, ...] = ()
        self._logprobs: tuple[TokenLogprob, ...] = ()

    def pass_on(self, update: RequestUpdate) -> RequestUpdate:
        """The update with the tokens that need not wait any more."""
        if not update.num_held and not self._token_ids:
            return update
        token_ids, logprobs = self._token_ids + update.token_ids, self._logprobs + update.logprobs
        num_free = len(token_ids) - update.num_held
        self._token_ids, self._logprobs = token_ids[num_free:], logprobs[num_free:]
        return replace(update, token_ids=token_ids[:num_free], logprobs=logprobs[:num_free], num_held=0)
