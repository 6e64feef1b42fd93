"""`explain DIR --html FILE`: one self-contained page with each program's graph and its table of redistributions.

Invariant: no script from elsewhere, no network, equal artifacts give equal bytes. Layers that are alike are drawn once:
the first of each run of equal ones stands for the rest and says how many they are.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

import networkx as nx

from tokenspeed.compiler.explain import fold
from tokenspeed.ir.graph import Node, Program
from tokenspeed.ir.ops import OPS, Fused, Redistribute
from tokenspeed.ir.text import print_node

ROW, TOP, LEFT = 22, 16, 420  # px: height of a node, margin, where the arcs start

_STYLE = """
body{font:14px/1.4 system-ui,sans-serif;margin:2em;max-width:1400px;color:#222}
h2{margin-top:2em} table{border-collapse:collapse} td,th{border:1px solid #ccc;padding:2px 8px;text-align:left;vertical-align:top}
td.n{text-align:right} code,text{font:12px ui-monospace,monospace} .comm{fill:#b30000;font-weight:bold} .free{fill:#8a6d00}
.call{fill:#00408a} .more{fill:#777;font-style:italic} path{fill:none;stroke:#aaa} path.pending{stroke:#b30000;stroke-dasharray:4 2}
"""


def page(title: str, programs: Mapping[str, tuple[Program, dict[str, Any]]]) -> str:
    """`programs`: by name, each with its explanation."""
    out = [
        "<!doctype html><meta charset=utf-8>",
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style><h1>{html.escape(title)}</h1>",
        "<p>Red: moves bytes between ranks. Dashed: a sum that is still pending. Hover for types, rules and runner-ups.</p>",
    ]
    for name, (p, info) in programs.items():
        out.append(f"<h2>{html.escape(name)}</h2><p>{_totals(info)}</p>{_graph(p, info)}{_table(info)}")
    return "\n".join(out) + "\n"


def _totals(info: dict[str, Any]) -> str:
    return html.escape(
        f"{info['collectives']} collectives, {info['bytes_per_token']:.0f} B sent a token a rank, {info['comm_us']:.1f} us, "
        f"arena {info['arena_bytes']} B, agreement {','.join(info['agreement']) or 'none'}"
    )


def shown(p: Program) -> list[tuple[Node, int]]:
    """The nodes to draw, and for the last of a layer how many layers like it follow it unseen."""
    layers: dict[int, list[Node]] = {}
    where: dict[int, int] = {}
    for i, n in enumerate(p.nodes):
        m = re.match(r"\w+\.(\d+)\.", n.attrs["path"] + "." if n.op == "call" else (n.outputs or n.inputs)[0] + ".")
        if m:
            layers.setdefault(int(m[1]), []).append(n)
            where[i] = int(m[1])
    shape = {k: [fold(print_node(n, p.types, p.plan)) for n in nodes] for k, nodes in layers.items()}
    hidden = {k for k in layers if k - 1 in layers and shape[k] == shape[k - 1]}
    out: list[tuple[Node, int]] = []
    for i, n in enumerate(p.nodes):
        k = where.get(i)
        if k in hidden:
            continue
        more = 0
        if k is not None and layers[k][-1] is n:
            while k + more + 1 in hidden:
                more += 1
        out.append((n, more))
    return out


def _graph(p: Program, info: dict[str, Any]) -> str:
    """Program order from top to bottom; an arc for each value from who makes it to who takes it."""
    rows = {r["value"]: r for r in info["redistributions"]}
    g: nx.DiGraph = nx.DiGraph()
    makers: dict[str, int] = {}
    lines: list[str] = []
    y = 0
    for n, more in shown(p):
        kind = "call" if n.op == "call" else ""
        if n.op != "call" and isinstance(op := OPS[n.op], Redistribute):
            kind = "comm" if op.wire else "free"
        elif n.op != "call" and isinstance(OPS[n.op], Fused):
            kind = "comm"
        g.add_node(y)
        for v in n.values:
            if v in makers:
                g.add_edge(makers[v], y, pending=bool(p.types[v].pending))
        makers.update((o, y) for o in n.outputs)
        text = print_node(n, p.types, p.plan)
        row = rows.get(n.outputs[0]) or rows.get(f"{n.outputs[0]}'sum") if n.outputs else None
        tip = text + (f"\n{row['rule']}: {row['reason']}\nrunner-up: {row['runner_up']}" if row else "")
        label = f"{', '.join(n.outputs)} = {n.attrs['leaf'] if n.op == 'call' else n.op}" if n.outputs else n.op
        lines.append(f'<text class="{kind}" x="{LEFT}" y="{TOP + y * ROW}" text-anchor="end">{html.escape(label)}'
                     f"<title>{html.escape(tip)}</title></text>")  # fmt: skip
        if n.outputs:
            types = html.escape(", ".join(p.types[o].text(p.plan) for o in n.outputs))
            lines.append(f'<text x="{LEFT + 200}" y="{TOP + y * ROW}">{types}</text>')
        y += 1
        if more:
            lines.append(
                f'<text class="more" x="{LEFT}" y="{TOP + y * ROW}" text-anchor="end">{more} more layers like it</text>'
            )
            y += 1
    for a, b, data in g.edges(data=True):
        bend = LEFT + 12 + min(170, 10 * (b - a))
        y0, y1 = TOP + a * ROW - 4, TOP + b * ROW - 4
        mark = ' class="pending"' if data["pending"] else ""
        lines.append(f'<path{mark} d="M{LEFT + 4} {y0} C{bend} {y0} {bend} {y1} {LEFT + 4} {y1}"/>')
    return f'<svg width="1300" height="{TOP + y * ROW}">{"".join(lines)}</svg>'


def _table(info: dict[str, Any]) -> str:
    head = ("edge", "from", "to", "collective", "axis", "B a token", "us", "why", "runner-up", "gap us")
    cells: dict[tuple[str, ...], int] = {}
    for r in info["redistributions"]:
        gap = "" if r["gap_us"] is None else f"{r['gap_us']:.1f}"
        moved = f"{r['bytes_per_token']:.0f}", f"{r['time_us']:.1f}"
        why = f"{r['rule']}: {fold(r['reason'])}"
        how = r["fused"] or r["op"], ",".join(r["axes"])
        key = (fold(r["edge"]), r["from"], r["to"], *how, *moved, why, r["runner_up"], gap)
        cells[key] = cells.get(key, 0) + 1
    out = ["<table><tr><th>times</th>" + "".join(f"<th>{h}</th>" for h in head) + "</tr>"]
    out += [
        f'<tr><td class="n">{k}</td>' + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>"
        for row, k in cells.items()
    ]
    return "".join(out) + "</table>"
