"""MarginClassifier is a scikit-learn classifier like any other, and rejects unknown classes."""

import importlib
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_digits, make_blobs
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import tammes
from tammes.integrations.sklearn import MarginClassifier


@parametrize_with_checks([MarginClassifier()])
def test_scikit_learn_accepts_it(estimator, check):
    check(estimator)


@parametrize_with_checks(
    [MarginClassifier("arcface(margin=0.1) + 0.1*sample_margin()", hidden_layer_sizes=(32,))]
)
@pytest.mark.slow
def test_scikit_learn_accepts_other_losses_and_layers(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def digits():
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = StandardScaler().fit_transform(images)[order]
    return images[:900], labels[order[:900]], images[900:], labels[order[900:]]


def small(loss="cosface(margin=0.2)", **settings):
    settings = {"epochs": 8, "batch_size": 64, "embedding_size": 32, "random_state": 0} | settings
    return MarginClassifier(loss, **settings)


def test_it_is_as_good_as_logistic_regression_on_digits(digits):
    images, labels, others, their_labels = digits
    theirs = LogisticRegression(max_iter=1000).fit(images, labels).score(others, their_labels)
    ours = MarginClassifier(epochs=20, random_state=0).fit(images, labels)
    assert ours.score(others, their_labels) > theirs - 0.02


@pytest.mark.parametrize(
    "loss",
    ["softmax", "arcface(margin=0.2)", "ldam(max_margin=0.3)", "large_margin_gaussian(margin=0.1)"],
)
def test_every_kind_of_loss_learns(digits, loss):
    images, labels, others, their_labels = digits
    model = small(loss).fit(images, labels)
    assert model.score(others, their_labels) > 0.85
    assert model.loss_curve_[-1] < model.loss_curve_[0]


def test_text_and_terms_are_the_same_loss(digits):
    images, labels, others, _ = digits
    text = small("cosface(margin=0.1) + 0.5*sample_margin()").fit(images, labels)
    terms = small(tammes.cosface(margin=0.1) + 0.5 * tammes.sample_margin()).fit(images, labels)
    np.testing.assert_array_equal(text.decision_function(others), terms.decision_function(others))


def test_probabilities_are_the_softmax_of_the_scores_without_margin(digits):
    images, labels, others, _ = digits
    model = small().fit(images, labels)
    scores = torch.tensor(model.decision_function(others))
    torch.testing.assert_close(torch.tensor(model.predict_proba(others)), scores.softmax(1))
    embedded = torch.tensor(model.transform(others))
    assert embedded.shape == (len(others), 32)
    cosines = torch.nn.functional.normalize(embedded) @ model.criterion_.head.prototypes.T
    torch.testing.assert_close(scores, model.criterion_.head.scale * cosines.detach())


def test_the_same_seed_is_the_same_model_and_torchs_own_generator_is_left_alone(digits):
    images, labels, others, _ = digits
    before = torch.get_rng_state()
    first, second = (small().fit(images, labels).decision_function(others) for _ in range(2))
    other = small(random_state=1).fit(images, labels).decision_function(others)
    np.testing.assert_array_equal(first, second)
    assert (first != other).any()
    assert (torch.get_rng_state() == before).all()


def test_dtype_of_the_input_is_that_of_the_model(digits):
    images, labels, others, _ = digits
    model = small().fit(images.astype(np.float32), labels)
    assert model.network_[0].weight.dtype == torch.float32
    assert model.transform(others).dtype == np.float32


def test_sparse_and_dense_rows_give_the_same_model(digits):
    images, labels, others, _ = digits
    images, others = images.clip(0), others.clip(0)
    # A row without entries has an embedding, too.
    others[3] = 0
    dense = small(hidden_layer_sizes=(16,)).fit(images, labels)
    scarce = small(hidden_layer_sizes=(16,)).fit(sparse.csr_array(images), labels)
    expected = dense.decision_function(others)
    # Sums in another order, over 120 steps of training.
    np.testing.assert_allclose(
        scarce.decision_function(sparse.csc_array(others)), expected, rtol=1e-6, atol=1e-6
    )
    np.testing.assert_allclose(scarce.decision_function(others), expected, rtol=1e-6, atol=1e-6)


def test_weights_count_against_all_examples_and_not_within_a_batch(digits):
    images, labels, *_ = digits
    model = small(batch_size=100, epochs=1, learning_rate=1e-12)
    weights = np.random.default_rng(0).uniform(0, 3, len(labels))
    one = model.fit(images, labels, sample_weight=weights).loss_curve_
    # The loss of an epoch without progress is that of all examples at once.
    whole = clone(model).set_params(batch_size=900).fit(images, labels, sample_weight=weights)
    np.testing.assert_allclose(one, whole.loss_curve_, rtol=1e-9)
    again = clone(model).fit(images, labels, sample_weight=10 * weights)
    np.testing.assert_allclose(one, again.loss_curve_, rtol=1e-12)


def test_balanced_weights_find_more_of_a_rare_class():
    images, labels = make_blobs([600, 30], centers=[[0, 0], [1.5, 0]], random_state=0)
    plain = small(epochs=60, batch_size=630).fit(images, labels).predict(images)
    balanced = (
        small(epochs=60, batch_size=630, class_weight="balanced")
        .fit(images, labels)
        .predict(images)
    )
    assert (plain[labels == 1] == 1).mean() < 0.5 < (balanced[labels == 1] == 1).mean()


def test_pickled_and_cloned(digits):
    images, labels, others, _ = digits
    model = small(tammes.cosface(margin=0.1)).fit(images, labels)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(model.predict_proba(others), again.predict_proba(others))
    assert clone(model).get_params()["loss"] == model.loss
    assert not hasattr(clone(model), "criterion_")


# -------------------------------------------------------------------------- other tools


def test_in_a_grid_search_over_losses_in_a_pipeline(digits):
    images, labels, others, their_labels = digits
    pipeline = make_pipeline(StandardScaler(), small(epochs=4))
    grid = {"marginclassifier__loss": ["softmax()", tammes.cosface(margin=0.1)]}
    search = GridSearchCV(pipeline, grid, cv=2).fit(images, labels)
    assert len(search.cv_results_["params"]) == 2
    assert search.score(others, their_labels) > 0.85


def test_cross_validated_and_calibrated(digits):
    images, labels, others, their_labels = digits
    assert cross_val_score(small(), images, labels, cv=2).min() > 0.8
    calibrated = CalibratedClassifierCV(small(epochs=4), cv=2).fit(images, labels)
    assert calibrated.score(others, their_labels) > 0.85


def test_as_a_transformer_before_another_classifier(digits):
    images, labels, others, their_labels = digits
    model = make_pipeline(small(), LogisticRegression(max_iter=1000))
    assert model.fit(images, labels).score(others, their_labels) > 0.85
    names = model[0].get_feature_names_out()
    assert [*names[:2], len(names)] == ["marginclassifier0", "marginclassifier1", 32]


# -------------------------------------------------------------------------- unknown classes


@pytest.fixture(scope="module")
def partial(digits):
    """A model that knows the digits below 8, and examples of those and of the others."""
    images, labels, others, their_labels = digits
    known, theirs = labels < 8, their_labels < 8
    model = small(epochs=20).fit(images[known], labels[known])
    return model, others[theirs], their_labels[theirs], others[~theirs]


def test_the_threshold_keeps_the_share_that_is_asked_for_and_rejects_the_unknown(partial):
    model, known, _, unknown = partial
    threshold = model.rejection_threshold(known, recall=0.9)
    kept = (model.predict(known, reject=threshold) != -1).mean()
    assert 0.9 <= kept < 0.9 + 1 / len(known)
    assert (model.predict(unknown, reject=threshold) == -1).mean() > 0.5
    assert model.known_score(known).mean() > model.known_score(unknown).mean()
    # A share of 0.55 of 100 is 55, though 0.55 * 100 is a little more.
    threshold = model.rejection_threshold(known[:100], recall=0.55)
    assert (model.known_score(known[:100]) >= threshold).sum() == 55
    # All of them, at the lowest score.
    assert model.rejection_threshold(known, recall=1.0) == model.known_score(known).min()


def test_labels_that_are_kept_are_those_without_rejection(partial):
    model, known, _, _ = partial
    plain, some = (
        model.predict(known),
        model.predict(known, reject=np.median(model.known_score(known))),
    )
    assert (some[some != -1] == plain[some != -1]).all()
    assert some.dtype == plain.dtype
    assert (model.predict(known, reject=-np.inf) == plain).all()


def test_the_label_of_the_unknown_suits_the_classes():
    texts = ["a cat", "the cat", "a dog", "the dog"] * 4
    labels = ["cat", "cat", "dog", "dog"] * 4
    model = make_pipeline(TfidfVectorizer(), small()).fit(texts, labels)
    assert model.predict(["the cat", "dog"], reject=np.inf).tolist() == ["unknown", "unknown"]
    assert model.predict(["the cat"], reject=np.inf, unknown="other thing").tolist() == [
        "other thing"
    ]
    assert model.predict(["a cat"], reject=np.inf, unknown=-1).tolist() == [-1]
    numbers = small().fit([[0.0, 1.0], [1.0, 0.0]], [3.0, 4.0])
    assert numbers.predict([[0.0, 1.0]], reject=np.inf).tolist() == [-1.0]
    mixed = numbers.predict([[0.0, 1.0]], reject=-np.inf, unknown="none").tolist()
    assert mixed == [3.0]


# -------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"epochs": 0}, ValueError, "expects epochs to be a whole number of 1 or more, got 0"),
        ({"batch_size": 2.5}, ValueError, "expects batch_size to be a whole number .* got 2.5"),
        ({"hidden_layer_sizes": 5}, ValueError, r"hidden_layer_sizes .* of 1 or more, got 5"),
        ({"hidden_layer_sizes": (8, 0)}, ValueError, r"of 1 or more, got \(8, 0\)"),
        ({"loss": 3}, TypeError, "expects a loss as text or made of terms, .* got int"),
        ({"loss": "nca()"}, ValueError, r"a term that classifies, .* got nca\("),
        ({"loss": "cosfase()"}, ValueError, "there is no 'cosfase' .* cosface"),
        ({"loss": "arcface()", "head": "linear()"}, ValueError, "arcface"),
        ({"learning_rate": 1e300}, ValueError, "diverged in epoch .: try a learning_rate below"),
    ],
)
def test_it_says_what_is_wrong_with_a_setting(settings, kind, message):
    with pytest.raises(kind, match=message):
        small(**settings).fit([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], [0, 1, 0])


