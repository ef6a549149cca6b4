from __future__ import annotations

from typing import Any

from localrun.engine.request import Request
from localrun.engine.sample.text import TextStream
from localrun.engine.schedule.policy import AGING_S, OUTPUT_WEIGHT, PREEMPTION_AGE_S, STARVED_S, Policy
from localrun.wire import Lane, Sampling
from tests.fakes.backend import FakeBackend

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


def test_waiting_lifts_a_request_lane_by_lane():
    old, new = request(1, lane=Lane.BATCH, arrived_at_s=0.0), request(2, lane=Lane.INTERACTIVE, arrived_at_s=39.0)
    policy = policy_of(old, new)
    assert [policy.rank(old, age_s) for age_s in (0.0, AGING_S, 2 * AGING_S)] == [2, 1, 0]
    assert ids(policy.order([old, new], 2 * AGING_S - 0.1)) == [2, 1]
    assert ids(policy.order([old, new], 2 * AGING_S)) == [1, 2]
    older = request(3, lane=Lane.INTERACTIVE, client="heavy", arrived_at_s=0.0)
    policy.enter("heavy")
    policy.charge("heavy", n_prefill=1)
    assert ids(policy.order([older, new], STARVED_S - 1)) == [2, 3], "in the first lane only service counts"


def test_whoever_got_nothing_for_long_goes_before_all_lanes():
    starved = request(1, client="served", lane=Lane.BATCH, arrived_at_s=0.0)
    new = request(2, client="new", lane=Lane.INTERACTIVE, arrived_at_s=STARVED_S - 1)
    policy = policy_of(starved, new)
    policy.charge("served", n_prefill=10_000)
    assert ids(policy.order([starved, new], STARVED_S - 0.1)) == [2, 1]
    assert ids(policy.order([starved, new], STARVED_S)) == [1, 2]


def test_a_client_s_own_backlog_makes_none_of_its_requests_old():
    backlog = [request(number, client="hog", arrived_at_s=0.0) for number in range(5)]
    mouse = request(9, client="mouse", arrived_at_s=STARVED_S)
    policy = policy_of(*backlog, mouse)
    policy.charge("hog", n_prefill=1)
    policy.start(backlog[0], STARVED_S - 1)
    assert ids(policy.order([*backlog[1:], mouse], STARVED_S + 1)) == [9, 1, 2, 3, 4]


def test_a_client_s_service_in_one_lane_does_not_make_its_other_lane_young():
    chat, job = request(1, lane=Lane.INTERACTIVE), request(2, lane=Lane.BATCH)
    policy = policy_of(chat, job)
    policy.start(chat, AGING_S)
    assert policy.rank(job, AGING_S) == 1


def test_turns_go_round_among_clients_of_equal_service():
    waiting = [request(number, client="hog", arrived_at_s=0.0) for number in range(3)]
    waiting += [request(number, client="mouse", arrived_at_s=1.0) for number in (10, 11)]
    assert ids(policy_of(*waiting).order(waiting, 2.0)) == [0, 10, 1, 11, 2]


def test_a_running_request_keeps_the_rank_that_it_started_with():
    aged, fresh = request(1, lane=Lane.BATCH, client="a"), request(2, lane=Lane.BATCH, client="b", arrived_at_s=AGING_S)
    policy = policy_of(aged, fresh)
    for one in (aged, fresh):
        policy.start(one, AGING_S)
    assert (aged.rank, fresh.rank) == (1, 2)
    assert policy.outranked([aged, fresh], Lane.BATCH) == []
    assert policy.outranked([aged, fresh], Lane.DEFAULT) == [fresh]
    assert policy.outranked([aged, fresh], Lane.INTERACTIVE) == [aged, fresh], "the lowest rank's youngest goes first"


def test_who_gave_up_a_slot_is_at_the_head_of_its_lane_and_no_further():
    back = request(1, lane=Lane.BATCH, client="heavy", arrived_at_s=0.0)
    batch = request(2, lane=Lane.BATCH, client="light", arrived_at_s=0.0)
    default = request(3, client="light", arrived_at_s=0.0)
    policy = policy_of(back, batch, default)
    policy.start(back, 0.0)
    policy.charge("heavy", n_prefill=1000)
    policy.preempt(back, 1.0)
    assert ids(policy.order([back, batch, default], 2.0)) == [3, 1, 2]


def test_time_spent_running_is_no_waiting():
    one = request(1, lane=Lane.BATCH, arrived_at_s=0.0)
    policy = policy_of(one)
    policy.start(one, 1.0)
    policy.preempt(one, 1000.0)
    assert policy.rank(one, 1001.0) == 2


def test_a_request_is_preempted_a_bounded_number_of_times():
    one = request(1, lane=Lane.BATCH, arrived_at_s=0.0)
    policy = policy_of(one)
    n_preempted, now_s = 0, 0.0
    while True:
        policy.start(one, now_s)
        if not policy.outranked([one], Lane.INTERACTIVE):
            break
        policy.preempt(one, now_s)
        n_preempted += 1
    assert n_preempted == 2 * AGING_S / PREEMPTION_AGE_S


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


def test_the_victim_is_the_youngest_of_the_lowest_rank():
    running = [
        request(1, lane=Lane.BATCH, rank=2, arrived_at_s=1.0),
        request(2, lane=Lane.BATCH, rank=2, arrived_at_s=2.0),
        request(3, lane=Lane.INTERACTIVE, rank=0, arrived_at_s=9.0),
    ]
    assert Policy().victim(running).id == 2
    assert Policy().victim(running[2:]).id == 3


def test_accounts_of_clients_that_left_are_closed_when_everybody_has_had_as_much():
    policy = Policy()
    policy.enter("always")
    for number in range(100):
        policy.enter(f"once {number}")
        policy.charge(f"once {number}", n_prefill=1)
        policy.charge("always", n_prefill=2)
        policy.leave(f"once {number}")
    assert sum(policy.service(f"once {number}") > 0 for number in range(100)) <= 2
