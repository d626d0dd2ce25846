"""Features of more than three dimensions are projected, and nothing but the signs is open."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from pages import layers

from tammes.lab.report.charts.chart import Points
from tammes.lab.report.charts.feature_projection import feature_charts, feature_projection
from tammes.similarity import unit


def made(generator, count=60, size=6, classes=4):
    prototypes = torch.randn(classes, size, generator=generator)
    labels = torch.arange(count) % classes
    features = prototypes[labels] + 0.3 * torch.randn(count, size, generator=generator)
    return prototypes, features, labels


def places(chart, hollow):
    found = [layer for layer in layers(chart, Points) if layer.hollow == hollow]
    return {layer.color: torch.tensor([layer.x, layer.y], dtype=torch.double).T for layer in found}


def test_the_axes_are_those_of_the_largest_variance(generator):
    prototypes, features, labels = made(generator)
    chart = feature_projection.chart(features, labels, prototypes)
    rows = unit(features.double())
    variance, axes = torch.linalg.eigh(torch.cov(rows.T))
    shown, rings = places(chart, hollow=False), places(chart, hollow=True)
    for column, axis in enumerate(axes.flip(1).T[:2]):
        axis = axis * axis[axis.abs().argmax()].sign()
        expected = (rows - rows.mean(0)) @ axis
        others = (unit(prototypes.double()) - rows.mean(0)) @ axis
        for place in range(4):
            assert torch.allclose(shown[place][:, column], expected[labels == place], atol=1e-4)
            assert rings[place][0, column] == pytest.approx(float(others[place]), abs=1e-4)
    shares = 100 * variance.flip(0) / variance.sum()
    assert chart.panels[0].x == f"first component, {shares[0]:.0f} % of the variance"
    assert chart.panels[0].y == f"second component, {shares[1]:.0f} % of the variance"


def test_the_length_of_features_does_not_matter(generator):
    prototypes, features, labels = made(generator)
    longer = features * (0.5 + torch.rand(len(features), 1, generator=generator))
    assert feature_projection.chart(longer, labels, 3 * prototypes) == feature_projection.chart(
        features, labels, prototypes
    )


@pytest.mark.parametrize(("count", "size"), [(1, 5), (2, 5), (40, 1), (0, 5)])
def test_little_is_drawn_as_it_is(generator, count, size):
    prototypes, features, labels = made(generator, count, size)
    charts = feature_charts(prototypes, features, labels)
    points = layers(charts["pca"], Points)
    assert sum(len(layer.x) for layer in points if not layer.hollow) == count


def test_equal_features_are_one_point(generator):
    prototypes, features, labels = made(generator)
    chart = feature_projection.chart(features[:1].expand(60, 6), labels, prototypes)
    assert all(set(layer.x) == {0.0} for layer in layers(chart, Points) if not layer.hollow)
    assert chart.panels[0].x.startswith("first component, ")


def test_many_classes_have_no_legend_and_few_layers(generator):
    names = [f"class {place}" for place in range(100)]
    prototypes, features, labels = made(generator, 400, 8, 100)
    points = layers(feature_projection.chart(features, labels, prototypes, names), Points)
    assert len(points) == 60
    assert not any(layer.name for layer in points)
    texts = [text for layer in points for text in layer.texts]
    assert set(names) < set(texts)
    assert len(texts) == 500


def test_the_rings_are_those_of_the_classes_that_are_shown(generator):
    prototypes, features, labels = made(generator, 50, 8, 1000)
    points = layers(feature_projection.chart(features, labels, prototypes, limit=20), Points)
    assert sum(len(layer.x) for layer in points if layer.hollow) == 20


def test_sizes_that_do_not_belong_together_are_rejected():
    with pytest.raises(ValueError, match=r"\(N, D\) and prototypes \(C, D\), got \(9, 4\) and"):
        feature_projection.chart(torch.ones(9, 4), torch.zeros(9).long(), torch.ones(2, 5))


def test_umap_is_drawn_where_it_is_installed(generator, monkeypatch):
    asked = {}

    class UMAP:
        def __init__(self, **settings):
            asked.update(settings)

        def fit_transform(self, vectors):
            asked["shape"] = vectors.shape
            return np.stack([np.arange(len(vectors)), np.zeros(len(vectors))], 1)

    module = ModuleType("umap.umap_")
    module.UMAP = UMAP
    monkeypatch.setitem(sys.modules, "umap", ModuleType("umap"))
    monkeypatch.setitem(sys.modules, "umap.umap_", module)
    charts = feature_charts(*made(generator))
    assert list(charts) == ["pca", "umap"]
    assert asked["shape"] == (64, 6)
    assert asked["metric"] == "cosine"
    # The prototypes come after the features.
    assert places(charts["umap"], hollow=True)[3].tolist() == [[63.0, 0.0]]
    assert list(feature_charts(*made(generator, count=15))) == ["pca"]


def test_without_umap_there_are_principal_components(generator, monkeypatch):
    monkeypatch.setitem(sys.modules, "umap.umap_", None)
    assert list(feature_charts(*made(generator))) == ["pca"]
