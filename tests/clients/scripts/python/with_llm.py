"""`llm` with `llm-ollama`: what its command line does, through the same Python calls."""

from __future__ import annotations

import base64
import json
import os

from checks import FAKE_URL, PICTURE, QUESTION, SCHEMA, URL, assert_cancelled, long_reply, raises, run, says, says_call

os.environ["OLLAMA_HOST"] = FAKE_URL
os.environ["LLM_USER_PATH"] = os.path.join(os.environ["HOME"], "llm")

import llm
from click.testing import CliRunner
from llm.cli import cli


def look(city: str, warm: bool) -> str:
    """Look the weather up."""
    return says(f"{city}: {'warm' if warm else 'cold'}")


def model(name: str, url: str = FAKE_URL) -> llm.Model:
    os.environ["OLLAMA_HOST"] = url
    return llm.get_model(f"ollama/{name}")


def check_models() -> None:
    listed = CliRunner().invoke(cli, ["models", "list"]).output
    for name in ("tiny", "caller"):
        assert f"ollama/{name}" in listed, listed
    assert "ollama/bert" not in listed, "an encoder cannot chat"
    assert "ollama/bert" in CliRunner().invoke(cli, ["embed-models", "list"]).output


def check_chat() -> None:
    response = model("tiny", URL).prompt(QUESTION, stream=False, temperature=0, num_predict=8)
    assert response.text()
    usage = response.usage()
    assert usage.input
    assert usage.output


def check_stream() -> None:
    assert "".join(model("caller").prompt(says("some words"))) == "some words"


def check_conversation() -> None:
    talk = model("tiny", URL).conversation()
    first = talk.prompt(QUESTION, temperature=0, num_predict=8)
    first.text()
    second = talk.prompt("And then?", temperature=0, num_predict=8)
    second.text()
    assert (second.usage().input or 0) > (first.usage().input or 0)


def check_tools() -> None:
    chain = model("caller").chain(says_call("look", {"city": "Paris", "warm": False}), tools=[look])
    assert chain.text().endswith("Paris: cold")


def check_structured_output() -> None:
    assert set(json.loads(model("tiny", URL).prompt(QUESTION, schema=SCHEMA, temperature=0).text())) == {"city", "warm"}


def check_embeddings() -> None:
    os.environ["OLLAMA_HOST"] = URL
    assert len(llm.get_embedding_model("ollama/bert").embed("the cat")) == 64
    assert [len(vector) for vector in llm.get_embedding_model("ollama/bert").embed_multi(["one", "two"])] == [64, 64]


def check_cancel() -> None:
    pieces = iter(model("caller").prompt(long_reply()))
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    del pieces
    assert_cancelled(FAKE_URL)


def check_errors() -> None:
    with raises(llm.UnknownModelError):
        model("nowhere")
    with raises(Exception) as bad:
        model("tiny", URL).prompt("x", top_p=0.5, num_ctx=-5).text()
    assert "num_ctx" in str(bad[0])


def check_picture() -> None:
    picture = llm.Attachment(type="image/png", content=base64.b64decode(PICTURE))
    blind, seeing = (
        model("gemma3", URL).prompt("what?", attachments=attachments, stream=False, temperature=0, num_predict=4)
        for attachments in ([], [picture])
    )
    assert seeing.usage().input > blind.usage().input


if __name__ == "__main__":
    run(globals())
