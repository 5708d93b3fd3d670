#!/usr/bin/env bash
# Starts the prefill engine on this node. HOST_IP=<address that decode reaches> [MODE=push|pull]
set -euo pipefail
. "$(dirname "$0")/settings.sh"
need HOST_IP
export VLLM_NIXL_SIDE_CHANNEL_HOST=$HOST_IP VLLM_NIXL_SIDE_CHANNEL_PORT=$SIDE_PORT
start prefill vllm serve "$MODEL" --host "$HOST_IP" --port "$PREFILL_PORT" \
    --tensor-parallel-size "$TP" --max-model-len "$MAX_MODEL_LEN" --max-num-seqs "$MAX_NUM_SEQS" \
    "${ENGINE_OPTIONS[@]}" \
    --kv-transfer-config "$(transfer_config kv_producer)" "$@"
wait_for prefill "http://$HOST_IP:$PREFILL_PORT/health" "${START_SECONDS:-1800}"
