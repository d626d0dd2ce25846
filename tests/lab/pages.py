"""Helpers of the tests of pages: three pages, and a look into what was written and drawn."""

import base64
import gzip
import json
import re

import ledgers
import markupsafe
import numpy as np
import torch
from records import make_run, make_study

from tammes.lab.cli.main import main
from tammes.lab.records.run_folder import Run
from tammes.lab.report.pages.reproduction_page import reproduction_page
from tammes.lab.report.pages.runs_page import runs_page

EVIL = ledgers.EVIL
NAMES = [EVIL, "a & b", "$x$", "\"quoted\" 'name'", "</script><b>bold", "%{x}", "Ärger", "_under"]
"""Classes whose names try to break a page."""
LOSSES = ("softmax()", "cosface(margin=0.35) + 0.5*sample_margin()")


def make_runs(root):
    """Two losses, a failed run and a damaged one."""
    found = make_study(root, losses=LOSSES, classes=NAMES, seeds=2, examples=160)
    evil = {"kind": "not finite", "message": f"the loss {EVIL} is nan"}
    found.append(make_run(root / "failed", classes=NAMES, seed=5, state="failed", failure=evil))
    found.append(make_run(root / "named", classes=NAMES, name=EVIL, size=5, terms=("one", "two")))
    make_run(root / "broken", classes=NAMES, seed=6)
    (root / "broken" / "config.json").write_text("{")
    return [*found, Run(root / "broken")]


def write_runs_page(folder):
    """The page of runs."""
    path, runs = folder / "report.html", make_runs(folder / "runs")
    path.write_text(runs_page(runs, title=f"title {EVIL}", command=f"tammes report '{EVIL}'"))
    return path


def write_reproduction_page(folder):
    """The page of a recipe with every kind of figure."""
    path = folder / "drawn.html"
    path.write_text(reproduction_page(*ledgers.drawn()))
    return path


def write_measure_page(folder):
    """The page of eight classes on the sphere."""
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.randn(8, 3, generator=generator)
    labels = torch.arange(8).repeat(20)
    embeddings = prototypes[labels] + 0.3 * torch.randn(160, 3, generator=generator)
    np.savez(
        folder / "<i>file.npz",
        prototypes=prototypes.numpy(),
        embeddings=embeddings.numpy(),
        labels=labels.numpy(),
        class_names=np.array(NAMES),
    )
    assert main(["measure", str(folder / "<i>file.npz"), "--out", str(folder)]) == 0
    return folder / "measure.html"


def body(text):
    """A page without the library and the numbers of the plots."""
    return re.sub(r'<script type="application/gzip".*?</script>', "", text, flags=re.DOTALL)


def packed(text, name):
    """What a page has packed under a name: the library, or the numbers of the plots."""
    (found,) = re.findall(rf'<script type="application/gzip" id="{name}">(.*?)</script>', text)
    return gzip.decompress(base64.b64decode(found)).decode()


def plots(text):
    """The numbers of the plots."""
    return json.loads(packed(text, "plots"))


def layers(chart, kind):
    """Layers of one kind in all panels."""
    return [layer for panel in chart.panels for layer in panel.layers if isinstance(layer, kind)]


def escaped(text):
    """A text as a page has it."""
    return str(markupsafe.escape(text))
