"""A timeline as one HTML page without any other file: the SVG with a tooltip and zoom, and a table of ranks."""

from __future__ import annotations

from html import escape

from megatron.zero_bubble.schedule.analysis import causes
from megatron.zero_bubble.schedule.draw.canvas import number
from megatron.zero_bubble.schedule.draw.svg import to_svg
from megatron.zero_bubble.schedule.memory import peaks
from megatron.zero_bubble.schedule.timeline import Timeline

_STYLE = """
body { font-family: Helvetica, Arial, sans-serif; color: #222; margin: 1em; }
#drawing { overflow-x: auto; border: 1px solid #ddd; }
#drawing svg rect:hover { stroke: #000; stroke-width: 1.5; }
#drawing svg text { pointer-events: none; }
#tip { position: fixed; display: none; background: #222; color: #fff; padding: 4px 8px; font-size: 13px;
       border-radius: 3px; pointer-events: none; max-width: 26em; }
table { border-collapse: collapse; font-size: 13px; margin-top: 1em; }
th, td { padding: 2px 10px; text-align: right; border-bottom: 1px solid #ddd; }
button { font-size: 14px; min-width: 2em; }
"""

# The titles of the SVG become one tooltip that appears at once; zooming scales the image as a whole.
_SCRIPT = """
const svg = document.querySelector('#drawing svg'), tip = document.getElementById('tip');
const tips = new Map();
for (const title of svg.querySelectorAll('title')) {
  tips.set(title.parentNode, title.textContent);
  title.remove();
}
svg.addEventListener('mousemove', event => {
  const words = tips.get(event.target);
  tip.style.display = words ? 'block' : 'none';
  if (!words) return;
  tip.textContent = words;
  tip.style.left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8) + 'px';
  tip.style.top = Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8) + 'px';
});
svg.addEventListener('mouseleave', () => { tip.style.display = 'none'; });
const width = svg.width.baseVal.value, height = svg.height.baseVal.value;
let zoom = 1;
function resize(factor) {
  zoom = factor === 0 ? document.getElementById('drawing').clientWidth / width : zoom * factor;
  svg.setAttribute('width', width * zoom);
  svg.setAttribute('height', height * zoom);
}
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title><style>{style}</style></head>
<body>
<p><button onclick="resize(1.25)">+</button> <button onclick="resize(0.8)">&minus;</button>
<button onclick="resize(0)">fit</button></p>
<div id="drawing">
{svg}</div>
<div id="tip"></div>
{table}
<script>{script}</script>
</body>
</html>
"""


def to_html(timeline: Timeline, *, title: str | None = None, memory_unit: str = "M_B") -> str:
    """The page as text. Arguments as in `to_svg`."""
    title = title or timeline.schedule.name
    svg = to_svg(timeline, title=title, memory_unit=memory_unit)
    table = _table(timeline, memory_unit)
    return _PAGE.format(title=escape(title), style=_STYLE, svg=svg, table=table, script=_SCRIPT)


def _table(timeline: Timeline, memory_unit: str) -> str:
    """Span, work, bubble by cause and peak memory of every rank."""
    idle = causes(timeline)
    heads = ("rank", "span", "work", *idle, f"peak memory ({escape(memory_unit)})", "reached by")
    rows = ["".join(f"<th>{head}</th>" for head in heads)]
    for rank, peak in enumerate(peaks(timeline.schedule, timeline.costs)):
        times = (timeline.spans[rank], timeline.work[rank], *(cause[rank] for cause in idle.values()))
        cells = [str(rank), *(number(value, 4) for value in (*times, peak.amount)), str(peak.op or "")]
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    return "<table>\n" + "\n".join(f"<tr>{row}</tr>" for row in rows) + "\n</table>"
