"""How the report looks. Colours are variables, so that plots follow the reader's light or dark."""

STYLE = """
:root { color-scheme: light dark; --paper: #fcfcfb; --card: #ffffff; --ink: #1b1f24; --soft: #5a636e; --line: #dfe3e7;
  --faint: #f1f3f5; --bad: #b3261e; --badge: #fbeae8; --good: #19703e; --link: #1558a8;
  --c0: #2a78d6; --c1: #eb6834; --c2: #1baf7a; --c3: #c98500; --c4: #d0568b; --c5: #6a55c9; --c6: #3f8f1d; --c7: #8a929b; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181d; --card: #1a2027; --ink: #e2e7ec; --soft: #98a3af;
  --line: #2c353f; --faint: #222a32; --bad: #f28b82; --badge: #3a2220; --good: #67c98d; --link: #7db4f5;
  --c0: #4a97ee; --c1: #e4713b; --c2: #27b583; --c3: #d29a22; --c4: #dd6f9f; --c5: #9a8cf0; --c6: #6db54a; --c7: #7d8791; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: var(--ink);
  background: var(--paper); margin: 0 auto; max-width: 68rem; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.5rem 0 .75rem; } h3 { font-size: .95rem; margin: 1.25rem 0 .4rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); } .bad { color: var(--bad); } .good { color: var(--good); }
.mono, pre, code { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre { background: var(--faint); border-radius: 6px; margin: .4rem 0; overflow-x: auto; padding: .7rem .9rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.25rem 0 0; padding: 0; list-style: none; }
.tiles li { background: var(--card); border: 1px solid var(--line); border-radius: 8px; flex: 1 1 8.5rem; padding: .6rem .9rem; }
.tiles b { display: block; font-size: 1.25rem; font-weight: 600; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.tiles span { color: var(--soft); font-size: .85rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; margin: 0 0 .75rem; padding: .8rem 1rem; }
.card.first { border-left: 4px solid var(--bad); }
.card p { overflow-wrap: anywhere; }
.kind { background: var(--badge); border-radius: 4px; color: var(--bad); font-size: .85rem; font-weight: 600;
  margin-right: .5rem; padding: .1rem .5rem; }
details { margin-top: .4rem; } summary { color: var(--link); cursor: pointer; font-size: .9rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; width: 100%; }
th { border-bottom: 1px solid var(--line); color: var(--soft); font-weight: 600; text-align: left; }
td { border-bottom: 1px solid var(--faint); vertical-align: top; }
th, td { padding: .3rem .9rem .3rem 0; } th:last-child, td:last-child { padding-right: 0; }
td.name { font: 13px/1.6 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; min-width: 10rem; }
.n { font-variant-numeric: tabular-nums; text-align: right; white-space: nowrap; }
.card table { width: auto; }
.facts { margin-top: .75rem; width: auto; } .facts th { border: 0; font-weight: 400; padding: .1rem 1.5rem .1rem 0; white-space: nowrap; vertical-align: top; }
.facts td { border: 0; padding-bottom: .1rem; padding-top: .1rem; overflow-wrap: anywhere; }
svg { display: block; height: auto; width: 100%; } svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.grid { stroke: var(--line); stroke-width: 1; } .axis { stroke: var(--soft); stroke-width: 1; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.25rem; font-size: .9rem; list-style: none; margin: .5rem 0 0; padding: 0; }
.legend i { border-radius: 2px; display: inline-block; height: .7rem; margin-right: .45rem; width: .7rem; }
.bar { background: var(--faint); border-radius: 3px; display: inline-block; height: .55rem; vertical-align: baseline; width: 5rem; }
.bar i { background: var(--c0); border-radius: 3px; display: block; height: 100%; }
footer { border-top: 1px solid var(--line); color: var(--soft); font-size: .85rem; margin-top: 3rem; padding-top: .75rem; }
@media print { :root { color-scheme: light; } body { font-size: 11px; max-width: none; padding: 0; }
  .card, tr, svg, .tiles li { break-inside: avoid; } h2, h3 { break-after: avoid; } .wide { overflow: visible; }
  details::details-content { content-visibility: visible; height: auto; } summary { display: none; } }
"""
COLOURS = 7
"""How many colours there are to tell things apart; the one after them is grey, for what is left."""
