#!/usr/bin/env bash
# Input lengths x request rates through the router, one result file each:
#   $RESULTS/<mode>_qps<q>_in<in>_out<out>_iter<i>.json
# Runs that are there already are left out, so an interrupted sweep goes on where it stopped.
set -euo pipefail
. "$(dirname "$0")/settings.sh"
: "${INPUTS:=1024 4096 16384}" "${RATES:=1 2 4 8}" "${OUTPUT:=256}" "${ITERATIONS:=3}"
: "${SECONDS_EACH:=60}" "${ROUTER_URL:=http://${HOST_IP:-127.0.0.1}:$ROUTER_PORT}"
: "${BENCH:=vllm bench serve}"
mkdir -p "$RESULTS"
for input in $INPUTS; do
    for rate in $RATES; do
        for i in $(seq "$ITERATIONS"); do
            name=${MODE}_qps${rate}_in${input}_out${OUTPUT}_iter${i}.json
            if [ -s "$RESULTS/$name" ]; then
                echo "$name is there"
                continue
            fi
            prompts=$(awk -v r="$rate" -v s="$SECONDS_EACH" 'BEGIN { n = r * s; print (n < 8 ? 8 : int(n)) }')
            $BENCH --backend vllm --base-url "$ROUTER_URL" --model "$MODEL" \
                --dataset-name random --random-input-len "$input" --random-output-len "$OUTPUT" \
                --ignore-eos --num-prompts "$prompts" --request-rate "$rate" --seed "$i" \
                --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,99 \
                --metadata "mode=$MODE" --save-result --result-dir "$RESULTS" \
                --result-filename "$name"
        done
    done
done
