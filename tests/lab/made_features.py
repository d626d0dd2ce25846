"""Made-up features to draw few-shot episodes from."""

import torch

from tammes.lab.fewshot.protocol import LabelledFeatures


def made(classes=8, each=30, size=24, spread=1.0, seed=0, dtype=torch.double):
    """Features around a point for each class, all of one sign as after a ReLU, and labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat(each)
    points = torch.randn(classes, size, generator=generator, dtype=torch.double)
    noise = torch.randn(len(labels), size, generator=generator, dtype=torch.double)
    return (1 + points[labels] + spread * noise).relu().to(dtype), labels


def examples(**settings):
    """The same with names, a base mean and the prototypes of a head."""
    features, labels = made(**settings)
    names = tuple(map(str, labels.unique().tolist()))
    return LabelledFeatures(features, labels, names, features.mean(0), prototypes=features[3:8])
