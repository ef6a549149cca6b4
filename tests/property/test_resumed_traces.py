"""An answer that another engine had begun goes on as if nothing had happened, whatever its sampling and wherever it was
interrupted: tokens, text, log-probabilities, counts and reason of the end."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.engine.sample.text import TextStream
from localrun.wire import Delta, Finish, Grammar, GrammarKind, Resume, Sampling, Submit
from tests.depth import DEPTH
from tests.engine.harness import Harness
from tests.engine.speculate.drafters import drafting
from tests.fakes.tokens import CONTROL

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 9),
    repeat_penalty=st.sampled_from([1.0, 1.2]),
    penalty_last_n=st.sampled_from([4, 64]),
    mirostat=st.sampled_from([0, 2]),
)
grammars = st.sampled_from(
    [
        None,
        Grammar(GrammarKind.REGEX, "[a-f]{1,9}"),
        Grammar(GrammarKind.REGEX, "[a-f]{2,4}", triggers=("e", "a")),
        Grammar(GrammarKind.REGEX, "(é| |[a-z]){3,30}"),
    ]
)
submits = st.builds(
    Submit,
    id=st.just(1),
    sampling=samplings,
    n_predict=st.integers(0, 24),
    stop=st.sampled_from([(), ("e",), ("ab", " é", "a b"), ("zz",)]),
    ignore_eos=st.booleans(),
    logprobs=st.booleans(),
    n_probs=st.integers(0, 2),
    grammar=grammars,
    show_control=st.booleans(),
    arrived_at_s=st.just(1.0),
    deadline_s=st.sampled_from([None, 0.000001]),
)
_NAMES = {token: name.encode() for name, token in CONTROL.items()}
prompts = st.binary(min_size=1, max_size=40).map(list)


class Answer:
    """All that was said to a request, one delta after the other."""

    def __init__(self, deltas: list[Delta]) -> None:
        self.tokens = [token for delta in deltas for token in delta.tokens]
        self.text = "".join(delta.text for delta in deltas)
        self.logprobs = [one for delta in deltas for one in delta.logprobs or []]
        last = deltas[-1]
        self.end = (last.finish, last.stop_text, last.error_code, last.n_output)
        assert last.usage is not None
        self.counts = last.usage.n_prompt, last.usage.n_output

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and vars(self) == vars(other)


def deltas_of(submit: Submit, prompt: list[int], *, n_tokens: float = math.inf, **shape: object) -> list[Delta]:
    """What a new engine says to a request, until it ends or has so many tokens."""
    harness = Harness(max_queue=1, **shape)  # type: ignore[arg-type]
    harness.now_s = 4.0
    harness.engine.submit(submit, list(prompt))
    found: list[Delta] = []
    while submit.id not in harness.finals and sum(len(delta.tokens) for delta in found) < n_tokens:
        step = harness.step()
        found += [delta for delta in step.deltas if delta.id == submit.id] if step is not None else []
    if submit.id in harness.finals:
        harness.run()
        assert harness.backend.n_open_samplers == 0, "a sampler leaked"
    return found


def unfinished(deltas: list[Delta], submit: Submit) -> Delta:
    """The same without the end, and without the text that came because of it."""
    text = TextStream(submit.stop)
    whole = Answer(deltas)
    last = deltas[-1]
    shown = [
        _NAMES.get(token, b"") if token > 255 and submit.show_control else bytes([token]) for token in whole.tokens
    ]
    said = "".join(map(text.feed, shown))
    return Delta(submit.id, last.phase, 0, last.n_output, said, whole.tokens, whole.logprobs, mu=mu_of(deltas))


def mu_of(deltas: list[Delta]) -> float | None:
    return next((delta.mu for delta in reversed(deltas) if delta.tokens), None)


@given(submits, prompts, st.integers(0, 24), st.booleans(), st.none() | st.integers(0, 1 << 20))
@settings(max_examples=150 * DEPTH)
def test_an_answer_goes_on_as_it_would_have(
    submit: Submit, prompt: list[int], n_before: int, is_split: bool, drafts_seed: int | None
):
    """Both engines may draft: the first one is then interrupted behind a step of several tokens."""
    speculation = None if drafts_seed is None else drafting(drafts_seed, 0.7)
    unhurried = Submit(**{name: getattr(submit, name) for name in submit.__struct_fields__} | {"deadline_s": None})
    whole = deltas_of(unhurried, prompt)
    before = deltas_of(unhurried, prompt, n_tokens=n_before, speculation=speculation) if n_before else []
    if before and before[-1].finish is not None:
        before = [unfinished(before, unhurried)]
    output = [token for delta in before for token in delta.tokens]
    resume = Resume(
        tuple(output), 0, 1.5 if output else None, 2.0 if output else None, 3.0 if output else None, mu_of(before)
    )
    resumed = Submit(**{name: getattr(submit, name) for name in submit.__struct_fields__} | {"resume": resume})
    after = deltas_of(resumed, prompt, is_split=is_split, speculation=speculation)
    if Answer(whole).end[0] is Finish.ERROR:
        return
    got, expected = Answer([*before, *after]), Answer(whole)
    assert vars(got) == vars(expected)
    usage = after[-1].usage
    assert usage is not None
    if output:
        assert (usage.queued_s, usage.prefill_s) == (0.5, 0.5)
        assert usage.decode_s >= 1.0
