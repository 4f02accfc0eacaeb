"""Drawings of timelines: SVG, a self-contained HTML page, and a Chrome trace for Perfetto."""

from megatron.zero_bubble.schedule.draw.chrome_trace import to_chrome_trace
from megatron.zero_bubble.schedule.draw.html_page import html_document, to_html
from megatron.zero_bubble.schedule.draw.plot import Series, to_plot
from megatron.zero_bubble.schedule.draw.svg import to_svg

__all__ = ["Series", "html_document", "to_chrome_trace", "to_html", "to_plot", "to_svg"]
