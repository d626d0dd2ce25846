"""Few-shot: what cannot be is refused in a sentence, and no number comes of what is not finite."""

import math
import re

import pytest
import torch
from made_features import examples, made

from tammes.lab.fewshot import protocol
from tammes.lab.fewshot.episodes import draw
from tammes.lab.fewshot.finetuned_heads import LinearTuning, finetune_heads
from tammes.lab.fewshot.protocol import LabelledFeatures, accuracies, evaluate, methods


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nearest", "there is no method 'nearest'"),
        ("cosin", "did you mean cosine?"),
        ("l2(scale=3)", "l2"),
        ("cosine(scal=3)", "did you mean scale?"),
        ("cosine(scale=0)", "scale of method cosine is expected to be above 0, got 0"),
        ("linear(passes=0)", "passes of method linear is expected to be at least 1, got 0"),
        ("linear(lr='a')", "lr of method linear is expected to be a number, got 'a'"),
        (
            "linear(momentum=-0.1)",
            "momentum of method linear is expected to be at least 0, got -0.1",
        ),
        (
            "cosine(weight_decay=-1)",
            "weight_decay of method cosine is expected to be at least 0, got -1",
        ),
        (
            "cosine(dampening=-0.5)",
            "dampening of method cosine is expected to be from 0 to 1, got -0.5",
        ),
        (
            "linear(dampening=1.5)",
            "dampening of method linear is expected to be from 0 to 1, got 1.5",
        ),
    ],
)
def test_methods_that_cannot_be_are_refused(text, message):
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        methods(text)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("name", "beside", "message"),
    [
        ("cl2n", {}, "cl2n expects the mean of the base features, got none"),
        (
            "cl2n",
            {"base_mean": torch.full((24,), math.nan)},
            "cl2n expects the mean of the base features to be finite, got NaN or infinity",
        ),
        (
            "cl2n",
            {"base_mean": torch.zeros(3)},
            "few-shot expects base_mean of shape (24,), got (3,)",
        ),
        (
            "complement",
            {},
            "complement expects the prototypes of the head that was trained, got none",
        ),
        (
            "complement",
            {"prototypes": torch.full((4, 24), math.inf)},
            "complement expects the prototypes of the head that was trained to be finite, "
            "got NaN or infinity",
        ),
        (
            "complement",
            {"prototypes": torch.zeros(4, 3)},
            "few-shot expects prototypes of shape (C, 24), got (4, 3)",
        ),
        (
            "complement",
            {"prototypes": torch.eye(24)},
            "complement expects fewer prototypes than dimensions, got 24 of 24: nothing is outside "
            "their span",
        ),
    ],
)
def test_a_method_without_what_it_needs_is_refused(name, beside, message):
    features, labels = made()
    episodes = draw(labels, way=3, shot=1, queries=2, episodes=5)
    (method,) = methods(name).values()
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        accuracies(features, episodes, method, **beside)


@pytest.mark.parametrize("name", ["centroid", "l2", "cosine", "linear"])
def test_features_that_are_not_finite_are_refused(name):
    features, labels = made()
    features[3, 0] = math.nan
    episodes = draw(labels, way=3, shot=1, queries=2, episodes=5)
    (method,) = methods(name).values()
    with pytest.raises(ValueError, match="finite features, got NaN or infinity"):
        accuracies(features, episodes, method)


def test_features_that_are_not_finite_once_centred_are_refused():
    features, labels = made(dtype=torch.float)
    episodes = draw(labels, way=3, shot=1, queries=2, episodes=5)
    message = "few-shot expects features that stay finite when centred or projected, got infinity"
    with pytest.raises(ValueError, match=f"^{message}$"):
        accuracies(
            1e38 * features.clamp_max(3),
            episodes,
            protocol.cl2n(),
            base_mean=torch.full((24,), -3e38),
        )


