"""Recognise digits that a network was not trained on, from five images of each.

    python examples/gallery.py

Needs `tammes[lab]`. Takes half a minute; everything is kept in runs/gallery.
"""

import json
from pathlib import Path

import torch

import tammes
from tammes.lab import Config, train
from tammes.lab.data import load


def main(folder="runs/gallery", epochs=10):
    """Return the share of the known digits that are recognised, and of the unknown rejected."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    classes = {"base": list("01234"), "validation": ["5"], "novel": list("6789")}
    (folder / "classes.json").write_text(json.dumps(classes))
    config = Config(data="digits", classes=f"{folder}/classes.json:base", epochs=epochs)
    model = tammes.load(train(config, folder / "run"))

    images = load("digits", "train")
    rows = {name: (images.labels == int(name)).nonzero().squeeze(1) for name in "6789"}
    gallery = tammes.Gallery(model)
    for name in "678":
        gallery.enrol(images.pixels[rows[name][:5]], [name] * 5)
    # Twenty other images of each set the threshold below which a digit is unknown.
    held_out = torch.cat([rows[name][5:25] for name in "678"])
    print(gallery.threshold(0.05, images.pixels[held_out], [*"6" * 20, *"7" * 20, *"8" * 20]))
    gallery.save(folder / "gallery.safetensors")

    gallery = tammes.Gallery.load(folder / "gallery.safetensors", model)
    found = {name: gallery.identify(images.pixels[rows[name][25:]]).best for name in "6789"}
    known = [each == name for name in "678" for each in found[name]]
    unknown = [each is None for each in found["9"]]
    result = sum(known) / len(known), sum(unknown) / len(unknown)
    print(f"6, 7, 8: {result[0]:.0%} recognised; 9: {result[1]:.0%} rejected as unknown")
    return result


if __name__ == "__main__":
    main()
