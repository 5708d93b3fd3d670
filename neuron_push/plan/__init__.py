"""From a token range and two geometries to copies: pure, vectorised, address-free until bound.

assign   which prefill rank provides which heads and layers of a decode rank
pair     what one pair of ranks computes once; refuses pairs that cannot talk directly
PairPlan.copies   the copies of a token range, from both block lists
bind     addresses, with every range checked against its region
"""

from neuron_push.plan.assign import Ask, assign
from neuron_push.plan.blocks import Blocks, decode_runs, encode_runs
from neuron_push.plan.copies import Copies, bind
from neuron_push.plan.pair import MIN_RUN, Description, PairPlan, pair

__all__ = [
    "MIN_RUN",
    "Ask",
    "Blocks",
    "Copies",
    "Description",
    "PairPlan",
    "assign",
    "bind",
    "decode_runs",
    "encode_runs",
    "pair",
]
