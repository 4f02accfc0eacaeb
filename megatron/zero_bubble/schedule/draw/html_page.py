"""A timeline as a self-contained HTML page: an SVG with tooltips and zoom, and a table of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.zero_bubble.schedule.analysis import causes
from megatron.zero_bubble.schedule.draw.canvas import clean, figure
from megatron.zero_bubble.schedule.draw.drawing import MAX_WIDTH, Drawing, Options, drawing
from megatron.zero_bubble.schedule.draw.svg import svg_of
from megatron.zero_bubble.schedule.timeline import Timeline

if TYPE_CHECKING:
    from typing_extensions import Unpack

_STYLE = """#drawing { overflow-x: auto; border: 1px solid #8888; }
#drawing svg { display: block; }
#drawing svg.small .l { display: none; }
#tip { position: fixed; display: none; background: #222; color: #fff; padding: 4px 8px; font-size: 13px;
       border-radius: 3px; pointer-events: none; max-width: 26em; }
table { border-collapse: collapse; font-size: 13px; margin-top: 1em; }
caption { text-align: left; padding: 2px 10px; }
th, td { padding: 2px 10px; text-align: right; border-bottom: 1px solid #8888; }
button { font-size: 14px; min-width: 2em; }
"""

# The script shows the titles of SVG elements as a tooltip without delay. Zooming scales the whole image and hides text
# that is too small to read.
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
  svg.classList.toggle('small', zoom < 0.6);
}
const room = document.getElementById('drawing').clientWidth / width;
if (room < 1) resize(Math.max(room, 0.75));
"""

_CONTROLS = """<p><button onclick="resize(1.25)">+</button> <button onclick="resize(0.8)">&minus;</button>
<button onclick="resize(0)">fit</button></p>
"""


def html_document(title: str, body: str, style: str) -> str:
    """Return a self-contained HTML page for light and dark colour schemes."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{clean(title)}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font-family: Helvetica, Arial, sans-serif; margin: 1em; }}
{style}</style></head>
<body>
{body}</body>
</html>
"""


def to_html(timeline: Timeline, **options: Unpack[Options]) -> str:
    """Draw a timeline as an HTML page, with a table of the ranks.

    By default the drawing is wide enough for readable labels. If the drawing is wider than the window, the page shrinks
    the drawing to fit, but to no less than 75% of its width.

    Args:
        timeline: timeline to draw.
        options: see `Options`.
    """
    picture = drawing(timeline, widest=MAX_WIDTH, **options)
    image = f'<div id="drawing">\n{svg_of(picture)}</div>\n<div id="tip"></div>\n'
    return html_document(
        picture.title, f"{_CONTROLS}{image}{_rank_rows(picture)}\n<script>{_SCRIPT}</script>\n", _STYLE
    )


def _rank_rows(picture: Drawing) -> str:
    """The HTML table of the ranks, with columns for the span, the work, the idle time by cause, and the peak memory."""
    timeline = picture.timeline
    idle = causes(timeline)
    heads = ["rank", "span", "work", *idle]
    if picture.has_memory:
        heads += [f"peak memory ({clean(picture.memory_unit)})", "reached by"]
    rows = ["".join(f"<th>{head}</th>" for head in heads)]
    for rank, peak in enumerate(timeline.peaks):
        times = (timeline.spans[rank], timeline.work[rank], *(cause[rank] for cause in idle.values()))
        cells = [str(rank), *map(figure, times)]
        if picture.has_memory:
            cells += [figure(peak.amount), picture.name(peak.op) if peak.op else ""]
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    caption = f"<caption>Times in {clean(picture.time_unit)}</caption>\n"
    return f"<table>\n{caption}" + "\n".join(f"<tr>{row}</tr>" for row in rows) + "\n</table>"
