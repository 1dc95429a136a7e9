"""Engines of the load test: how each arm decodes the requests that are given to it together."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from infer.serving.request_queue import Request
from infer.serving.worker import Worker
from layerskip.checkpoint.settings import Setting
from layerskip.decode.choice import Choice
from layerskip.decode.decoding import Stop, decode
from layerskip.decode.joining import Newcomer
from layerskip.decode.preparation import prepare_session
from layerskip.decode.session import Session
from layerskip.decode.streaming import pad_left
from layerskip.draft.drafters import drafter_for
from layerskip.draft.remembered import adaptive_for


class LoopEngine:
    """This kit's loop. A row that has ended leaves the batch after its round, and a request joins between two rounds.

    Args:
        setting: how to draft.
        arguments: of `model.generate`.
        continuous: whether requests join a running batch; otherwise they wait until it has ended.

    Raises:
        ValueError: if the model cannot be decoded so.
    """

    def __init__(self, model: PreTrainedModel, setting: Setting, arguments: dict[str, Any], continuous: bool) -> None:
        self.model, self.setting, self.arguments, self.continuous = model, setting, arguments, continuous
        probe = self._session((0,))  # refusals come here, and not within the test
        probe.stages.check_blocks(branching=False)
        self._sampler = probe.samplers[0]

    def __call__(self, batch: Sequence[Request], worker: Worker) -> None:
        requests: list[Request] = []  # by the number of the row, as are the stops
        stops: list[_EndOfRow] = []

        def admit(joining: Sequence[Request]) -> tuple[list[Session], list[Newcomer]]:
            sessions = [self._session(request.prompt) for request in joining]
            own = [
                _EndOfRow(request, session.stops[0], session.max_lengths[0])
                for request, session in zip(joining, sessions, strict=True)
            ]
            requests.extend(joining)
            stops.extend(own)
            return sessions, [self._row(session, stop) for session, stop in zip(sessions, own, strict=True)]

        sessions, first = admit(batch)
        stages, setting = sessions[0].stages, sessions[0].setting
        with adaptive_for(stages, setting, sampled=False) if setting.weighs else nullcontext() as adaptive:
            steps = decode(
                stages,
                [row.prompt for row in first],
                [row.sampler for row in first],
                [row.stop for row in first],
                drafter=drafter_for(setting, adaptive=adaptive),
                max_length=[row.max_length for row in first],
                cache=stages.new_cache(max(len(row.prompt) for row in first) + 256),
                admit=(lambda going: admit(worker.join(going))[1]) if self.continuous else None,
            )
            for step in steps:
                worker.emit(requests[step.row], step.tokens[0].tolist(), stops[step.row].ended)

    def _session(self, prompt: Sequence[int]) -> Session:
        """transformers' own preparation of a request by itself."""
        ids = torch.tensor([prompt], device=self.model.device)
        mask = torch.ones_like(ids)
        return prepare_session(self.model, ids, vars(self.setting), Choice(), attention_mask=mask, **self.arguments)

    def _row(self, session: Session, stop: Stop) -> Newcomer:
        own = session.samplers[0]
        sampler = own if own.reads_prefix else self._sampler  # those that share one are processed together
        return Newcomer(session.input_ids[0], session.max_lengths[0], sampler, stop)


class _EndOfRow:
    """A `Stop` that remembers whether it ended the row, and ends it when nobody waits for it any more."""

    def __init__(self, request: Request, stop: Stop, max_length: int) -> None:
        self.request, self.stop, self.max_length = request, stop, max_length
        self.ended = False

    def __call__(self, committed: Tensor, new: Tensor) -> tuple[int, bool]:
        kept, finished = self.stop(committed, new)
        finished = finished or self.request.timed_out
        self.ended = finished or committed.shape[1] + kept >= self.max_length
        return kept, finished


class PlainEngine:
    """transformers' `generate` on a left-padded batch: nobody joins, and rows that have ended are computed on until
    the last one has."""

    def __init__(self, model: PreTrainedModel, arguments: dict[str, Any]) -> None:
        self.model, self.arguments = model, arguments

    def __call__(self, batch: Sequence[Request], worker: Worker) -> None:
        config = self.model.generation_config
        ids, mask = pad_left([request.prompt for request in batch], config.pad_token_id or 0)
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        streamer = _RowStreamer(batch, worker, ends, self.arguments["max_new_tokens"])
        self.model.generate(  # type: ignore[operator]
            ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            streamer=streamer,
            stopping_criteria=StoppingCriteriaList([_NobodyWaits(batch)]),
            **self.arguments,
        )


class _RowStreamer(BaseStreamer):
    """Hands the rows' tokens out as they come."""

    def __init__(
        self, batch: Sequence[Request], worker: Worker, ends: Sequence[int | None], max_new_tokens: int
    ) -> None:
        self._going = list(enumerate(batch))
        self._worker, self._ends, self._max_new_tokens = worker, ends, max_new_tokens

    def put(self, value: Tensor) -> None:
        """(B,) tokens; `generate` first puts the prompts, (B, length)."""
        if value.dim() == 2:
            return
        tokens, going = value.tolist(), []
        for row, request in self._going:
            ended = tokens[row] in self._ends or len(request.tokens) + 1 >= self._max_new_tokens
            self._worker.emit(request, [tokens[row]], ended)
            if not ended and not request.timed_out:
                going.append((row, request))
        self._going = going

    def end(self) -> None:
        """Nothing is held back."""


class _NobodyWaits(StoppingCriteria):
    """Ends rows whose request has timed out."""

    def __init__(self, batch: Sequence[Request]) -> None:
        self._batch = batch

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.tensor([request.timed_out for request in self._batch], device=input_ids.device)