@pytest.mark.parametrize("text", ["cosine(lr=1e30)", "linear(lr=1e10)", "linear(momentum=3)"])
def test_heads_that_diverge_give_no_number(text):
    features, labels = made(dtype=torch.float)
    (method,) = methods(text).values()
    episodes = draw(labels, way=3, shot=1, queries=2, episodes=5)
    with pytest.raises(ValueError, match=r"infinity in 5 of 5 episodes: try a smaller lr$"):
        accuracies(features, episodes, method)


def test_episodes_whose_heads_diverge_are_counted(monkeypatch):
    # More than one block of episodes.
    monkeypatch.setattr(protocol, "_BLOCK", {"cpu": 1000, "cuda": 1000})
    features, labels = made(dtype=torch.float)
    features[labels == 0] *= 1e25
    episodes = draw(labels, way=3, shot=1, queries=2, episodes=40)
    method = LinearTuning(passes=5)
    heads = finetune_heads(features, episodes, torch.arange(40), method)
    scores = features[episodes.queries].flatten(1, 2) @ heads.transpose(1, 2)
    wrong = int((~scores.isfinite()).flatten(1).any(1).sum())
    assert 10 < wrong <= int((episodes.classes == 0).any(1).sum()) < 40
    with pytest.raises(ValueError, match=f"NaN or infinity in {wrong} of 40 episodes"):
        accuracies(features, episodes, method)


def test_episodes_of_more_examples_than_there_are_features_are_refused():
    features, labels = made()
    episodes = draw(labels, way=3, shot=1, queries=2, episodes=50)
    last = int(torch.cat([episodes.support, episodes.queries], 2).max())
    message = f"were drawn from, {last + 1} at least, got {last}"
    with pytest.raises(ValueError, match=message):
        accuracies(features[:last], episodes, protocol.l2())
    assert accuracies(features[: last + 1], episodes, protocol.l2()).mean() > 0.5


LABELS = torch.arange(5).repeat(4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"features": torch.zeros(20)}, ValueError, "features of shape (N, D), got (20,)"),
        ({"features": torch.zeros(20, 0)}, ValueError, "features of shape (N, D), got (20, 0)"),
        (
            {"features": [[0.0]] * 20},
            TypeError,
            "features to be a tensor, got list; torch.as_tensor makes one",
        ),
        (
            {"base_mean": [0.0] * 3},
            TypeError,
            "base_mean to be a tensor, got list; torch.as_tensor makes one",
        ),
        (
            {"features": torch.zeros(20, 3, dtype=torch.long)},
            TypeError,
            "features of a floating type, got torch.int64",
        ),
        ({"features": torch.zeros(21, 3)}, ValueError, "a label for each of 21 features, got 20"),
        ({"labels": LABELS[:, None]}, ValueError, "labels of shape (N,), got (20, 1)"),
        (
            {"labels": LABELS.float()},
            TypeError,
            "labels of an integer type, got torch.float32; labels.long() converts them",
        ),
        (
            {"labels": LABELS.numpy()},
            TypeError,
            "labels to be a tensor of integers, got ndarray; torch.as_tensor makes one",
        ),
        ({"labels": LABELS - 1}, ValueError, "labels of 0 or more, got -1"),
        (
            {"classes": tuple("abcd")},
            ValueError,
            "labels from 0 to 3, one per name of the classes, got 4",
        ),
        ({"base_mean": torch.zeros(1, 3)}, ValueError, "base_mean of shape (3,), got (1, 3)"),
        ({"prototypes": torch.zeros(3)}, ValueError, "prototypes of shape (C, 3), got (3,)"),
    ],
)
def test_examples_that_do_not_go_together_are_refused(change, error, message):
    given = {"features": torch.zeros(20, 3), "labels": LABELS, "classes": tuple("abcde")}
    LabelledFeatures(**given)
    with pytest.raises(error, match=f"^few-shot expects {re.escape(message)}$"):
        LabelledFeatures(**{**given, **change})


def test_models_with_other_images_are_not_compared():
    one, two = examples(), examples(each=29)
    with pytest.raises(ValueError, match="features of the same images in the same order"):
        evaluate(one, against=two, episodes=5)
