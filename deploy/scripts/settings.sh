# Read by every script here. Override by exporting before the call; one file for all nodes.

# Model and how it is served: those of the published benchmark.
: "${MODEL:=Qwen/Qwen3-32B}" "${TP:=8}" "${MAX_MODEL_LEN:=32768}" "${MAX_NUM_SEQS:=8}"
# push: NeuronPushConnector. pull: vLLM's own NixlConnector. Both legs and the sweep must agree.
: "${MODE:=push}"
# cuda (p5en) or neuron (trn2); a pair may mix them.
: "${DEVICE:=cuda}"
# Addresses that the other nodes reach. No default: loopback would start and then not serve.
: "${PREFILL_HOST:=}" "${DECODE_HOST:=}" "${HOST_IP:=}"
: "${PREFILL_PORT:=8100}" "${DECODE_PORT:=8200}" "${SIDE_PORT:=5600}" "${ROUTER_PORT:=8000}"
# Where logs and process ids go.
: "${RUN_DIR:=${XDG_RUNTIME_DIR:-/tmp}/neuron-push}"
: "${RESULTS:=results}"

# What this device's engines need on their command line.
ENGINE_OPTIONS=()
export FI_PROVIDER=efa FI_EFA_ENABLE_SHM_TRANSFER=0
if [ "$DEVICE" = cuda ]; then
    export FI_EFA_USE_DEVICE_RDMA=1
elif [ "$DEVICE" = neuron ]; then
    # Without it tensors have no address that can be registered; read when the runtime starts.
    export NEURON_RT_MAP_HBM=1
    # A compiled graph hides its end: a step may begin only once the last one's output is known.
    if [ "$MODE" = push ]; then ENGINE_OPTIONS+=(--no-async-scheduling); fi
else
    echo "DEVICE is '$DEVICE'; it must be cuda or neuron" >&2
    exit 2
fi
case $MODE in push | pull) ;; *) echo "MODE is '$MODE'; it must be push or pull" >&2; exit 2 ;; esac

need() {
    local name
    for name in "$@"; do
        [ -n "${!name}" ] || { echo "set $name" >&2; exit 2; }
    done
}

# start NAME COMMAND...: in the background, with a log and a pid file that cleanup.sh reads.
start() {
    local name=$1
    shift
    mkdir -p "$RUN_DIR"
    if [ -f "$RUN_DIR/$name.pid" ] && kill -0 "$(cat "$RUN_DIR/$name.pid")" 2>/dev/null; then
        echo "$name is running already (pid $(cat "$RUN_DIR/$name.pid")): run cleanup.sh" >&2
        exit 1
    fi
    setsid "$@" >"$RUN_DIR/$name.log" 2>&1 </dev/null &
    echo $! >"$RUN_DIR/$name.pid"
    echo "$name: pid $!, log $RUN_DIR/$name.log"
}

# wait_for NAME URL SECONDS: until it answers 200, or its process has ended.
wait_for() {
    local name=$1 url=$2 left=$3
    until curl -fsS -o /dev/null --max-time 5 "$url" 2>/dev/null; do
        if ! kill -0 "$(cat "$RUN_DIR/$name.pid")" 2>/dev/null || [ $((left -= 2)) -le 0 ]; then
            echo "$name does not serve; the end of its log:" >&2
            tail -n 25 "$RUN_DIR/$name.log" >&2
            exit 1
        fi
        sleep 2
    done
    echo "$name serves"
}

# transfer_config ROLE: the JSON for --kv-transfer-config.
transfer_config() {
    if [ "$MODE" = push ]; then
        printf '{"kv_connector":"NeuronPushConnector","kv_role":"%s",' "$1"
        printf '"kv_connector_module_path":"neuron_push.vllm.connector",'
        printf '"kv_buffer_device":"cuda",'
        printf '"kv_connector_extra_config":{"accelerator":"%s","backends":["LIBFABRIC"]}}' "$DEVICE"
    else
        # vLLM Neuron calls its device memory "cuda" here, and refuses "neuron".
        printf '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cuda",'
        printf '"kv_connector_extra_config":{"backends":["LIBFABRIC"]}}'
    fi
}
