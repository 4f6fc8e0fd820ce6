"""A report in sections, written as Markdown and as one HTML page with its figures beside it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes

from tinyds41.show.save import save_figure

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
body{{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}}
pre{{background:#f5f5f2;padding:.8rem;overflow-x:auto;font-size:13px;white-space:pre-wrap}}
img{{max-width:100%;display:block;margin:1rem 0}}</style></head>
<body>
{body}
</body></html>
"""


@dataclass
class Report:
    """Collects headings, paragraphs, tables and figures in order.

    folder: where `write` puts report.md, report.html and figures/.
    """

    title: str
    folder: Path
    _parts: list[tuple[str, str, str]] = field(default_factory=list)  # kind, text, alternative text

    def section(self, heading: str) -> None:
        self._parts.append(("heading", heading, ""))

    def say(self, text: str) -> None:
        self._parts.append(("text", text, ""))

    def table(self, text: str) -> None:
        """Fixed-width text."""
        self._parts.append(("table", text, ""))

    def figure(self, name: str, ax: Axes, rows: Sequence[Any]) -> None:
        """Saves the figure as SVG, PNG and CSV, and closes it."""
        title = ax.get_title(loc="left") or ax.get_title()
        save_figure(ax, self.folder / "figures", name, rows)
        pyplot.close(ax.get_figure(root=True))  # type: ignore[arg-type]
        self._parts.append(("figure", f"figures/{name}", title))

    def write(self) -> list[Path]:
        """Writes both forms and returns their paths."""
        paths = [self.folder / "report.md", self.folder / "report.html"]
        paths[0].write_text(self._markdown(), encoding="utf-8")
        body = "\n".join([f"<h1>{html.escape(self.title)}</h1>", *(_html(*part) for part in self._parts)])
        paths[1].write_text(_PAGE.format(title=html.escape(self.title), body=body), encoding="utf-8")
        return paths

    def _markdown(self) -> str:
        forms = {
            "heading": "## {0}", "text": "{0}", "table": "```text\n{0}\n```",
            "figure": "![{1}]({0}.svg)\n\n[PNG]({0}.png) · [numbers]({0}.csv)",
        }  # fmt: skip
        parts = [forms[kind].format(text, alternative) for kind, text, alternative in self._parts]
        return "\n\n".join([f"# {self.title}", *parts]) + "\n"


def _html(kind: str, text: str, alternative: str) -> str:
    text, alternative = html.escape(text), html.escape(alternative)
    if kind == "figure":
        links = f'<a href="{text}.png">PNG</a> · <a href="{text}.csv">numbers</a>'
        return f'<figure><img src="{text}.svg" alt="{alternative}"><figcaption>{links}</figcaption></figure>'
    tag = {"heading": "h2", "text": "p", "table": "pre"}[kind]
    return f"<{tag}>{text}</{tag}>"
