#!/usr/bin/env bash
# Ends what the scripts here started on this node, and nothing else.
set -euo pipefail
: "${RUN_DIR:=${XDG_RUNTIME_DIR:-/tmp}/neuron-push}"
for file in "$RUN_DIR"/*.pid; do
    [ -e "$file" ] || continue
    pid=$(cat "$file")
    name=$(basename "$file" .pid)
    if kill -0 "$pid" 2>/dev/null; then
        # Each was started as the leader of a session of its own: its workers end with it.
        kill -TERM -- "-$pid"
        for _ in $(seq 60); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.5
        done
        kill -KILL -- "-$pid" 2>/dev/null || true
        echo "$name ended"
    fi
    rm -f "$file"
done
