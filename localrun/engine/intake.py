"""From the daemon's message to a request: what is checked before anything runs, and how a refusal looks.

Owner: the engine's main thread. Does not: queue it (`scheduler.py`), or tokenize (`prompt.py`).
"""

from __future__ import annotations

from localrun.engine.backend import Backend
from localrun.engine.request import Request
from localrun.engine.sample import sampling
from localrun.engine.sample.detokenize import TextStream
from localrun.errors import BadRequest, ContextExceeded, LocalrunError, QueueFull
from localrun.wire import Delta, Finish, Phase, Submit, Usage


def check(submit: Submit, tokens: list[int], backend: Backend) -> None:
    """Raises BadRequest or ContextExceeded for what this model cannot do."""
    if not tokens:
        raise BadRequest("the prompt is empty; send at least one token", field="prompt")
    if len(tokens) >= backend.n_ctx:
        raise ContextExceeded(len(tokens), backend.n_ctx)
    sampling.check(submit.sampling, n_vocab=backend.n_vocab)


def new_request(submit: Submit, tokens: list[int], backend: Backend, *, target_itl_s: float) -> Request:
    """A checked message as a request; `target_itl_s` is for those that do not name their own."""
    most = backend.n_ctx - len(tokens)
    return Request(
        id=submit.id,
        tokens=tokens,
        n_prompt=len(tokens),
        max_output=most if submit.n_predict < 0 else min(submit.n_predict, most),
        sampler=backend.sampler(submit.sampling, ignore_eos=submit.ignore_eos),
        text=TextStream(submit.stop),
        client=submit.client,
        lane=submit.lane,
        target_itl_s=target_itl_s if submit.target_itl_s is None else submit.target_itl_s,
        arrived_at_s=submit.arrived_at_s,
        ends_at_eog=not submit.ignore_eos,
        n_probs=submit.n_probs if submit.logprobs else None,
        shows_control=submit.show_control,
    )


def refusal(request_id: int, error: LocalrunError | None, *, n_prompt: int) -> Delta:
    """The first and last that is heard of a request that never starts. Without an error it was cancelled."""
    return Delta(
        id=request_id,
        phase=Phase.DONE,
        n_computed=0,
        n_output=0,
        finish=Finish.CANCELLED if error is None else Finish.ERROR,
        usage=Usage(n_prompt, 0, 0, 0.0, 0.0, 0.0),
        error_code=None if error is None else error.code,
        error_message=None if error is None else error.message,
        retry_after_s=error.retry_after_s if isinstance(error, QueueFull) else None,
    )
