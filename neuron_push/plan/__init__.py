"""From a token range and two geometries to copies: pure, vectorised, address-free until bound.

assign   which prefill rank provides which heads, layers and tokens of a decode rank
stripe   the tokens of one of several replicas
decide   the way a pair of ranks goes: direct, packed by prefill, unpacked by decode, both or none
pair     what a direct pair computes once
staged   what a pair computes once whose pages go through a slab of one side, or of each
*.copies the copies of a token range, from both block lists; StagedPlan.rows the reordering
bind     addresses, with every range checked against its region
"""

from neuron_push.plan.assign import Ask, assign
from neuron_push.plan.blocks import Blocks, decode_runs, encode_runs
from neuron_push.plan.copies import Copies, bind
from neuron_push.plan.pair import MIN_RUN, Description, PairPlan, Way, pair
from neuron_push.plan.staged import StagedPlan
from neuron_push.plan.staging import staged
from neuron_push.plan.stripe import WHOLE, Stripe
from neuron_push.plan.ways import GOOD_RUN, MOST_COPIES, PROMPT, Means, Plan, decide

__all__ = [
    "GOOD_RUN",
    "MIN_RUN",
    "MOST_COPIES",
    "PROMPT",
    "WHOLE",
    "Ask",
    "Blocks",
    "Copies",
    "Description",
    "Means",
    "PairPlan",
    "Plan",
    "StagedPlan",
    "Stripe",
    "Way",
    "assign",
    "bind",
    "decide",
    "decode_runs",
    "encode_runs",
    "pair",
    "staged",
]
