"""What a runner keeps of the scheduler's words, in the V1 and the V2 dialect."""

from neuron_push.emulation.requests import Requests
from tests.emulation import kit

PROMPT = kit.prompt(40)


def table(size=16, window=0):
    return Requests((size,), (window,))


def test_a_new_request_has_no_context():
    (piece,) = table().update(kit.output(new=[("r", PROMPT, [4, 5, 6], 0)], scheduled={"r": 40}))
    assert piece.context is None and (piece.start, piece.count) == (0, 40)
    assert piece.blocks[0].tolist() == [4] * 16 + [5] * 16 + [6] * 8


def test_kv_that_was_not_computed_here_is_context_once():
    requests = table()
    (piece,) = requests.update(kit.output(new=[("r", PROMPT, [4, 5, 6], 39)], scheduled={"r": 1}))
    first, blocks = piece.context
    assert first == 0 and len(blocks[0]) == 39
    (piece,) = requests.update(kit.output(cached=[("r", None, 40)], scheduled={"r": 1}))
    assert piece.context is None


def test_new_blocks_are_appended():
    requests = table()
    requests.update(kit.output(new=[("r", PROMPT, [4], 0)], scheduled={"r": 16}))
    (piece,) = requests.update(kit.output(cached=[("r", [9, 8], 16)], scheduled={"r": 24}))
    assert piece.blocks[0].tolist() == [9] * 16 + [8] * 8


def test_v1_resumes_with_a_new_table_and_all_tokens():
    requests = table()
    (old,) = requests.update(kit.output(new=[("r", PROMPT, [4, 5, 6], 0)], scheduled={"r": 40}))
    longer = [*PROMPT, 77]
    (piece,) = requests.update(
        kit.output(cached=[("r", [7, 8, 9], 0, longer)], scheduled={"r": 41})
    )
    assert piece.state is not old.state and piece.state.tokens == longer
    assert piece.blocks[0][0] == 7 and piece.context is None
    assert piece.state.prompt == len(PROMPT)


def test_v2_resumes_as_a_new_request():
    requests = table()
    requests.update(kit.output(new=[("r", PROMPT, [4, 5, 6], 0)], scheduled={"r": 40}))
    requests.update(kit.output(preempted=["r"]))
    assert requests.states == {}


def test_a_rewound_request_reads_its_context_again():
    requests = table()
    requests.update(kit.output(new=[("r", PROMPT, [4, 5, 6], 0)], scheduled={"r": 40}))
    (piece,) = requests.update(kit.output(cached=[("r", None, 16)], scheduled={"r": 24}))
    first, blocks = piece.context
    assert first == 0 and len(blocks[0]) == 16


def test_finished_requests_are_forgotten():
    requests = table()
    requests.update(kit.output(new=[("r", PROMPT, [4, 5, 6], 0)], scheduled={"r": 40}))
    requests.update(kit.output(finished=["r"]))
    assert requests.states == {}


def test_a_sliding_group_has_context_inside_its_window_only():
    (piece,) = table(window=20).update(
        kit.output(new=[("r", PROMPT, [4, 5, 6], 39)], scheduled={"r": 1})
    )
    assert piece.context[1][0].tolist() == [0] * 20 + [5] * 12 + [6] * 7
