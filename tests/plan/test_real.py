"""What goes to a daemon is what is simulated: the same prompts, clients and lanes, so the same tokens are cached."""

from __future__ import annotations

from localrun.bench.arrivals import ANSWER, Session, Turn, as_sent, send
from localrun.bench.results import Target
from localrun.config import Settings
from localrun.engine.process import SPARE_SEQUENCES
from localrun.plan.replica import prompt_tokens, simulate
from localrun.wire import Lane
from tests.daemon import N_CTX, running_daemon
from tests.plan.made import setup


def talk(name: str, lane: Lane = Lane.DEFAULT) -> tuple[Turn, ...]:
    first = Turn((("system", 150), (f"{name}/0", 60)), 12, 0.0, name, lane, 0.05)
    parts = (*first.parts, (f"{name}/0{ANSWER}", 12), (f"{name}/1", 30))
    return first, Turn(parts, 9, 1.0, name, lane, 0.05)  # what was computed is kept by then, also on a busy machine


SESSIONS = as_sent([Session(0.0, talk("a")), Session(1.0, talk("b", Lane.BATCH)), Session(2.0, talk("c"))])


def test_as_many_tokens_are_cached_as_in_the_simulation():
    # What costs nothing to compute is not worth keeping.
    with running_daemon(LOCALRUN_FAKE_STEP_MS="20") as daemon:
        target = Target("", daemon.url, "tiny")
        sent = send(target, SESSIONS, 1.0, 7, speculates=True)
    usual = Settings()
    own = setup(slots=4, n_cells=N_CTX, n_spare_seqs=SPARE_SEQUENCES, is_split=False, mixes_rows=True)
    own = own._replace(ram_cache_bytes=usual.ram_cache_bytes, target_itl_s=usual.target_itl_s)
    for texts in ({}, sent.texts):
        simulated = simulate(own, SESSIONS, 1.0, texts=texts).records
        for field in ("client", "n_prompt", "n_cached", "n_output"):
            both = [[getattr(each, field) for each in records] for records in (sent.records, simulated)]
            assert both[0] == both[1], field
    assert [record.client for record in sent.records] == ["a", "b", "a", "c", "b", "c"]


def test_what_was_said_is_known_where_it_can_be_drafted():
    with running_daemon() as daemon:
        target = Target("", daemon.url, "tiny")
        plain, drafted = (send(target, SESSIONS[:1], 2.0, 7, speculates=speculates) for speculates in (False, True))
    assert plain.texts == {}
    turn = SESSIONS[0].turns[1]
    assert len(prompt_tokens(turn, drafted.texts)) == turn.n_prompt
    assert prompt_tokens(turn, drafted.texts) != prompt_tokens(turn)
    answer = bytes(drafted.texts["a/1" + ANSWER])  # a token of the fake is a byte
    assert answer.decode() == drafted.records[1].text
