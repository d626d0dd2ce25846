"""What was trained with another library scores and trains here as it did there."""

import math
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning import distances, losses, reducers, regularizers
from torch.testing import assert_close

import tammes
from tammes.convert import from_insightface, from_pytorch_metric_learning

SIZE, CLASSES = 6, 9

# Settings other than the defaults, so that a forgotten one shows.
PEERS = {
    "ArcFaceLoss": {"margin": 40.0, "scale": 12.0},
    "SubCenterArcFaceLoss": {"margin": 40.0, "scale": 12.0, "sub_centers": 4},
    "SoftTripleLoss": {"margin": 0.1, "la": 8.0, "gamma": 0.3, "centers_per_class": 3},
    "CosFaceLoss": {"margin": 0.25, "scale": 12.0},
    "NormalizedSoftmaxLoss": {"temperature": 0.2},
    "LargeMarginSoftmaxLoss": {"margin": 3, "scale": 0.7},
    "SphereFaceLoss": {"margin": 2, "scale": 1.5},
}


def live_loss(name, **settings):
    with warnings.catch_warnings():
        # Two of their constructors use what NumPy 2 deprecates.
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(losses, name)(num_classes=CLASSES, embedding_size=SIZE, **settings)


def named_here(settings):
    names = {"sub_centers": "subcenters", "centers_per_class": "subcenters"}
    return {
        (names | {"la": "scale", "gamma": "temperature"}).get(k, k): v for k, v in settings.items()
    }


@pytest.fixture
def batch(generator):
    # Enough rows that some are past pi with their margin.
    features = torch.randn(64, SIZE, generator=generator)
    return features, torch.arange(64) % CLASSES


def value_and_gradients(criterion, weight, features, labels):
    features = features.clone().requires_grad_()
    loss = criterion(features, labels)
    return loss.detach(), *torch.autograd.grad(loss, [features, weight])


# ------------------------------------------------------------------------ pytorch-metric-learning


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("given", ["live", "state_dict"])
def test_value_and_gradients_are_those_of_pytorch_metric_learning(name, given, batch):
    theirs = live_loss(name, **PEERS[name])
    if given == "live":
        ours = from_pytorch_metric_learning(theirs)
    else:
        ours = from_pytorch_metric_learning(theirs.state_dict(), name, **named_here(PEERS[name]))
    loss, d_features, d_weight = value_and_gradients(ours, ours.head.weight, *batch)
    weight = theirs.fc if name == "SoftTripleLoss" else theirs.W
    wanted, wanted_d_features, wanted_d_weight = value_and_gradients(theirs, weight, *batch)
    assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
    assert_close(d_features, wanted_d_features, rtol=1e-5, atol=1e-5)
    assert_close(d_weight.flatten(0, -2), wanted_d_weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PEERS)
