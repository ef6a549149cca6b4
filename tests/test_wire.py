from __future__ import annotations

import io
import math

import pytest

from localrun import framing, wire
from localrun.wire import (
    Cancel,
    ChosenLogprob,
    Count,
    Counted,
    Delta,
    Finish,
    Lane,
    Open,
    OpenFailed,
    Phase,
    Ready,
    Sampling,
    Segment,
    Started,
    Step,
    StepStats,
    Submit,
    TokenLogprob,
    Usage,
)

OPEN = Open(
    model_path="/models/é.gguf",
    n_slots=8,
    n_kv_cells=4096,
    n_batch=512,
    n_threads=0,
    n_gpu_layers=-1,
    kv_type="f16",
    target_itl_s=0.1,
    ram_cache_bytes=1 << 40,
    max_queue=256,
)
SUBMIT = Submit(
    id=2**40,
    segments=(Segment("<|im_start|>"), Segment("typed 🦊", trusted=False)),
    sampling=Sampling(temperature=0.5, seed=-1, logit_bias=((5, -math.inf),)),
    n_predict=-1,
    stop=("\n\n",),
    lane=Lane.BATCH,
    client="editor",
)
READY = Ready(
    n_ctx=1,
    n_ctx_train=2,
    n_vocab=3,
    n_slots=4,
    n_kv_cells=5,
    n_threads=6,
    n_gpu_layers=7,
    model_size_bytes=8,
    kv_size_bytes=9,
    load_s=0.5,
    backend="fake",
    control_tokens=("<|im_end|>",),
)
STEP = Step(
    sent_at_s=1.5,
    deltas=[
        Delta(1, Phase.DECODE, 10, 3, text="né", tokens=[5, 6]),
        Delta(
            2,
            Phase.DONE,
            10,
            3,
            logprobs=[ChosenLogprob(5, b"\xff", -0.5, (TokenLogprob(6, b"a", -1.0),))],
            finish=Finish.STOP,
            stop_text="\n\n",
            usage=Usage(4, 2, 3, 0.1, 0.2, 0.3),
        ),
    ],
    stats=StepStats(1, 0.01, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14),
    started=[Started(1, 0, 4, 2)],
    queue=[7, 8],
)


@pytest.mark.parametrize(
    "message", [OPEN, SUBMIT, Submit(id=1, tokens=(1, 2)), Cancel(3), Count(id=4, segments=(Segment("a"),))]
)
def test_what_the_daemon_sends_arrives_as_it_was(message: wire.ToEngine):
    assert framing.decode_to_engine(framing.read_body(io.BytesIO(framing.encode(message)))) == message


@pytest.mark.parametrize(
    "message",
    [
        READY,
        OpenFailed(code="bad_model_file", message="no"),
        Counted(id=4, tokens=(1, 2)),
        Counted(id=5, error="x", error_code="queue_full", retry_after_s=1.0),
        STEP,
    ],
)
def test_what_the_engine_sends_arrives_as_it_was(message: wire.FromEngine):
    assert framing.decode_from_engine(framing.read_body(io.BytesIO(framing.encode(message)))) == message


def test_half_a_surrogate_pair_never_gets_into_the_pipe():
    with pytest.raises(UnicodeEncodeError):
        framing.encode(Count(id=1, segments=(Segment("\ud800"),)))


def test_a_step_of_eight_streams_is_small():
    deltas = [Delta(request_id, Phase.DECODE, 1000, 100, text=" word", tokens=[1234]) for request_id in range(8)]
    assert len(framing.encode(Step(sent_at_s=1.5, deltas=deltas, stats=STEP.stats))) < 500


def test_deltas_do_not_share_their_default_list():
    one, other = Delta(1, Phase.DECODE, 0, 0), Delta(2, Phase.DECODE, 0, 0)
    one.tokens.append(5)
    assert other.tokens == []
