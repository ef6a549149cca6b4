"""A child process that speaks the engine's protocol, sees and hears, and says what it was given. Run by tests only.

Its answer is the prompt as JSON: a list of texts, and of what each picture or recording is, with the SHA-256 of the
file's bytes. A prompt with the word "die" ends it, unless the request goes on from another engine. The first argument
says what it takes: "image", "audio", "image,audio" or "nothing".
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from localrun import framing, wire

N_TOKENS_OF_MEDIA = 7


def _told(segment: wire.Segment) -> object:
    if segment.media is None:
        return segment.text if segment.trusted else {"untrusted": segment.text}
    media = segment.media
    data = Path(media.path).read_bytes()
    sizes = [media.width, media.height] if media.kind is wire.MediaKind.IMAGE else [media.n_samples]
    return {str(media.kind): sizes, "sha256": hashlib.sha256(data).hexdigest(), "digest": media.digest.hex()}


def _n_tokens(segments: tuple[wire.Segment, ...]) -> int:
    return sum(len(segment.text.encode()) if segment.media is None else N_TOKENS_OF_MEDIA for segment in segments)


def _send(message: object) -> None:
    sys.stdout.buffer.write(framing.encode(message))
    sys.stdout.buffer.flush()


def _answer(asked: wire.Submit) -> None:
    n_prompt = _n_tokens(asked.segments)
    dies = asked.resume is None and any("die" in segment.text for segment in asked.segments)
    if dies:
        half = wire.Delta(asked.id, wire.Phase.DECODE, n_prompt, 1, text="half ", tokens=[65])
        started = [wire.Started(asked.id, 0, n_prompt, 0, time.monotonic())]
        _send(wire.Step(sent_at_s=time.monotonic(), deltas=[half], stats=wire.StepStats(*[0] * 15), started=started))
        os.kill(os.getpid(), signal.SIGKILL)
    said = json.dumps([_told(segment) for segment in asked.segments] if asked.tokens is None else list(asked.tokens))
    usage = wire.Usage(n_prompt, 0, 2, 0.0, 0.1, 0.1)
    end = wire.Delta(asked.id, wire.Phase.DONE, n_prompt, 2, text=said, tokens=[65, 66], finish=wire.Finish.STOP,
                     usage=usage)  # fmt: skip
    started = [wire.Started(asked.id, 0, n_prompt, 0, time.monotonic())]
    _send(wire.Step(sent_at_s=time.monotonic(), deltas=[end], stats=wire.StepStats(*[0] * 15), started=started))


def main(takes: str) -> None:
    assert isinstance(framing.decode_to_engine(framing.read_body(sys.stdin.buffer) or b""), wire.Open)
    kinds = tuple(wire.MediaKind(kind) for kind in takes.split(",") if kind != "nothing")
    _send(wire.Ready(
        n_ctx=4096, n_ctx_train=4096, n_vocab=258, n_slots=2, n_kv_cells=8192, n_threads=1, n_gpu_layers=0,
        model_size_bytes=0, kv_size_bytes=0, load_s=0.0, backend="scripted", media=kinds,
        control_tokens=("<|im_start|>", "<|im_end|>"), audio_rate_hz=16000 if wire.MediaKind.AUDIO in kinds else 0,
    ))  # fmt: skip
    while (body := framing.read_body(sys.stdin.buffer)) is not None:
        message = framing.decode_to_engine(body)
        if isinstance(message, wire.Submit):
            _answer(message)
        elif isinstance(message, wire.Count):
            _send(wire.Counted(id=message.id, tokens=(-5,) * _n_tokens(message.segments)))


if __name__ == "__main__":
    main(sys.argv[1])
