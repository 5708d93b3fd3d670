"""Writes the pages of docs/ that follow from the code: settings, router options, metrics.

python scripts/reference.py           write them
python scripts/reference.py --check   exit 1 if a page is not what the code says
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
NOTE = "<!-- Written by scripts/reference.py from the code; edit that. -->\n"


def docstrings(cls: type) -> dict[str, str]:
    """The text below each attribute of a class."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for one, two in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(one, ast.AnnAssign)
            and isinstance(one.target, ast.Name)
            and isinstance(two, ast.Expr)
            and isinstance(two.value, ast.Constant)
        ):
            found[one.target.id] = " ".join(str(two.value.value).split())
    return found


def settings() -> str:
    """Every setting of the connector."""
    from neuron_push.config import Config

    lines = [
        "# Settings of the connector",
        "",
        NOTE,
        "They go into `kv_connector_extra_config` of vLLM's `--kv-transfer-config`. Unknown names",
        "and values out of range are refused at start, in words.",
        "",
        "| setting | default | allowed | meaning |",
        "|---|---|---|---|",
    ]
    return "\n".join([*lines, *rows(Config), ""])


def rows(record: type[msgspec.Struct], within: str = "") -> Iterator[str]:
    """A row per field of a record of settings, and of the records in it."""
    texts = docstrings(record)
    for field in msgspec.structs.fields(record):
        name, text = within + field.name, cell(texts[field.name])
        if isinstance(field.default, msgspec.Struct):
            yield f"| `{name}` | | the settings below | {text} |"
            yield from rows(type(field.default), f"{name}.")
        else:
            default = msgspec.json.encode(field.default).decode()
            yield f"| `{name}` | `{default}` | {allowed(field.type)} | {text} |"


def allowed(kind: object) -> str:
    """The type of a setting and its bounds, for people."""
    info = msgspec.inspect.type_info(kind)
    if isinstance(info, msgspec.inspect.LiteralType):
        return " or ".join(f'`"{value}"`' for value in info.values)
    words = {
        "BoolType": "`true` or `false`", "FloatType": "number", "IntType": "whole number",
        "StrType": "text", "VarTupleType": "list of texts",
    }  # fmt: skip
    name = words[type(info).__name__]
    bounds = [
        f"{sign} {getattr(info, key):,}"
        for key, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if getattr(info, key, None) is not None
    ]
    return ", ".join([name, *bounds])


def options() -> str:
    """Every option of the router."""
    from neuron_push.router.command import add_arguments

    parser = argparse.ArgumentParser(prog="neuron-push router")
    add_arguments(parser)
    lines = ["# Options of the router", "", NOTE, parser.description or "", ""]
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if a.option_strings and a.dest != "help"]
        if not actions:
            continue
        lines += [f"## {(group.title or '').capitalize()}", ""]
        lines += ["| option | default | meaning |", "|---|---|---|"]
        for action in actions:
            default = "" if action.default in (None, [], False) else f"`{action.default}`"
            text = action.help or ""
            if action.choices:
                text = f"{', '.join(map(str, action.choices))}. {text}"
            value = f" {action.metavar or action.dest.upper()}" if action.nargs != 0 else ""
            lines.append(f"| `{action.option_strings[0]}{value}` | {default} | {cell(text)} |")
        lines.append("")
    return "\n".join(lines)


def metrics() -> str:
    """Every metric of engines and router."""
    lines = [
        "# Metrics",
        "",
        NOTE,
        "Times are seconds, sizes bytes. Engines export theirs on vLLM's `/metrics`, with vLLM's",
        "labels `model_name` and `engine`; both legs have all names, each fills what happens",
        "there. The router exports its own on `/metrics`.",
        "",
    ]
    for title, rows in (("Engines", list(engine_metrics())), ("Router", list(router_metrics()))):
        lines += [f"## {title}", "", "| metric | type | labels | meaning |", "|---|---|---|---|"]
        lines += [
            f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {cell(text)} |"
            for name, kind, labels, text in rows
        ]
        lines.append("")
    return "\n".join(lines)


Row = tuple[str, str, tuple[str, ...], str]


def engine_metrics() -> Iterator[Row]:
    """Name as exported, type, labels of its own, text."""
    from neuron_push.vllm import stats

    for name, (text, label) in stats.COUNTERS.items():
        yield f"{stats.PREFIX}{name}_total", "counter", (label,) if label else (), text
    for name, (text, _) in stats.HISTOGRAMS.items():
        yield stats.PREFIX + name, "histogram", (), text
    for name, text in stats.GAUGES.items():
        yield stats.PREFIX + name, "gauge", (), text


def router_metrics() -> Iterator[Row]:
    """The same of the router."""
    from neuron_push.router.metrics import Metrics

    for collector in Metrics().registry._collector_to_names:
        kind = collector._type
        name = collector._name + ("_total" if kind == "counter" else "")
        yield name, kind, tuple(collector._labelnames), collector._documentation


def cell(text: str) -> str:
    """Fit for a table."""
    return text.replace("|", "\\|")


PAGES = {"configuration.md": settings, "router-options.md": options, "metrics.md": metrics}


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for name, make in PAGES.items():
        text, path = make(), DOCS / name
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if not check:
                path.write_text(text)
                print(f"wrote docs/{name}")
    if check and stale:
        print(f"not current: {', '.join(stale)}; run python scripts/reference.py")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
