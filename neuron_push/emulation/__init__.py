"""A real vLLM engine over emulated devices: KV in host memory, compute replaced by a cost model.

options      what is emulated, from one environment variable
plugin       vLLM platform plugin; does nothing unless that variable is set
platform     vLLM's CPU platform with async scheduling and the device's block size
devices      trn2, p5en, cpu: how each keeps its KV cache
layers       attention layers without weights, and their cache specs
fill         writes many slots in one compiled call
memory       host tensors in a device's layout, and the views that reach every slot
pattern      what a KV slot must hold, and tokens from what it does hold
oracle       fills slots, reads them back, reports every wrong byte
writer       the thread that stands for the device: bytes appear after their launch
requests     what the scheduler has told about each request
sampling     log-probabilities, and tokens that a grammar allows
runners      hook order of vLLM's V2, V1 and CPU model runners
worker       the vLLM worker class
accelerator  host memory with the fences of the writer
cost         modelled durations, profiles with their sources
link         the cost model's network under real WRITEs
report       what a worker has seen, as files
environments pythons with other versions of vLLM, made on demand
fleet        fleets as a file describes them
network      namespaces and shaped links around a fleet
relay        the host's way into a namespace
command      `neuron-push emulate`

Only `platform`, `layers`, `runners` and `worker` import vLLM.
"""

VARIABLE = "NEURON_PUSH_EMULATE"
WORKER = "neuron_push.emulation.worker.EmulatedWorker"
