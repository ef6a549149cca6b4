"""The bodies of `/v1/completions` and of `/v1/fim/completions`: prompts that no chat template is put round.

Does not: know the model, or tokenize.
"""

from __future__ import annotations

from collections.abc import Sequence

from localrun.errors import BadRequest
from localrun.server.http import fields
from localrun.server.http.fields import MaxTokens, SamplingFields
from localrun.server.openai.common_fields import MAX_ANSWERS, Choices, CommonFields

Prompt = str | list[int]


class CompletionBody(CommonFields, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | fields.TokenId | list[fields.TokenId]]
    echo: bool | None = None
    logprobs: fields.TopLogprobs | None = None
    best_of: Choices | None = None
    suffix: str | None = None

    @property
    def n_candidates(self) -> int:
        """Answers that are generated for each prompt; the best `n_choices` of them are sent."""
        return self.best_of or self.n_choices

    def check_supported(self) -> None:
        """Raises BadRequest for fields that contradict each other, and for what this build does not do."""
        if self.n_candidates < self.n_choices:
            raise BadRequest(f"best_of: must not be below n ({self.n_choices})", field="best_of")
        if self.stream and self.n_candidates > self.n_choices:
            raise BadRequest("best_of: the best is known at the end only; leave stream or best_of out", field="best_of")
        if self.echo and self.logprobs is not None:
            raise BadRequest(
                "echo: log-probabilities of the prompt are not supported; leave echo or logprobs out", field="echo"
            )
        if self.suffix and self.echo:
            raise BadRequest("echo: not together with suffix; leave one of the two out", field="echo")

    def prompts(self) -> list[Prompt]:
        """The prompts, each as text or as token ids. Raises BadRequest for none, a mixture, and too many."""
        if isinstance(self.prompt, str):
            prompts: list[Prompt] = [self.prompt]
        elif self.prompt and all(isinstance(item, int) for item in self.prompt):
            prompts = [[item for item in self.prompt if isinstance(item, int)]]
        else:
            prompts = [item for item in self.prompt if not isinstance(item, int)]
            if len(prompts) != len(self.prompt) or len({type(item) for item in prompts}) != 1:
                raise BadRequest(
                    "prompt: must be a text, a list of texts, a list of token ids, or a list of such lists, not empty "
                    "and not mixed",
                    field="prompt",
                )
        if not self.suffix and not all(prompts):
            raise BadRequest("prompt: must not be empty", field="prompt")
        for field, is_on in (("echo", self.echo), ("suffix", self.suffix)):
            if is_on and not isinstance(prompts[0], str):
                raise BadRequest(f"{field}: needs prompts that are text, not token ids", field=field)
        if len(prompts) * self.n_candidates > MAX_ANSWERS:
            raise BadRequest(
                f"prompt: {len(prompts)} prompts with {self.n_candidates} answers each are more than {MAX_ANSWERS} "
                f"answers in one request; send several",
                field="prompt",
            )
        return prompts


class FimBody(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/fim/completions, as Mistral has it."""

    model: str
    prompt: str
    suffix: str | None = None
    max_tokens: MaxTokens | None = None
    random_seed: fields.Seed | None = None
    stream: bool | None = None


def check_tokens(prompts: Sequence[Prompt], n_vocab: int) -> None:
    """Raises BadRequest for a token id outside the vocabulary; a text holds none."""
    for prompt in prompts:
        wrong = 0 if isinstance(prompt, str) else max(prompt)
        if wrong >= n_vocab:
            raise BadRequest(f"prompt: {wrong} is not a token of this model, which has {n_vocab}", field="prompt")
