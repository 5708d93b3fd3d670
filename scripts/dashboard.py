"""Writes deploy/observability/grafana-dashboard.json, so that panels differ only where they must.

python scripts/dashboard.py           write it
python scripts/dashboard.py --check   exit 1 if it is not current
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "deploy/observability/grafana-dashboard.json"
R, E = "neuron_push_router_", "neuron_push_"
RATE = "[$__rate_interval]"


def rate(name: str, by: str = "") -> str:
    """Per second, summed."""
    return f"sum{f' by ({by})' if by else ''} (rate({name}{RATE}))"


def quantile(share: float, name: str, by: str = "") -> str:
    """Of a histogram."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({name}_bucket{RATE})))"


def spread(name: str) -> list[tuple[str, str]]:
    """Median and the slow end of a histogram."""
    return [(quantile(q, name), f"p{round(100 * q)}") for q in (0.5, 0.9, 0.99)]


Target = tuple[str, str]
# Row -> panels: (title, unit, [(query, legend)], what to read from it).
ROWS: dict[str, list[tuple[str, str, list[Target], str]]] = {
    "Requests": [
        ("Requests by outcome", "reqps", [(rate(R + "requests_total", "outcome"), "{{outcome}}")],
         "Anything but ok has a reason: /requests, and the router's log."),
        ("How KV came to decode", "reqps", [(rate(R + "modes_total", "mode"), "{{mode}}")],
         "local means that decode engines compute prompts themselves."),
        ("Time to first byte", "s",
         [(quantile(q, R + "first_byte_seconds", "mode"), f"{{{{mode}}}} p{round(100 * q)}")
          for q in (0.5, 0.99)], "From arrival at the router, by mode."),
        ("Added by the router", "s", spread(R + "overhead_seconds"),
         "Grows when requests wait for free KV blocks."),
        ("In flight and waiting", "short",
         [(f"sum({R}in_flight)", "in flight"), (f"sum({R}waiting_for_room)", "wait for KV")],
         "Waiting: no decode engine has blocks free beside those promised."),
        ("Turned away", "reqps", [(rate(R + "limited_total", "limit"), "{{limit}}")],
         "By the limits on requests at once."),
    ],
    "Fleet": [
        ("Engines ready", "short",
         [(f"sum by (leg) ({R}engines_ready)", "{{leg}} ready"),
          (f"sum by (leg) ({R}engines_known)", "{{leg}} listed")], "/pairs says why not."),
        ("Pairs", "short",
         [(f"max({R}pairs_usable)", "usable"), (f"max({R}pairs_quarantined)", "quarantined")],
         "A quarantined pair failed repeatedly; its engines serve with others."),
        ("Failed legs", "reqps", [(rate(R + "leg_failures_total", "leg, url"), "{{leg}} {{url}}")],
         "One URL: that engine. All URLs: the network, or a bad rollout."),
        ("Retries and quarantines", "reqps",
         [(rate(R + "retries_total", "leg"), "retry, {{leg}} failed"),
          (rate(R + "quarantines_total"), "quarantine")], ""),
        ("Canaries", "reqps", [(rate(R + "canaries_total", "outcome"), "{{outcome}}")],
         "One-token requests through pairs."),
        ("Restarts and listings", "reqps",
         [(rate(R + "engine_restarts_total", "leg"), "restart {{leg}}"),
          (rate(R + "listings_total", "outcome"), "listing {{outcome}}")], ""),
    ],
    "Given up": [
        ("Dispatches given up by phase", "reqps",
         [(rate(R + "cancellations_total", "phase"), "{{phase}}")], ""),
        ("Drain after giving up", "s", spread(R + "drain_seconds"),
         "Until the decode engine holds no block for it."),
        ("Never confirmed", "short", [(f"sum(increase({R}undrained_total{RATE}))", "undrained")],
         "Blocks that only a fence brings back."),
        ("Transfers given up by engines", "reqps",
         [(rate(E + "cancellations_total", "reason"), "{{reason}}")], ""),
    ],
    "Transfers": [
        ("KV on the wire", "Bps",
         [(rate(E + "bytes_total"), "posted"), (rate(E + "received_bytes_total"), "received")],
         "Both lines lie on each other, or bytes are on the way."),
        ("Copies", "ops", [(rate(E + "copies_total"), "copies")], "Descriptors posted."),
        ("Bytes per copy", "bytes",
         [(f"{rate(E + 'bytes_total')} / {rate(E + 'copies_total')}", "mean")],
         "Small: fragmented blocks, or a pair with unlike pages."),
        ("Copies per WRITE", "short", spread(E + "transfer_copies_size"), ""),
        ("Transfers by outcome", "ops",
         [(rate(E + "sends_total", "outcome"), "send {{outcome}}"),
          (rate(E + "receives_total", "outcome"), "receive {{outcome}}"),
          (rate(E + "registrations_total"), "registrations")], ""),
        ("Match", "s", spread(E + "match_seconds"),
         "From a registration to its prompt being known: prefill's queue."),
        ("Transfer", "s", spread(E + "transfer_seconds"), "First WRITE posted to last landed."),
        ("Receive", "s", spread(E + "receive_seconds"), "Registration to the last byte."),
    ],
    "Promises": [
        ("Pinned blocks", "short", [(f"sum by (instance) ({E}pinned_blocks)", "{{instance}}")],
         "KV blocks held for transfers."),
        ("Oldest pin", "s", [(f"max by (instance) ({E}pinned_age_seconds)", "{{instance}}")],
         "Older than lease and patience: a peer is lost and not fenced."),
        ("Peers lost and fences", "ops",
         [(rate(E + "links_lost_total"), "lost"), (rate(E + "rotations_total"), "rotation"),
          (rate(E + "handshake_failures_total"), "handshake failed")], ""),
        ("Messages not applied", "ops",
         [(rate(E + "stale_messages_total", "kind"), "stale {{kind}}"),
          (rate(E + "rejected_messages_total", "kind"), "rejected {{kind}}"),
          (rate(E + "defects_total"), "defect")],
         "Stale ones follow restarts; rejected ones and defects should not be there."),
        ("Handshake", "s", spread(E + "handshake_seconds"), "First need to all links."),
    ],
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The whole file."""
    panels: list[dict[str, Any]] = []
    at = 0
    for row, contents in ROWS.items():
        where = {"h": 1, "w": 24, "x": 0, "y": at}
        panels.append({"id": len(panels) + 1, "type": "row", "title": row, "gridPos": where,
                       "collapsed": False, "panels": []})  # fmt: skip
        at += 1
        for index, panel in enumerate(contents):
            place = {"h": 8, "w": 8, "x": index % 3 * 8, "y": at + index // 3 * 8}
            panels.append(_panel(len(panels) + 1, panel, place))
        at += (len(contents) + 2) // 3 * 8
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}
    return {
        "uid": "neuron-push",
        "title": "neuron-push",
        "tags": ["vllm", "kv-transfer"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }


def _panel(
    number: int, panel: tuple[str, str, list[Target], str], place: dict[str, int]
) -> dict[str, Any]:
    title, unit, targets, text = panel
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "description": text,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(65 + i), "expr": query, "legendFormat": legend, "datasource": source}
            for i, (query, legend) in enumerate(targets)
        ],
    }


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = json.dumps(dashboard(), indent=1) + "\n"
    if parser.parse_args().check:
        return 0 if FILE.exists() and FILE.read_text() == text else 1
    FILE.write_text(text)
    print(f"wrote {FILE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
