"""`neuron-push bench sweep`: TTFT and TPOT of this connector beside vLLM's own, in one run.

columns   what is compared, and which engines each needs
cells     input lengths x rates, and the order of runs
engines   the fleets of a run: started, paused, stopped
proxy     sends both legs of a request the same way for every column; a process of its own
load      `vllm bench serve`, kept loaded in a process of its own
results   result files: written once, read again
measure   one run: load, moments, reports
command   the whole sweep
plot      charts
statistics medians, and paired intervals of ratios
claims    what must hold (claims.yaml), and whether it does
report    one page of all of it, and its check
"""