def test_it_says_what_is_wrong_with_a_call():
    model = small().fit([[0.0, 1.0], [1.0, 0.0]], [0, 1])
    with pytest.raises(ValueError, match="not among the classes, got 1"):
        model.predict([[0.0, 1.0]], reject=0.5, unknown=1)
    with pytest.raises(ValueError, match="expects 0 < recall <= 1, got 95"):
        model.rejection_threshold([[0.0, 1.0]], recall=95)
    with pytest.raises(ValueError, match=r"at least 2 classes .* got 1 class"):
        small().fit([[0.0, 1.0], [1.0, 0.0]], [0, 1], sample_weight=[1, 0])


def test_without_scikit_learn_it_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "tammes.integrations.sklearn")
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    with pytest.raises(ImportError, match=r"pip install 'tammes\[sklearn\]'"):
        importlib.import_module("tammes.integrations.sklearn")


@pytest.mark.slow
def test_it_needs_no_other_package_of_the_lab():
    code = """
import sys
for name in ("datasets", "jinja2", "lightning", "matplotlib", "plotly", "yaml", "rich"):
    sys.modules[name] = None
from tammes.integrations.sklearn import MarginClassifier
MarginClassifier(epochs=2).fit([[0.0, 1.0], [1.0, 0.0]], [0, 1]).predict([[0.0, 1.0]])
"""
    subprocess.run([sys.executable, "-c", code], check=True)