def test_scores_without_margin_are_those_of_pytorch_metric_learning(name, batch):
    theirs = live_loss(name, **PEERS[name])
    ours = from_pytorch_metric_learning(theirs)
    # Those of SoftTripleLoss are without its scale.
    factor = theirs.la if name == "SoftTripleLoss" else 1.0
    assert_close(ours.logits(batch[0]), factor * theirs.get_logits(batch[0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PEERS)
def test_settings_not_given_are_the_defaults_of_pytorch_metric_learning(name, batch):
    theirs = live_loss(name)
    ours = from_pytorch_metric_learning(theirs.state_dict(), name)
    assert_close(ours(*batch), theirs(*batch), rtol=1e-5, atol=1e-5)


def test_some_of_the_batch_is_past_pi_where_continuations_differ(batch):
    theirs = live_loss("ArcFaceLoss", **PEERS["ArcFaceLoss"])
    ours = from_pytorch_metric_learning(theirs)
    other = tammes.Criterion(ours.head, tammes.arcface(margin=math.radians(40.0)))
    assert abs(ours(*batch) - other(*batch)) > 1e-3


def test_a_sum_reducer_becomes_the_sum(batch):
    theirs = live_loss("CosFaceLoss", reducer=reducers.SumReducer())
    assert_close(from_pytorch_metric_learning(theirs)(*batch), theirs(*batch))


@pytest.mark.parametrize("prefix", ["loss.", "criterion.loss.module."])
def test_the_weight_is_found_behind_a_prefix(prefix):
    weight = torch.randn(SIZE, CLASSES)
    saved = {"trunk.weight": torch.ones(3, 3), "trunk.QW": torch.ones(3, 3), f"{prefix}W": weight}
    ours = from_pytorch_metric_learning(saved, "CosFaceLoss")
    assert torch.equal(ours.head.weight, weight.T)


def test_one_of_two_weights_is_chosen_by_its_key():
    first, second = torch.randn(2, SIZE, CLASSES)
    saved = {"a.W": first, "b.W": second}
    ours = from_pytorch_metric_learning(saved, "CosFaceLoss", key="b.W")
    assert torch.equal(ours.head.weight, second.T)


def test_training_the_converted_head_leaves_the_source_alone():
    # A weight saved transposed is already laid out as ours and tempts to share it.
    weight = torch.randn(CLASSES, SIZE).T
    before = weight.clone()
    ours = from_pytorch_metric_learning({"W": weight}, "CosFaceLoss")
    with torch.no_grad():
        ours.head.weight += 1
    assert torch.equal(weight, before)


def test_half_precision_is_widened_and_double_is_kept():
    for saved, here in ((torch.float16, torch.float32), (torch.float64, torch.float64)):
        weight = torch.randn(SIZE, CLASSES).to(saved)
        ours = from_pytorch_metric_learning({"W": weight}, "CosFaceLoss")
        assert ours.head.weight.dtype == here
        assert torch.equal(ours.head.weight, weight.T.to(here))


def test_the_converted_criterion_saves_loads_and_trains(batch):
    ours = from_pytorch_metric_learning(live_loss("ArcFaceLoss"))
    # Their default scale, which no state_dict holds.
    fresh = tammes.ArcFace(SIZE, CLASSES, margin=math.radians(28.6), scale=64.0, extension="linear")
    fresh.load_state_dict(ours.state_dict())
    assert_close(fresh(*batch), ours(*batch))
    assert [p.is_leaf and p.requires_grad for p in ours.parameters()] == [True]


def test_converting_draws_no_random_numbers():
    saved = live_loss("LargeMarginSoftmaxLoss").state_dict()
    before = torch.get_rng_state()
    from_pytorch_metric_learning(saved, "LargeMarginSoftmaxLoss")
    assert torch.equal(torch.get_rng_state(), before)


def test_options_reach_the_criterion():
    saved = {"W": torch.randn(SIZE, CLASSES)}
    ours = from_pytorch_metric_learning(saved, "CosFaceLoss", reduction="none", ignore_index=-1)
    assert (ours.reduction, ours.ignore_index) == ("none", -1)


def test_proxy_nca_is_normface_at_twice_its_scale_as_the_error_says(batch):
    theirs = live_loss("ProxyNCALoss", softmax_scale=3.0)
    ours = tammes.NormFace(SIZE, CLASSES, scale=6.0)
    ours.load_state_dict({"head.weight": theirs.proxies})
    assert_close(ours(*batch), theirs(*batch), rtol=1e-5, atol=1e-5)


def test_a_margin_that_looks_like_radians_warns():
    saved = {"W": torch.randn(SIZE, CLASSES)}
    with pytest.warns(UserWarning, match=r"ArcFaceLoss in degrees, .* got 0\.5"):
        ours = from_pytorch_metric_learning(saved, "ArcFaceLoss", margin=0.5)
    assert ours.loss.settings["margin"] == pytest.approx(math.radians(0.5))


WEIGHT = torch.ones(SIZE, CLASSES)


@pytest.mark.parametrize(
    ("saved", "arguments", "message"),
    [
        ({"W": WEIGHT}, {}, "expects the name of the loss"),
        ({"W": WEIGHT}, {"loss": "ArcFace"}, r"got 'ArcFace'; did you mean 'ArcFaceLoss'"),
        ({"W": WEIGHT}, {"loss": "cosfaceloss"}, r"did you mean 'CosFaceLoss'"),
        ({"W": WEIGHT}, {"loss": "LSoftmaxLoss"}, r"did you mean .*'LargeMarginSoftmaxLoss'"),
        ({"W": WEIGHT}, {"loss": "xyz"}, r"expects one of ArcFaceLoss, .*, got 'xyz'$"),
        (
            {"W": WEIGHT},
            {"loss": "SubCenterArcFaceLoss", "subcenters": 2},
            r"shape \(D, C \* 2\), 2 prototypes per class, got \(6, 9\)$",
        ),
        ({"W": WEIGHT}, {"loss": "CosFaceLoss", "subcenters": 2}, "CosFaceLoss has margin and sc"),
        ({"W": WEIGHT}, {"loss": "ProxyNCALoss"}, r"NormFace of scale 2 \* softmax_scale"),
        (
            {"weight": WEIGHT, "bias": WEIGHT},
            {"loss": "CosFaceLoss"},
            r"expects a key 'W' or one ending in '\.W', got weight, bias$",
        ),
        ({}, {"loss": "CosFaceLoss"}, "got an empty state dict"),
        ({"a.W": WEIGHT, "b.W": WEIGHT}, {"loss": "CosFaceLoss"}, r"got a\.W, b\.W: .* key="),
        ({"W": WEIGHT}, {"loss": "CosFaceLoss", "key": "b.W"}, r"expects the key 'b\.W', got W$"),
        ({"W": WEIGHT[0]}, {"loss": "CosFaceLoss"}, r"shape \(D, C\), got shape \(9,\) of"),
        ({"W": WEIGHT.int()}, {"loss": "CosFaceLoss"}, r"float tensor .* of torch\.int32$"),
        ({"W": [1.0]}, {"loss": "CosFaceLoss"}, r"expects W to be a float tensor .* got list$"),
        ({"W": WEIGHT * math.nan}, {"loss": "CosFaceLoss"}, "expects finite prototypes, got NaN"),
        ({"W": WEIGHT[:, :1]}, {"loss": "CosFaceLoss"}, "at least 2 classes, got num_classes=1"),
        (
            {"W": WEIGHT.T},
            {"loss": "CosFaceLoss", "num_classes": CLASSES},
            r"shape \(D, 9\), got \(9, 6\): is it transposed\?",
        ),
        (
            {"W": WEIGHT},
            {"loss": "CosFaceLoss", "num_classes": 5},
            r"shape \(D, 5\), got \(6, 9\)$",
        ),
        (
            {"W": WEIGHT},
            {"loss": "NormalizedSoftmaxLoss", "margin": 0.1, "scale": 2.0},
            "NormalizedSoftmaxLoss has temperature, got margin, scale",
        ),
        (
            {"W": WEIGHT},
            {"loss": "NormalizedSoftmaxLoss", "temperature": 0.0},
            "expects temperature above 0",
        ),
        (
            {"W": WEIGHT},
            {"loss": "SphereFaceLoss", "margin": 1.5},
            "SphereFaceLoss expects a whole number as margin, got 1.5",
        ),
        ({"W": WEIGHT}, {"loss": "CosFaceLoss", "scale": 0.0}, "scale above 0, got 0.0"),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused_in_a_sentence(saved, arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        from_pytorch_metric_learning(saved, **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.TripletMarginLoss(), r"expects one of .*, got 'TripletMarginLoss'"),
        (
            lambda: live_loss("CosFaceLoss", weight_regularizer=regularizers.LpRegularizer()),
            r"with no weight_regularizer, got LpRegularizer: its state_dict\(\)",
        ),
        (
            lambda: live_loss("CosFaceLoss", embedding_regularizer=regularizers.LpRegularizer()),
            "with no embedding_regularizer",
        ),
        (
            lambda: live_loss("CosFaceLoss", reducer=reducers.ThresholdReducer(low=0.1)),
            "with a MeanReducer or a SumReducer, got ThresholdReducer",
        ),
        (
            lambda: live_loss("NormalizedSoftmaxLoss", distance=distances.LpDistance()),
            "plain cosines as its distance, got LpDistance",
        ),
        (
            lambda: live_loss(
                "NormalizedSoftmaxLoss",
                distance=distances.DotProductSimilarity(normalize_embeddings=False),
            ),
            "got an altered DotProductSimilarity",
        ),
        (
            lambda: live_loss("CosFaceLoss", distance=distances.CosineSimilarity(power=2)),
            "got an altered CosineSimilarity",
        ),
    ],
)
def test_a_live_loss_without_a_counterpart_is_refused_in_a_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        from_pytorch_metric_learning(make())


@pytest.mark.parametrize(
    "extra", [{"loss": "CosFaceLoss"}, {"margin": 0.1}, {"scale": 2.0}, {"key": "W"}]
)
def test_settings_beside_a_live_loss_are_refused(extra):
    with pytest.raises(ValueError, match="only options together with a live CosFaceLoss"):
        from_pytorch_metric_learning(live_loss("CosFaceLoss"), **extra)


def test_another_kind_of_source_is_refused():
    with pytest.raises(TypeError, match="expects a state dict or a live loss, got str"):
        from_pytorch_metric_learning("loss.pt")


# ------------------------------------------------------------------------------------ InsightFace


def insightface_logits(features, centres, labels, m2, m3, scale):
    """Its margins by their formula; the angular one takes no part in the gradient."""
    cosine = F.linear(F.normalize(features), F.normalize(centres))
    own = F.one_hot(labels, len(centres)).to(cosine.dtype)
    bent = (cosine.detach().double().acos() + m2).cos().to(cosine.dtype)
    return scale * (cosine + own * ((bent - cosine).detach() - m3))


def shares(weight, ranks):
    """Shards as Partial FC deals out its classes."""
    return list(torch.tensor_split(weight, ranks))


@pytest.fixture
def near_batch(batch, generator):
    # Nearer to the own centre than pi - m2, beyond which the original rises again.
    centres = torch.randn(CLASSES, SIZE, generator=generator)
    features, labels = batch
    return centres, features + centres[labels], labels


@pytest.mark.parametrize("margins", [(1.0, 0.5, 0.0), (1.0, 0.0, 0.4)])
def test_value_and_gradients_are_those_of_insightface(margins, near_batch):
    centres, features, labels = near_batch
    ours = from_insightface([{"weight": s} for s in shares(centres, 2)], margins=margins, scale=9.0)
    theirs = centres.clone().requires_grad_()

    def original(features, labels):
        scores = insightface_logits(features, theirs, labels, *margins[1:], 9.0)
        return F.cross_entropy(scores, labels)

    got = value_and_gradients(ours, ours.head.weight, features, labels)
    wanted = value_and_gradients(original, theirs, features, labels)
    for ours_, theirs_ in zip(got, wanted, strict=True):
        assert_close(ours_, theirs_, rtol=1e-5, atol=1e-5)


def test_the_exact_gradient_is_another_one(near_batch):
    centres, features, labels = near_batch
    gradients = []
    for gradient in ("detached", "exact"):
        criterion = from_insightface({"weight": centres}, gradient=gradient, scale=9.0)
        gradients.append(value_and_gradients(criterion, criterion.head.weight, features, labels))
    (value, *first), (same, *second) = gradients
    assert_close(value, same)
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(first, second, strict=True))


def test_without_margins_it_is_normface(near_batch):
    centres, features, labels = near_batch
    ours = from_insightface({"weight": centres}, margins=(1.0, 0.0, 0.0), scale=9.0)
    normface = tammes.Criterion(ours.head, tammes.normface())
    assert_close(ours(features, labels), normface(features, labels))


@pytest.mark.parametrize("ranks", [1, 2, 4, 9])
def test_ranks_are_joined_in_their_order(ranks):
    centres = torch.randn(CLASSES, SIZE)
    checkpoints = [
        {"epoch": 3, "state_dict_softmax_fc": {"weight": shard}} for shard in shares(centres, ranks)
    ]
    assert torch.equal(from_insightface(checkpoints, num_classes=CLASSES).head.weight, centres)


@pytest.mark.parametrize(
    "wrap",
    [lambda w: w, lambda w: {"weight": w}, lambda w: {"module.weight": w}, lambda w: [w]],
    ids=["tensor", "state dict", "prefix", "list"],
)
def test_a_single_rank_may_be_given_in_any_of_its_forms(wrap):
    centres = torch.randn(CLASSES, SIZE)
    converted = from_insightface(wrap(centres))
    assert torch.equal(converted.head.weight, centres)
    assert converted.head.weight.data_ptr() != centres.data_ptr()


CENTRES = torch.ones(CLASSES, SIZE)


@pytest.mark.parametrize(
    ("state_dicts", "arguments", "message"),
    [
        ([], {}, "expects a state dict for each rank, got none"),
        ({"W": CENTRES}, {}, r"expects a key 'weight' or one ending in '\.weight', got W"),
        ([{"weight": CENTRES[0]}], {}, r"weight of rank 0 .* shape \(C_local, D\)"),
        ([CENTRES[:5], CENTRES[5:, :4]], {}, r"of one embedding size, got \[4, 6\]"),
        (
            [CENTRES[:4], CENTRES[4:]],
            {},
            r"in order, .* got \[4, 5\] classes: 9 .* as \[5, 4\]",
        ),
        ([CENTRES[:4], CENTRES[:4]], {"num_classes": 9}, "expects 9 classes, got 8 on 2 ranks"),
        ([CENTRES * math.inf], {}, "expects finite prototypes"),
        (
            [CENTRES],
            {"margins": (1.0, 0.3, 0.2)},
            r"\(1, m2, 0\) or \(1, 0, m3\).*, got \(1\.0, 0\.3, 0\.2\): InsightFace itself trains",
        ),
        ([CENTRES], {"margins": (1.5, 0.0, 0.0)}, r"got \(1\.5, 0\.0, 0\.0\)$"),
        ([CENTRES], {"margins": (1.0, 0.0, -0.1)}, r"with m3 above 0, got"),
        ([CENTRES], {"margins": (1.0, 0.5)}, "expects three margins"),
        ([CENTRES], {"gradient": "none"}, "gradient 'exact' or 'detached', got 'none'"),
        (
            [CENTRES],
            {"margins": (1.0, 0.0, 0.4), "gradient": "none"},
            "gradient 'exact' or 'detached'",
        ),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused_in_a_sentence(state_dicts, arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        from_insightface(state_dicts, **arguments)
    assert "\n" not in str(caught.value)


def test_file_names_are_not_loaded():
    with pytest.raises(TypeError, match=r"got str for rank 0: load files with torch\.load"):
        from_insightface(["checkpoint_gpu_0.pt"])


def test_checkpoints_survive_a_file_read_with_weights_only(tmp_path):
    centres = torch.randn(CLASSES, SIZE)
    paths = [tmp_path / f"checkpoint_gpu_{rank}.pt" for rank in range(2)]
    for path, shard in zip(paths, shares(centres, 2), strict=True):
        torch.save({"epoch": 1, "state_dict_softmax_fc": {"weight": shard}}, path)
    loaded = [torch.load(path, weights_only=True) for path in paths]
    assert torch.equal(from_insightface(loaded).head.weight, centres)


def test_converting_needs_neither_library():
    code = (
        "import sys; sys.modules.update(pytorch_metric_learning=None, insightface=None); "
        "import tammes, torch; tammes.convert.from_insightface(torch.ones(3, 2)); "
        "tammes.convert.from_pytorch_metric_learning({'W': torch.ones(2, 3)}, 'CosFaceLoss')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
