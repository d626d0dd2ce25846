"""Use a trained model: embed and classify images, and export it: docs/use.md in Python.

    python examples/use_model.py                       # trains a run on digits first
    python examples/use_model.py runs/softmax photos   # a run and a folder of yours

Needs `tammes[lab]`.
"""

import sys
from pathlib import Path

import tammes
from tammes.lab import Config, train
from tammes.lab.data import load as load_images
from tammes.lab.inference.exported_files import export_torch


def main(run=None, images=None, out="out/use_model"):
    """Print predictions and write the model to a file; returns both."""
    if run is None:
        run = train(Config(data="digits", loss="cosface(margin=0.2)", epochs=5), Path(out) / "run")
        images = load_images("digits", "test").pixels[:5]
    model = tammes.load(run)
    print(f"{model}\npreprocessing: {model.preprocess}\n")
    print("cosine of the first two images:", cosine(*model.embed(images)[:2]))
    predictions = model.predict(images, top=2)
    for found in predictions:
        print(found.image, *map("{} {:.0%}".format, found.classes, found.probabilities))
    written = export_torch(model, Path(out) / "model.pt2")
    print(f"\n{written.path}: {' and '.join(written.outputs)} of pixels")
    return predictions, written


def cosine(first, second):
    return round(float(first @ second / (first.norm() * second.norm())), 3)


if __name__ == "__main__":
    main(*sys.argv[1:3])
