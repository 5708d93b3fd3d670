#!/usr/bin/env bash
# Starts the decode engine on this node. HOST_IP=<address that prefill reaches> [MODE=push|pull]
set -euo pipefail
. "$(dirname "$0")/settings.sh"
need HOST_IP
export VLLM_NIXL_SIDE_CHANNEL_HOST=$HOST_IP VLLM_NIXL_SIDE_CHANNEL_PORT=$SIDE_PORT
# The published figures were taken without prefix caching on decode.
start decode vllm serve "$MODEL" --host "$HOST_IP" --port "$DECODE_PORT" \
    --tensor-parallel-size "$TP" --max-model-len "$MAX_MODEL_LEN" --max-num-seqs "$MAX_NUM_SEQS" \
    "${ENGINE_OPTIONS[@]}" \
    --no-enable-prefix-caching --kv-transfer-config "$(transfer_config kv_consumer)" "$@"
wait_for decode "http://$HOST_IP:$DECODE_PORT/health" "${START_SECONDS:-1800}"
