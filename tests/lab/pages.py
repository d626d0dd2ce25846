"""What tests of pages share: looking into what was written and drawn."""

import json
import re

import markupsafe


def body(text):
    """A page without the library and the numbers of the plots."""
    text = re.sub(r"<script>/\*\*\n\* plotly.*?</script>", "", text, flags=re.DOTALL)
    return re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.DOTALL)


def plots(text):
    """The numbers of the plots."""
    found = re.search(r'<script type="application/json" id="plots">(.*?)</script>', text, re.DOTALL)
    return json.loads(found.group(1))


def layers(chart, kind):
    """Layers of one kind in all panels."""
    return [layer for panel in chart.panels for layer in panel.layers if isinstance(layer, kind)]


def escaped(text):
    """A text as a page has it."""
    return str(markupsafe.escape(text))
