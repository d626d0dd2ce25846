"""Run folders made up for tests, in the format that training writes."""

import math
import zlib

import torch

from tammes.lab.config.schema import Config
from tammes.lab.records.run_folder import Run, write_json, write_lines, write_tensors

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def make_run(
    folder,
    *,
    seed=0,
    classes=DIGITS,
    size=3,
    examples=200,
    noise=0.4,
    epochs=6,
    accuracy=0.9,
    class_margin=60.0,
    sample_margin=0.5,
    state="done",
    embeddings=True,
    pictures=True,
    channels=1,
    side=8,
    failure=None,
    terms=("softmax",),
    validation=False,
    per_second=5000.0,
    **config,
):
    """Write a run and return it; numbers depend on loss and seed alone.

    ``state`` is done, failed or unfinished; ``config`` are fields of the configuration.
    """
    count = len(classes)
    settings = Config(
        **{
            "head": "linear(bias=True)",
            "backbone": f"mnist_cnn(features={size})",
            "augment": "none",
            "epochs": epochs,
            "seed": seed,
            **config,
        }
    )
    generator = torch.Generator().manual_seed(zlib.crc32(f"{settings.loss} {seed}".encode()))
    write_json(folder / "config.json", settings.to_dict())
    write_json(
        folder / "data.json",
        {
            "source": settings.data,
            "test_source": settings.data,
            "classes": list(classes),
            "counts": [100] * count,
            "train": 100 * count,
            "validation": 0,
            "test": examples,
            "image": [channels, side, side],
            "mean": [0.3] * channels,
            "std": [0.2] * channels,
            "digest": "0123abcd",
        },
    )
    write_json(
        folder / "environment.json",
        {
            "tammes": "0.1.0.dev0",
            "torch": "2.13.0",
            "python": "3.11.2",
            "platform": "Linux",
            "device": "cpu",
            "commit": "23a4f1a",
            "command": f"tammes train --loss '{settings.loss}' --seed {seed}",
            "started": "2026-11-15T11:15:00Z",
            "world_size": 1,
            "backbone": {"name": settings.backbone, "parameters": 12345, "num_features": size},
            "head": "cosine(scale=16.0)" if settings.head == "auto" else settings.head,
            "augment": "none" if settings.augment == "auto" else settings.augment,
            "loss": settings.loss,
        },
    )
    stop = {"done": epochs, "failed": max(1, epochs // 2), "unfinished": epochs - 1}[state]
    rows, times = [], []
    for epoch in range(1, stop + 1):
        part = 1 - math.exp(-3 * epoch / epochs)
        shift = 0.02 * float(torch.rand((), generator=generator))
        measured = {
            "accuracy": min(1.0, accuracy * part + shift),
            "sample_margin": sample_margin * part + shift,
            "bias": max(math.log(max(count - 1, 1)) * (1 - 0.6 * part), 0.0),
            "loss": 2.3 * (1 - part) + 0.1,
        }
        rows.append(
            {
                "epoch": epoch,
                "step": 11 * epoch,
                "lr": 0.05 * (1 + math.cos(math.pi * epoch / epochs)),
                "train": {
                    "loss": 2.3 * (1 - part) + shift,
                    "accuracy": min(1.0, accuracy * part + 0.03),
                    "sample_margin": sample_margin * part,
                },
                "terms": {term: 2.3 * (1 - part) + place for place, term in enumerate(terms)},
                "test": measured,
                **({"validation": measured} if validation else {}),
                "prototypes": {
                    "class_margin": class_margin * part,
                    "class_margin_ratio": class_margin * part / 96.4,
                    "norm_mean": 1 + part,
                    "norm_min": 0.8 + part / 2,
                    "norm_max": 1.2 + 1.5 * part,
                },
            }
        )
        times.append(
            {"epoch": epoch, "seconds": 1.5, "images_per_second": per_second + 100 * shift}
        )
    write_lines(folder / "metrics.jsonl", rows)
    write_lines(folder / "timing.jsonl", times)
    if state == "failed":
        default = {
            "kind": "not finite",
            "message": "the loss is nan",
            "step": 11 * stop,
            "epoch": stop,
            "term": terms[0],
            "batch": [1, 2, 3],
        }
        write_json(folder / "failure.json", failure or default)
    if state != "done":
        return Run(folder)

    prototypes = torch.randn(count, size, generator=generator)
    labels = torch.arange(examples) % count
    features = prototypes[labels] + noise * torch.randn(examples, size, generator=generator)
    unit = torch.nn.functional.normalize
    predictions = (unit(features) @ unit(prototypes).T).argmax(1)
    right = predictions == labels
    write_json(
        folder / "final.json",
        {
            "epoch": epochs,
            "step": 11 * epochs,
            "chosen": "last",
            "test": {
                "accuracy": accuracy,
                "sample_margin": sample_margin,
                "sample_margin_min": -0.8,
                "bias": 0.7,
                "loss": 0.2,
                "per_class_accuracy": [
                    float(right[labels == place].double().mean()) if place < examples else None
                    for place in range(count)
                ],
            },
            "prototypes": rows[-1]["prototypes"] | {"class_margin": class_margin},
            "optimum": {
                "class_margin": 70.0,
                "class_margin_is_bound": False,
                "sample_margin": 1.05,
            },
            "seconds": 1.5 * epochs,
        },
    )
    write_tensors(
        folder / "prototypes.safetensors",
        {"prototypes": prototypes, "scale": torch.tensor(1.0), "bias": torch.zeros(count)},
    )
    index = torch.arange(examples)
    if embeddings:
        known = {"features": features, "labels": labels, "predictions": predictions}
        write_tensors(folder / "embeddings.safetensors", known | {"index": index})
    if pictures:
        wrong = (~right).nonzero().flatten()[:24]
        good = [int((right & (labels == place)).nonzero()[0]) for place in range(count)
                if bool((right & (labels == place)).any())]  # fmt: skip
        chosen = torch.cat([wrong, torch.tensor(good, dtype=torch.long)])
        # Coarse shapes with some grain: their files are as large as those of photographs.
        coarse = 216 * torch.rand(len(chosen), channels, 8, 8, generator=generator)
        images = torch.nn.functional.interpolate(coarse, (side, side), mode="bilinear")
        images += 40 * torch.rand(images.shape, generator=generator)
        write_tensors(
            folder / "examples.safetensors",
            {
                "images": images.to(torch.uint8),
                "labels": labels[chosen],
                "predictions": predictions[chosen],
                "index": index[chosen],
            },
        )
    return Run(folder)


def make_study(
    root, *, seeds=3, losses=("softmax()", "cosface(margin=0.2)", "lm_softmax()"), **how
):
    """Several losses with several seeds each; later losses are a little better."""
    runs = []
    for place, loss in enumerate(losses):
        for seed in range(seeds):
            shift = 0.004 * ((7 * seed + 3 * place) % 5)
            runs.append(
                make_run(
                    root / f"{place:02d}-seed{seed}",
                    **{
                        "seed": seed,
                        "loss": loss,
                        "accuracy": min(0.999, 0.9 + 0.02 * place + shift),
                        "class_margin": min(69.5, 45.0 + 8 * place + 50 * shift),
                        "sample_margin": min(1.0, 0.4 + 0.1 * place + shift),
                        **how,
                    },
                )
            )
    return runs
