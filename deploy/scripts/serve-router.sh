#!/usr/bin/env bash
# Starts the router on the third node. PREFILL_HOST=... DECODE_HOST=... [HOST_IP=address to serve on]
# In pull mode engines are vLLM's own and say nothing of themselves: PULL_PROXY=<path to vLLM's
# toy_proxy_server.py> is started instead.
set -euo pipefail
. "$(dirname "$0")/settings.sh"
need PREFILL_HOST DECODE_HOST
if [ "$MODE" = push ]; then
    start router neuron-push router --host "${HOST_IP:-127.0.0.1}" --port "$ROUTER_PORT" \
        --prefill "http://$PREFILL_HOST:$PREFILL_PORT#side=$SIDE_PORT" \
        --decode "http://$DECODE_HOST:$DECODE_PORT#side=$SIDE_PORT" "$@"
    # Not ready before a real token has come through the pair.
    wait_for router "http://${HOST_IP:-127.0.0.1}:$ROUTER_PORT/ready" 120
else
    : "${PULL_PROXY:?set PULL_PROXY to toy_proxy_server.py of the vLLM source tree}"
    start router python "$PULL_PROXY" --host "${HOST_IP:-127.0.0.1}" --port "$ROUTER_PORT" \
        --prefiller-hosts "$PREFILL_HOST" --prefiller-ports "$PREFILL_PORT" \
        --decoder-hosts "$DECODE_HOST" --decoder-ports "$DECODE_PORT" "$@"
    wait_for router "http://${HOST_IP:-127.0.0.1}:$ROUTER_PORT/healthcheck" 120
fi
