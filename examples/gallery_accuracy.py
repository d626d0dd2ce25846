"""Measure how well a run recognises individuals that it was not trained on.

docs/tutorial_gallery.md explains the numbers:

    python examples/gallery_accuracy.py RUN FOLDER         # FOLDER has a subfolder per individual

Of the individuals in FOLDER, some are enrolled from a few images each; the others are unknown. The
threshold of unknown individuals is set on the enrolled images alone: each is held out in turn and
compared with a gallery of the others. All other images are then identified. Intervals are over
individuals; the draw of individuals and images is repeated, and the first is shown in full.

Needs `tammes[lab]`.
"""

import argparse
import json
import random
import shlex
import statistics
import sys
from pathlib import Path

import torch

import tammes
from tammes.lab.data.sources.folder import list_classes
from tammes.metrics.functional import intervals, open_set_accuracy


def held_out_pairs(embeddings, ids, images):
    """Compare each enrolled image with a gallery that does not have it."""
    scores, same = [], []
    for fold in range(images):
        held = [row for row in range(len(ids)) if row % images == fold]
        rest = [row for row in range(len(ids)) if row % images != fold]
        gallery = tammes.Gallery()
        gallery.enrol(embeddings[rest], [ids[row] for row in rest])
        found = gallery.identify(embeddings[held], top=len(gallery))
        scores.append(found.scores.flatten())
        same += [
            each == ids[row] for row, ranked in zip(held, found.ids, strict=True) for each in ranked
        ]
    return torch.cat(scores), torch.tensor(same)


def measure(embeddings, names, seed, individuals, images, far):
    """Enrol and identify once; returns results with and without a threshold, and counts."""
    draw = random.Random(seed)
    rows = {}
    for row, name in enumerate(names):
        rows.setdefault(name, []).append(row)
    enough = sorted(name for name, own in rows.items() if len(own) > images)
    chosen = draw.sample(enough, individuals)
    enrolled = [row for name in chosen for row in draw.sample(rows[name], images)]
    ids = [names[row] for row in enrolled]
    gallery = tammes.Gallery()
    gallery.enrol(embeddings[enrolled], ids)
    calibration = gallery.threshold(far, pairs=held_out_pairs(embeddings[enrolled], ids, images))

    rest = sorted(set(range(len(names))) - set(enrolled))
    actual = [names[row] for row in rest]
    found = gallery.identify(embeddings[rest], top=len(gallery))
    best = [ranked[0] for ranked in found.ids]
    everything = torch.ones(len(rest), dtype=torch.bool)
    different = torch.tensor(
        [[each != own for each in ranked] for own, ranked in zip(actual, found.ids, strict=True)]
    )
    return {
        "threshold": calibration._asdict(),
        "closed": open_set_accuracy(best, actual, chosen, everything),
        "open": open_set_accuracy(best, actual, chosen, found.known),
        "far_of_the_test_pairs": float(
            (found.scores[different] >= calibration.threshold).double().mean()
        ),
        "counts": {
            "enrolled": len(chosen),
            "images_of_enrolled": sum(name in chosen for name in actual),
            "unknown": len(rows) - len(chosen),
            "images_of_unknown": sum(name not in chosen for name in actual),
        },
    }


def main(run, folder, individuals=20, images=5, far=0.01, draws=20, device=None):
    """Measure; returns numbers by name."""
    model = tammes.load(run, device=device)
    entries = list_classes(Path(folder))
    names = [entries.names[label] for label in entries.labels.tolist()]
    embeddings = model.embed(entries.items.fetch(row) for row in range(len(names)))
    results = [measure(embeddings, names, seed, individuals, images, far) for seed in range(draws)]
    first = results[0]
    print(f"{first['counts']}, threshold {first['threshold']}")
    generator = torch.Generator().manual_seed(0)
    numbers = {}
    for name, kind, field in (
        ("accuracy", "closed", "baks"),
        ("recognised and accepted", "open", "baks"),
        ("unknown rejected", "open", "baus"),
    ):
        interval = intervals(first[kind], generator=generator)[field]
        every = [100 * float(getattr(each[kind], field)) for each in results]
        numbers[name] = {
            "percent": 100 * interval.value,
            "interval": [100 * interval.low, 100 * interval.high],
            "mean_of_draws": statistics.fmean(every),
            "deviation_of_draws": statistics.stdev(every) if draws > 1 else None,
        }
        low, high = numbers[name]["interval"]
        print(
            f"{name:<24}{100 * interval.value:5.1f} %  [{low:.1f}, {high:.1f}]  "
            f"{draws} draws: {numbers[name]['mean_of_draws']:.1f}"
        )
    fars = [each["far_of_the_test_pairs"] for each in results]
    return {
        "model": {"digest": model.digest, "config": model.run.config.identity()},
        "settings": {"individuals": individuals, "images": images, "far": far, "draws": draws},
        "counts": first["counts"],
        "threshold": first["threshold"],
        "numbers": numbers,
        "far_of_the_test_pairs": {"first_draw": fars[0], "mean_of_draws": statistics.fmean(fars)},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="directory of a finished run")
    parser.add_argument("folder", help="folder with a subfolder for each individual")
    parser.add_argument("--individuals", type=int, default=20, help="enrolled individuals (20)")
    parser.add_argument("--images", type=int, default=5, help="enrolled images of each (5)")
    parser.add_argument("--far", type=float, default=0.01, help="false acceptance rate (0.01)")
    parser.add_argument("--draws", type=int, default=20, help="draws of individuals (20)")
    parser.add_argument("--write", type=Path, metavar="PATH", help="write JSON")
    given = vars(parser.parse_args())
    path = given.pop("write")
    found = main(**given)
    if path is not None:
        command = shlex.join(["python", "examples/gallery_accuracy.py", *sys.argv[1:]])
        path.write_text(json.dumps({"command": command} | found, indent=2) + "\n")
