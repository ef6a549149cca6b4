from __future__ import annotations

from typing import Any

from localrun.engine.detokenize import TextStream
from localrun.engine.fake import FakeBackend
from localrun.engine.policy import AGING_S, OUTPUT_WEIGHT, STARVED_S, Policy
from localrun.engine.request import Request
from localrun.wire import Lane, Sampling

BACKEND = FakeBackend(n_cells=256, n_seqs=4, n_batch=64)


def request(request_id: int, **fields: Any) -> Request:
    sampler = BACKEND.sampler(Sampling(), ignore_eos=True)
    return Request(request_id, [1], 1, 10, sampler, TextStream(()), **fields)


def ids(requests: list[Request]) -> list[int]:
    return [request.id for request in requests]


def policy_of(*waiting: Request) -> Policy:
    policy = Policy()
    for one in waiting:
        policy.enter(one.client)
    return policy


def test_lanes_come_before_arrival():
    waiting = [
        request(1, lane=Lane.BATCH, arrived_at_s=0.0),
        request(2, lane=Lane.DEFAULT, arrived_at_s=1.0),
        request(3, lane=Lane.INTERACTIVE, arrived_at_s=2.0),
        request(4, lane=Lane.INTERACTIVE, arrived_at_s=1.5),
    ]
    assert ids(policy_of(*waiting).order(waiting, 3.0)) == [4, 3, 2, 1]


def test_the_client_with_less_service_goes_first_in_a_lane():
    waiting = [request(1, client="busy", arrived_at_s=0.0), request(2, client="quiet", arrived_at_s=5.0)]
    policy = policy_of(*waiting)
    assert ids(policy.order(waiting, 6.0)) == [1, 2]
    policy.charge("busy", n_prefill=3, n_output=2)
    policy.charge("quiet", n_prefill=2 * OUTPUT_WEIGHT + 2, n_output=0)
    assert policy.service("busy") == 3 + 2 * OUTPUT_WEIGHT
    assert ids(policy.order(waiting, 6.0)) == [2, 1]


def test_waiting_lifts_a_request_lane_by_lane_and_no_further():
    old, new = request(1, lane=Lane.BATCH, arrived_at_s=0.0), request(2, lane=Lane.INTERACTIVE, arrived_at_s=39.0)
    policy = policy_of(old, new)
    assert ids(policy.order([old, new], 2 * AGING_S - 0.1)) == [2, 1]
    assert ids(policy.order([old, new], 2 * AGING_S)) == [1, 2]
    older = request(3, lane=Lane.INTERACTIVE, client="heavy", arrived_at_s=0.0)
    policy.enter("heavy")
    policy.charge("heavy", n_prefill=1, n_output=0)
    assert ids(policy.order([older, new], STARVED_S - 1)) == [2, 3], "past the first lane only service counts"


def test_a_client_that_comes_back_or_is_new_has_no_credit_saved_up():
    policy = Policy()
    for client in ("always", "sometimes"):
        policy.enter(client)
    policy.charge("always", n_prefill=100, n_output=0)
    policy.charge("sometimes", n_prefill=10, n_output=0)
    policy.leave("sometimes")
    policy.charge("always", n_prefill=100, n_output=0)
    for client in ("sometimes", "new"):
        policy.enter(client)
        assert policy.service(client) == 200


def test_one_that_left_with_more_service_than_the_others_keeps_it():
    policy = Policy()
    for client in ("greedy", "modest"):
        policy.enter(client)
    policy.charge("greedy", n_prefill=500, n_output=0)
    policy.leave("greedy")
    policy.enter("greedy")
    assert policy.service("greedy") == 500


def test_all_accounts_close_when_nobody_is_left():
    policy = Policy()
    for _ in range(2):
        policy.enter("one")
    policy.charge("one", n_prefill=500, n_output=0)
    policy.leave("one")
    assert policy.service("one") == 500, "its other request is still there"
    policy.leave("one")
    assert policy.service("one") == 0
    policy.enter("one")
    assert policy.service("one") == 0


def test_the_victim_is_the_youngest_of_the_lowest_lane():
    running = [
        request(1, lane=Lane.BATCH, arrived_at_s=1.0),
        request(2, lane=Lane.BATCH, arrived_at_s=2.0),
        request(3, lane=Lane.INTERACTIVE, arrived_at_s=9.0),
    ]
    assert Policy().victim(running).id == 2
    assert Policy().victim(running[2:]).id == 3


def test_after_long_waiting_neither_lanes_nor_service_count():
    served = request(1, client="served", lane=Lane.BATCH, arrived_at_s=0.0)
    new = request(2, client="new", lane=Lane.INTERACTIVE, arrived_at_s=STARVED_S - 1)
    policy = policy_of(served, new)
    policy.charge("served", n_prefill=10_000, n_output=0)
    assert ids(policy.order([served, new], STARVED_S - 0.1)) == [2, 1]
    assert ids(policy.order([served, new], STARVED_S)) == [1, 2]
