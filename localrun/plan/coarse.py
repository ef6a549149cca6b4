"""A replica by requests instead of steps, for fleets of hundreds: slots, one prompt at a time, streams that share.

Prompts are computed one after the other; while one is, streams get a step every `target_itl_s`, and the prompt the time
between. Without a prompt, streams step as fast as they can. What changes that is an arrival, the end of a prompt or the
end of an answer, and between two of these everything goes on evenly. The cache remembers whole prompts and answers by
their parts, the last used first, for as many tokens as its memory has.

Does not: know lanes, batches, or a prompt's parts that are computed with the streams.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from localrun.bench.arrivals import Turn
from localrun.bench.results import StreamRecord
from localrun.plan.costs import Account, VirtualClock
from localrun.plan.replica import Arrival, Setup


class _Request:
    def __init__(self, arrival: Arrival, record: StreamRecord) -> None:
        self.arrival, self.record = arrival, record
        self.turn: Turn = arrival.session.turns[arrival.turn]
        self.left = 0.0  # seconds of its prompt, then tokens of its answer


class CoarseReplica:
    """See the module; the same face as `replica.Replica` for a fleet."""

    def __init__(self, setup: Setup) -> None:
        self.clock = VirtualClock()
        self.records: list[StreamRecord] = []
        self.on_turn: Callable[[Arrival], None] = self.arrive
        self._layout, self._costs = setup.layout, setup.costs
        self._target_s = setup.target_itl_s
        self._next_s, self._interval_s, self._prompt_share = math.inf, 0.0, 1.0
        self._waiting: deque[_Request] = deque()
        self._prompts: deque[_Request] = deque()
        self._streams: list[_Request] = []
        n_ram = setup.ram_cache_bytes // max(1, setup.layout.state_token_bytes)
        self._most_tokens = setup.layout.n_cells + n_ram
        self._kept: OrderedDict[tuple[str, ...], int] = OrderedDict()
        self._n_kept = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._prompts or self._streams)

    @property
    def next_s(self) -> float:
        """When something changes by itself."""
        return self._next_s

    @property
    def running(self) -> list[tuple[StreamRecord, Turn]]:
        return [(each.record, each.turn) for each in (*self._waiting, *self._prompts, *self._streams)]

    @property
    def n_running(self) -> int:
        return len(self._waiting) + len(self._prompts) + len(self._streams)

    def arrive(self, arrival: Arrival) -> None:
        """Now: it has come to this time."""
        self._go_on(max(arrival.at_s, self.clock.now_s))
        turn = arrival.session.turns[arrival.turn]
        record = StreamRecord(
            intended_at_s=arrival.at_s, sent_at_s=arrival.at_s, client=turn.client, lane=turn.lane, status=200
        )
        self.records.append(record)
        self._waiting.append(_Request(arrival, record))
        self._start()
        self._look_ahead()

    def advance(self, until_s: float) -> None:
        """To the next change, which is not after `until_s`."""
        self._go_on(self._next_s)
        if self._prompts and self._prompts[0].left <= 1e-9:
            self._begin_answer(self._prompts.popleft())
        for each in [each for each in self._streams if each.left <= 1e-6]:
            self._end(each)
        self._look_ahead()

    def _go_on(self, until_s: float) -> None:
        passed_s = until_s - self.clock.now_s
        if passed_s <= 0:
            return
        is_busy = self.is_busy
        self.clock.spend(passed_s, Account.DECODE if self._streams else Account.PROMPTS if is_busy else Account.IDLE)
        if self._prompts:
            self._prompts[0].left -= passed_s * self._prompt_share
        for each in self._streams:
            each.left -= passed_s / self._interval_s

    def _look_ahead(self) -> None:
        self._interval_s, self._prompt_share = self._pace()
        now_s, self._next_s = self.clock.now_s, math.inf
        if self._prompts:
            self._next_s = now_s + max(0.0, self._prompts[0].left) / self._prompt_share
        if self._streams:
            least = min(each.left for each in self._streams)
            self._next_s = min(self._next_s, now_s + max(0.0, least) * self._interval_s)

    def _pace(self) -> tuple[float, float]:
        """Seconds between two steps of the streams, and the share of the time that the first prompt has."""
        if not self._streams:
            return 0.0, 1.0
        step_s = self._step_s(self._streams)
        if not self._prompts:
            return step_s, 0.0
        waits = self._costs.waits
        beside_s = step_s + (waits.extra_s(waits.batches_s[-1], 0.5) if waits else 0.0)
        interval_s = max(self._target_s, 2 * beside_s)
        return interval_s, 1 - beside_s / interval_s

    def _step_s(self, streams: Sequence[_Request]) -> float:
        costs, n = self._costs, len(streams)
        tokens = sum(each.turn.n_prompt + each.turn.n_output / 2 for each in streams)
        return costs.streams.step_s(n, tokens) + costs.host_s + n * (costs.host_row_s + costs.delta_s)

    def _start(self) -> None:
        while self._waiting and len(self._streams) + len(self._prompts) < self._layout.slots:
            request = self._waiting.popleft()
            record, turn = request.record, request.turn
            record.n_prompt = turn.n_prompt
            record.n_cached = min(self._known(turn), turn.n_prompt - 1)
            n_new, depth = record.n_prompt - record.n_cached, record.n_cached
            while n_new > 0:
                n_rows = min(n_new, self._layout.n_batch)
                request.left += self._costs.background.batch_s(n_rows, depth)
                n_new, depth = n_new - n_rows, depth + n_rows
            self._prompts.append(request)

    def _begin_answer(self, request: _Request) -> None:
        # The last token of a prompt is computed with the streams.
        step_s = self._step_s([*self._streams, request])
        request.record.arrivals_s.append(self.clock.now_s + self._costs.request_s + step_s)
        request.left = float(request.turn.n_output - 1)
        self._streams.append(request)
        if request.left <= 0:
            self._end(request)

    def _end(self, request: _Request) -> None:
        self._streams.remove(request)
        record, turn = request.record, request.turn
        now_s, first_s = self.clock.now_s, record.arrivals_s[0]
        record.arrivals_s.append(max(now_s, first_s))
        record.ended_at_s, record.n_output = record.arrivals_s[-1], turn.n_output
        self._keep(turn)
        arrival = request.arrival
        if arrival.turn + 1 < len(arrival.session.turns):
            later = arrival.session.turns[arrival.turn + 1]
            self.on_turn(arrival._replace(at_s=now_s + later.think_s, turn=arrival.turn + 1))
        self._start()

    def _known(self, turn: Turn) -> int:
        """Tokens of its beginning that are in the cache."""
        names = tuple(name for name, _ in turn.parts)
        for n_parts in range(len(names), 0, -1):
            if names[:n_parts] in self._kept:
                self._kept.move_to_end(names[:n_parts])
                return sum(n_tokens for _, n_tokens in turn.parts[:n_parts])
        return 0

    def _keep(self, turn: Turn) -> None:
        names = tuple(name for name, _ in turn.parts)
        for n_parts in range(1, len(names) + 1):
            own = turn.parts[n_parts - 1][1]
            if names[:n_parts] not in self._kept:
                self._kept[names[:n_parts]] = own
                self._n_kept += own
            self._kept.move_to_end(names[:n_parts])
        while self._n_kept > self._most_tokens:
            _, n_tokens = self._kept.popitem(last=False)
            self._n_kept -= n_tokens
