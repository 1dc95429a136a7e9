"""Drafters: what to draft in a round, from the settings of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from layerskip.checkpoint.settings import Setting
from layerskip.draft.draft_stop import DraftStop, draft_stop_for
from layerskip.draft.drafting import draft_chain, draft_found, draft_nothing, draft_tree
from layerskip.draft.lookup import NgramIndex
from layerskip.exact.policy import Policy
from layerskip.model.cache import RollbackCache
from layerskip.model.rows import Rows
from layerskip.model.stages import Stages
from layerskip.model.tree import Draft, Shape

if TYPE_CHECKING:
    from layerskip.decode.step import Step
    from layerskip.grammar.processor import GrammarProcessor


class Drafter(Protocol):
    """What the loop asks in every round."""

    def start(self, rows: Rows) -> None:
        """The prompts are known: of all rows, and later of those that join them."""

    def draft(self, stages: Stages, cache: RollbackCache, rows: Rows, policy: Policy) -> Draft:
        """Propose for all rows."""
        ...

    def observe(self, steps: Sequence[Step]) -> None:
        """What the round brought, a step for each row."""


class NoDrafter:
    """Plain decoding."""

    def start(self, rows: Rows) -> None:
        pass

    def draft(self, stages: Stages, cache: RollbackCache, rows: Rows, policy: Policy) -> Draft:
        return draft_nothing(rows)

    def observe(self, steps: Sequence[Step]) -> None:
        pass


class ExitDrafter(NoDrafter):
    """The early exit: a chain or a tree.

    Args:
        shape: of the tree.
        draft_stop: when a chain ends; None: at its full length.
    """

    def __init__(self, shape: Shape, draft_stop: DraftStop | None = None) -> None:
        self.shape = shape
        self.draft_stop = draft_stop or DraftStop(len(shape.widths))
        self._asked = False  # whether the stop was, in this round

    def draft(self, stages: Stages, cache: RollbackCache, rows: Rows, policy: Policy) -> Draft:
        return self._grow(stages, cache, rows, policy, self._now(rows))

    def observe(self, steps: Sequence[Step]) -> None:
        if self._asked:
            self.draft_stop.end(steps)
        self._asked = False

    def _now(self, rows: Rows) -> Shape:
        """The tree of the round that begins."""
        self._asked = True
        return self.shape.cut(min(self.draft_stop.begin(), max(rows.rooms) - 1))

    def _grow(
        self,
        stages: Stages,
        cache: RollbackCache,
        rows: Rows,
        policy: Policy,
        shape: Shape,
        branches: Sequence[Sequence[int]] | None = None,
    ) -> Draft:
        if not shape.widths:
            self.draft_stop.drafted()
            return draft_nothing(rows)
        if self.draft_stop.exit_layer not in (None, stages.exit_layer):
            stages.use(self.draft_stop.exit_layer)
        confident = self.draft_stop.goes_on if self.draft_stop.asks else None
        if len(rows) == 1 and shape.is_chain and branches is None:
            draft = draft_chain(stages, cache, rows, policy, len(shape.widths), confident)
        else:
            draft = draft_tree(stages, cache, rows, policy, shape, confident, branches)
        self.draft_stop.drafted()
        return draft


class LookupDrafter(ExitDrafter):
    """Prompt lookup: what followed the last tokens where they stood before, in prompt and output.

    Args:
        num_tokens: most tokens looked up.
        shape: what the early exit drafts where nothing is found for a row, or, with `branch`, in every round, the
            lookup as one more branch; None: nothing.
        branch: whether the lookup becomes a branch of the exit's tree.
    """

    def __init__(self, num_tokens: int, shape: Shape | None, branch: bool, draft_stop: DraftStop | None = None) -> None:
        super().__init__(shape or Shape(()), draft_stop)
        # One token alone says little: where the early exit can draft instead, two must match.
        self._min_ngram = 1 if shape is None else 2
        self.num_tokens, self.branch = num_tokens, branch
        self._indexes: dict[int, NgramIndex] = {}  # by row of the batch

    def start(self, rows: Rows) -> None:
        self._indexes |= {index: NgramIndex(min_ngram=self._min_ngram) for index in rows.index}
        for index, prompt in zip(rows.index, rows.prompts, strict=True):
            self._indexes[index].extend(prompt.tolist())

    def observe(self, steps: Sequence[Step]) -> None:
        super().observe(steps)
        for step in steps:
            self._indexes[step.row].extend(step.tokens[0].tolist())

    def draft(self, stages: Stages, cache: RollbackCache, rows: Rows, policy: Policy) -> Draft:
        found = [
            self._indexes[index].propose(min(self.num_tokens, room - 1)) if room > 1 else []
            for index, room in zip(rows.index, rows.rooms, strict=True)
        ]
        if all(found) and not self.branch:
            return draft_found(rows, found)
        shape = self._now(rows)
        if not shape.widths:
            return draft_found(rows, found)
        return self._grow(stages, cache, rows, policy, shape, found if self.branch and any(found) else None)


class ForcedDrafter:
    """Before another drafter: tokens that a grammar leaves no choice of need no layers to draft them. Fewer than two in
    any row are not worth a round, and the other one drafts.

    Args:
        limit: most forced tokens a round.
    """

    def __init__(self, grammar: GrammarProcessor, otherwise: Drafter, limit: int = 16) -> None:
        self.grammar, self.otherwise, self.limit = grammar, otherwise, limit

    def start(self, rows: Rows) -> None:
        self.otherwise.start(rows)

    def observe(self, steps: Sequence[Step]) -> None:
        self.otherwise.observe(steps)

    def draft(self, stages: Stages, cache: RollbackCache, rows: Rows, policy: Policy) -> Draft:
        # Where there is room for two, and for the token that follows them.
        forced = [
            self.grammar.forced(rows.committed(row)[0].tolist(), min(self.limit, room - 1)) if room > 2 else []
            for row, room in enumerate(rows.rooms)
        ]
        if all(len(tokens) > 1 for tokens in forced):
            return draft_found(rows, forced)
        return self.otherwise.draft(stages, cache, rows, policy)


def drafter_for(
    setting: Setting, grammar: GrammarProcessor | None = None, adaptive: DraftStop | None = None
) -> Drafter:
    """The drafter that a setting asks for; `adaptive` where drafts are weighed."""
    drafter: Drafter = NoDrafter()
    if setting.lookup == "only":
        drafter = LookupDrafter(setting.num_lookup_tokens, None, branch=False)
    elif setting.exit_layer is not None:
        draft_stop = adaptive or draft_stop_for(setting.draft_stop, len(setting.shape.widths))
        if setting.lookup == "off":
            drafter = ExitDrafter(setting.shape, draft_stop)
        else:
            branch = setting.lookup == "branch"
            drafter = LookupDrafter(setting.num_lookup_tokens, setting.shape, branch, draft_stop)
    return drafter if grammar is None else ForcedDrafter(grammar, drafter)
