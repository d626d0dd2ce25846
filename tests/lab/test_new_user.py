"""A new user with own pictures: the usual way works, and each mistake gets a helpful sentence."""

import numpy
import pytest
import torch

import tammes

FEATURES, LABELS = torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
ONE_HOT = torch.nn.functional.one_hot(LABELS, 3)
NAMES = ["coat", "shoe", "bag", "coat"]


def cosface(features, labels):
    return tammes.CosFace(8, 3)(features, labels)


# Each row: a mistake in Python, its error, and the hint that the sentence has to contain.
IN_PYTHON = {
    "one-hot labels": (lambda: cosface(FEATURES, ONE_HOT), ValueError, "use labels.argmax(1)"),
    "one-hot labels of a floating type": (
        lambda: cosface(FEATURES, ONE_HOT.float()),
        TypeError,
        "use labels.argmax(1)",
    ),
    "labels in a column": (
        lambda: cosface(FEATURES, LABELS[:, None]),
        ValueError,
        "labels.squeeze(1)",
    ),
    "floating labels": (lambda: cosface(FEATURES, LABELS.float()), TypeError, "labels.long()"),
    "labels and features swapped": (
        lambda: cosface(LABELS, FEATURES),
        TypeError,
        "criterion(features, labels)",
    ),
    "features in a list": (lambda: cosface(FEATURES.tolist(), LABELS), TypeError, "to be a tensor"),
    "features in an array": (
        lambda: cosface(FEATURES.numpy(), LABELS),
        TypeError,
        "got ndarray; torch.as_tensor",
    ),
    "labels in a list": (
        lambda: cosface(FEATURES, LABELS.tolist()),
        TypeError,
        "a tensor of integers, got list; torch.as_tensor",
    ),
    "class names in a list": (lambda: cosface(FEATURES, NAMES), TypeError, "names.index(label)"),
    "class names in an array": (
        lambda: cosface(FEATURES, numpy.array(NAMES)),
        TypeError,
        "names.index(label)",
    ),
    "labels that count from 1": (
        lambda: cosface(FEATURES, LABELS + 1),
        ValueError,
        "got 1 to 3; classes count from 0",
    ),
    "images in place of features": (
        lambda: cosface(torch.randn(4, 3, 8, 8), LABELS),
        ValueError,
        "images go through a network first",
    ),
    "one-hot labels for a head": (
        lambda: tammes.CosineHead(8, 3).split(FEATURES, ONE_HOT),
        ValueError,
        "use labels.argmax(1)",
    ),
    "scale by its symbol": (
        lambda: tammes.CosFace(8, 3, s=30.0),
        TypeError,
        "CosFace has no setting 's'; did you mean scale?",
    ),
    "margin by its symbol": (
        lambda: tammes.ArcFace(8, 3, m=0.5),
        TypeError,
        "ArcFace has no setting 'm'; did you mean margin?",
    ),
    "margin of a term by its symbol": (
        lambda: tammes.cosface(m=0.3),
        TypeError,
        "cosface has no setting 'm'; did you mean margin?",
    ),
    "a size from a division": (
        lambda: tammes.CosFace(16 / 2, 3),
        TypeError,
        "embedding_size to be a whole number, got 8.0",
    ),
    "a number of classes as text": (
        lambda: tammes.CosFace(8, "3"),
        TypeError,
        "num_classes to be a whole number, got '3'",
    ),
    "a scale of None": (lambda: tammes.CosFace(8, 3, scale=None), TypeError, "'learnable'"),
    "a term called with tensors": (
        lambda: tammes.arcface(FEATURES, LABELS),
        TypeError,
        "criterion = tammes.ArcFace(embedding_size, num_classes)",
    ),
    "a term without ready-made criterion called with tensors": (
        lambda: tammes.triplet(FEATURES, LABELS),
        TypeError,
        "tammes.Criterion(tammes.CosineHead(embedding_size, num_classes), triplet())",
    ),
    "a built term called with tensors": (
        lambda: tammes.lm_softmax()(FEATURES, LABELS),
        TypeError,
        "criterion = tammes.LMSoftmax(embedding_size, num_classes)",
    ),
    "a criterion built from tensors": (
        lambda: tammes.ArcFace(FEATURES, LABELS),
        TypeError,
        "when it is called",
    ),
    "a margin in nested lists": (
        lambda: tammes.cosface(margin=FEATURES.tolist()),
        ValueError,
        "got 4 sequences",
    ),
    "degrees for a cosine margin": (
        lambda: tammes.CosFace(8, 3, margin=28.6),
        ValueError,
        "got 28.6; as an angle in degrees it is arcface(margin=0.4992)",
    ),
    "degrees for an angular margin": (
        lambda: tammes.ArcFace(8, 3, margin=28.6),
        ValueError,
        "28.6 degrees are 0.4992",
    ),
    "a term in place of the head": (
        lambda: tammes.Criterion(tammes.arcface(), tammes.CosineHead(8, 3)),
        TypeError,
        "such as tammes.CosineHead(embedding_size, num_classes)",
    ),
}


@pytest.mark.parametrize("mistake", IN_PYTHON)
def test_a_mistake_in_python_gets_a_hint_in_one_short_sentence(mistake):
    attempt, error, hint = IN_PYTHON[mistake]
    with pytest.raises(error) as raised:
        attempt()
    said = str(raised.value)
    assert hint in said
    assert "\n" not in said
    assert len(said) < 260
