"""Texts become calls, losses, heads and schedules; nothing in a text is ever run."""

import math
import sys

import pytest
import torch
from catalogue import TERMS
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import pattern

import tammes
from tammes import losses
from tammes.advise.advice import advise
from tammes.advise.defaults import recommended_scale
from tammes.lab import config
from tammes.lab.config import (
    Call,
    build,
    head_text,
    parse_call,
    parse_calls,
    parse_head,
    parse_loss,
    parse_schedules,
    split_list,
)

COUNTS = [50, 40, 30]


def refused(message):
    """One sentence, by its key words where it has ``...``."""
    return pytest.raises(ValueError, match=pattern(message))


# -- Calls.


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("flip", Call("flip")),
        ("flip()", Call("flip")),
        (" steps([60, 120],\n 0.2) ", Call("steps", ([60, 120], 0.2))),
        ("f(-1, +2.5, 'a', None, True, x=-inf)", Call("f", (-1, 2.5, "a", None, True),
                                                      {"x": -math.inf})),
        ("f(x=(1, (2, 3)))", Call("f", (), {"x": (1, (2, 3))})),
    ],
)  # fmt: skip
def test_a_call_is_a_name_and_plain_values(text, call):
    assert parse_call(text, what="it") == call
    assert parse_call(str(call), what="it") == call


def test_calls_are_joined_by_plus_in_order():
    calls = parse_calls("pad_crop(4) + flip + rotate(degrees=15)", what="augment")
    assert calls == [Call("pad_crop", (4,)), Call("flip"), Call("rotate", (), {"degrees": 15})]


@pytest.mark.parametrize("text", ["", "  ", "none"])
def test_none_is_no_call(text):
    assert parse_calls(text, what="augment") == []


def test_commas_within_brackets_and_quotes_do_not_split():
    text = "softmax, gm_softmax(1, 0), f('a,b', [1, 2]),lm_softmax,"
    assert split_list(text) == ["softmax", "gm_softmax(1, 0)", "f('a,b', [1, 2])", "lm_softmax"]
    assert split_list("") == []


def test_nothing_between_two_commas_is_refused():
    with pytest.raises(
        ValueError, match=r"losses: 'softmax,,cosface' cannot be read at character 9"
    ):
        split_list("softmax,,cosface", what="losses")


# -- Building.


def rotate(degrees, *, fill="mean"):
    return degrees, fill


def with_sizes(labels, batch_size, classes=16, images=4):
    return labels, batch_size, classes, images


TABLE = {"rotate": rotate, "pk": with_sizes, "any": lambda **kw: kw}


def test_build_fills_in_what_is_given_and_leaves_out_what_is_not_taken():
    given = {"labels": "L", "batch_size": 8, "seed": 3}
    assert build("pk(8, images=2)", TABLE, what="sampler", **given) == ("L", 8, 8, 2)
    assert build("rotate(15)", TABLE, what="sampler", **given) == (15, "mean")
    assert build("any(x=1)", TABLE, what="sampler", **given) == {"x": 1, **given}
    assert build(Call("rotate", (3,)), TABLE, what="sampler") == (3, "mean")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rotat(15)", "there is no augment 'rotat'; did you mean rotate?"),
        ("Rotate(15)", "... augment ... 'Rotate' ... rotate ..."),
        ("zzz", "there is no augment 'zzz'; there are any, pk, rotate"),
        ("rotate(15, fil='zero')", "augment: rotate has no setting 'fil'; did you mean fill?"),
        ("rotate(15, 'zero')", "augment: rotate takes at most 1 positional setting, "
                               "got \"rotate(15, 'zero')\""),
        ("rotate()", "augment: rotate expects degrees, got none"),
        ("rotate(15, degrees=3)", "augment: rotate is given degrees twice"),
        ("rotate(15, fill=zero)", "augment ... quotes ... 'zero' in 'rotate(15, fill=zero)'"),
        ("pk(labels=3)", "augment: pk ... 'labels' ... batch_size ..."),
        ("rotate(15", "augment: 'rotate(15' cannot be read at character 7: "
                      "'(' was never closed"),
        ("rotate)15", "augment: 'rotate)15' ... character 7 ..."),
        ("rotate(15, fill='zero)", "augment: ... fill='zero ... character 17 ..."),
        ("rotate(15) rotate(3)", "augment: 'rotate(15) rotate(3)' ... character 12 ..."),
        ("rotate(degrees=1, degrees=2)", "augment: degrees is given twice in "
                                         "'rotate(degrees=1, degrees=2)'"),
        ("", "augment is expected, got nothing"),
    ],
)  # fmt: skip
def test_build_says_what_is_wrong(text, message):
    with refused(message):
        build(text, TABLE, what="augment", labels=0)


def test_a_word_where_a_number_belongs_is_a_value_error():
    with pytest.raises(ValueError, match=r"law: power\('a'\): can only concatenate"):
        build("power('a')", {"power": lambda exponent: exponent + 1}, what="law")


# -- Losses.


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        ("softmax", tammes.softmax()),
        ("cosface(0.2)", tammes.cosface(margin=0.2)),
        (
            "cosface(margin=0.35) + 0.5*sample_margin()",
            tammes.cosface() + 0.5 * tammes.sample_margin(),
        ),
        ("sample_margin * 0.5 - softmax", 0.5 * tammes.sample_margin() - tammes.softmax()),
        ("-softmax()", -tammes.softmax()),
        ("2 * 0.25 * (softmax + bce)", 0.5 * (tammes.softmax() + tammes.bce())),
        ("gm_softmax(beta2=-inf)", tammes.gm_softmax(beta2=-math.inf)),
        ("cosface(margin=[0.1, 0.2, 0.3])", tammes.cosface(margin=[0.1, 0.2, 0.3])),
        ("direct_sum(softmax, nca())", tammes.direct_sum(tammes.softmax(), tammes.nca())),
        (
            "0.5 * spectral_sum(classification=softmax() + zero_centroid, metric=2*proto, p=0.1)",
            0.5
            * tammes.spectral_sum(
                tammes.softmax() + tammes.zero_centroid(), 2 * tammes.proto(), p=0.1
            ),
        ),
    ],
)
def test_a_loss_is_read_as_python_would(text, loss):
    assert parse_loss(text) == loss


@pytest.mark.parametrize("term", TERMS.values(), ids=TERMS)
def test_every_term_reads_back_what_it_prints(term):
    assert parse_loss(repr(term)) == term


def _sums(weights):
    leaves = st.sampled_from(list(TERMS.values()))
    metric = st.sampled_from([t for t in TERMS.values() if t.definition.on == "features"])
    split = st.sampled_from([t for t in TERMS.values() if t.definition.on != "features"])
    projected = st.one_of(
        st.builds(tammes.direct_sum, split, metric, eps=st.sampled_from([None, 0.01])),
        st.builds(tammes.spectral_sum, split, metric, p=st.sampled_from([0.0, 0.3, 1.0])),
    )
    part = st.one_of(leaves, projected)
    weighted = st.one_of(part, st.builds(lambda w, p: w * p, weights, part))
    return st.lists(weighted, min_size=1, max_size=5).map(sum)


_SIX_DIGITS = st.floats(-1e9, 1e9).map(lambda weight: float(f"{weight:g}"))


@given(_sums(_SIX_DIGITS))
@settings(max_examples=200, deadline=None)
def test_a_random_sum_reads_back_what_it_prints(loss):
    # Compared by weights and terms: a sum of one part with weight 1 prints as that part.
    assert list(parse_loss(repr(loss)).leaves()) == list(loss.leaves())


def test_a_weight_reads_back_with_all_its_digits():
    loss = (1 / 3) * tammes.softmax()
    assert parse_loss(repr(loss)) == loss


def test_counts_are_filled_in_where_a_term_has_none():
    assert parse_loss("ldam", counts=COUNTS) == tammes.ldam(counts=COUNTS)
    assert parse_loss("ldam(max_margin=0.3)", counts=COUNTS) == tammes.ldam(COUNTS, max_margin=0.3)
    assert parse_loss("ldam([1, 2, 3])", counts=COUNTS) == tammes.ldam([1, 2, 3])
    assert parse_loss("ldam(counts=[1, 2, 3])", counts=COUNTS) == tammes.ldam([1, 2, 3])
    assert parse_loss("softmax", counts=COUNTS) == tammes.softmax()


def test_a_long_sum_is_not_a_deep_one():
    loss = parse_loss(" + ".join(["softmax()"] * 500))
    assert len(list(loss.leaves())) == 500


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cosfce(margin=0.2)", "loss: there is no 'cosfce' in 'cosfce(margin=0.2)'; "
                               "did you mean cosface?"),
        ("CosFace", "loss ... 'CosFace' ... cosface ..."),
        ("softmax + spectralsum(bce)", "loss ... 'spectralsum' ... spectral_sum ..."),
        ("qqqqq", "loss: there is no 'qqqqq' in 'qqqqq'; `tammes losses` lists them"),
        ("softmax, bce", "loss: one is expected, got 'softmax, bce'; "
                         "`tammes compare --losses` takes several"),
        ("cosface(margn=0.2)", "loss: cosface ... 'margn' ... margin ..."),
        ("cosface(0.2, 0.3)", "loss: cosface takes at most 1 positional setting, "
                              "got 'cosface(0.2, 0.3)'"),
        ("lm_softmax(3)", "loss: lm_softmax takes no setting, got 'lm_softmax(3)'"),
        ("ldam()", "loss: ldam ... counts ... none"),
        ("cosface('a')", "cosface ... margin ... 'a'"),
        ("softmax + 3", "loss ... terms ... 'softmax + 3'"),
        ("softmax*cosface", "loss ... terms ... 'softmax*cosface'"),
        ("3", "loss ... term ... '3'"),
        ("inf*softmax", "... weight ... inf"),
        ("softmax/2", "loss ... terms ... 'softmax/2'"),
        ("direct_sum(nca, softmax)", "direct_sum ... classification ... nca(...)"),
        ("direct_sum(softmax, 3)", "loss: direct_sum(... direct_sum ... metric ... 3.0"),
        ("", "loss ... nothing"),
    ],
)  # fmt: skip
def test_parse_loss_says_what_is_wrong(text, message):
    with refused(message):
        parse_loss(text)


# -- Nothing is run.

HOSTILE = [
    "__import__('os').system('touch {mark}')",
    "open('{mark}', 'w')",
    "exec(\"open('{mark}', 'w')\")",
    "softmax.__class__",
    "softmax.__globals__['sys']",
    "softmax().definition.function(1)",
    "().__class__.__bases__[0].__subclasses__()",
    "cosface(margin=__import__('os').getpid())",
    "cosface(margin=open('{mark}', 'w'))",
    "cosface(margin=[open('{mark}', 'w') for _ in (1,)])",
    "cosface(**{'margin': 1})",
    "cosface(*[0.2])",
    "cosface[0]",
    "(lambda: open('{mark}', 'w'))()",
    "[softmax for softmax in (1, 2)]",
    "{softmax: 1 for softmax in (1,)}",
    "(softmax for _ in (1,))",
    "f'{open(1)}'",
    "cosface(margin=f'{1}')",
    "9**9**9**9 * softmax",
    "cosface(margin=9**9**9**9)",
    "'a' * 10**9",
    "softmax << 100000",
    "softmax if 1 else bce",
    "softmax and bce",
    "softmax == bce",
    "not softmax",
    "(x := softmax)",
    "await softmax",
    "yield softmax",
    "...",
    "1j * softmax",
    "b'a' * softmax",
    "cosface(margin=1j)",
    "import os",
    "softmax; import os",
    "softmax\nimport os",
    "9" * 5000 + "*softmax",
    "9" * 400 + "*softmax",
    "softmax\0",
    "softmax # and more\n+ __import__('os')",
]


SENTENCE = r"\A[^\n]{1,400}\Z"
READERS = {
    "loss": parse_loss,
    "head": lambda text: parse_head(text, tammes.softmax(), 4, 3),
    "schedules": lambda text: parse_schedules(f"margin={text}", steps_per_epoch=1),
    "calls": lambda text: [build(c, TABLE, what="augment") for c in parse_calls(text, what="it")],
    "build": lambda text: build(text, TABLE, what="backbone"),
}


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_what_is_not_a_sum_of_known_calls_is_refused_and_not_run(text, read, tmp_path):
    mark = tmp_path / "mark"
    with pytest.raises(ValueError, match=SENTENCE):
        read(text.replace("{mark}", str(mark)))
    assert not mark.exists()


@pytest.mark.parametrize(
    "text",
    [
        "(" * 200 + "softmax" + ")" * 200,
        "-" * 9000 + "softmax",
        "- " * 4000 + "softmax",
        "not " * 2000 + "softmax",
        "cosface(" * 60 + ")" * 60,
        "softmax" + ".x" * 4000,
        "softmax" + "()" * 4000,
        "softmax+" * 1200 + "softmax" + "(" * 51 + ")" * 51,
        "lambda:" * 1400 + "softmax",
        "2**" * 3000 + "2",
        "cosface(margin=" + "[" * 90 + "]" * 90 + ")",
        "direct_sum(" * 51 + "softmax" + ", nca)" * 51,
    ],
)
def test_what_is_nested_too_deep_is_refused(text):
    with pytest.raises(ValueError, match=r"nested at most 50 deep|expects|cannot be read"):
        parse_loss(text)


def test_fifty_deep_is_read():
    assert parse_loss("(" * 50 + "softmax" + ")" * 50) == tammes.softmax()
    assert parse_loss("-" * 50 + "softmax") == tammes.softmax() * 1.0


def test_a_long_text_is_refused_before_it_is_parsed(monkeypatch):
    def never(*_, **__):
        raise AssertionError

    monkeypatch.setattr("ast.parse", never)
    with pytest.raises(ValueError, match="loss is expected to have at most 10000 characters"):
        parse_loss("softmax() + " * 1000 + "softmax()")


def test_reading_imports_nothing_by_name():
    before = set(sys.modules)
    with pytest.raises(ValueError, match="there is no 'antigravity'"):
        parse_loss("antigravity()")
    assert "antigravity" not in set(sys.modules) - before


@given(st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_is_a_loss_or_a_value_error(text):
    try:
        outcome = parse_loss(text)
    except ValueError as error:
        outcome = str(error)
    assert isinstance(outcome, tammes.Loss) or "\n" not in outcome


# -- Heads.


@pytest.mark.parametrize("name", losses.__all__)
def test_auto_gives_a_head_that_the_criterion_accepts(name):
    loss = parse_loss(name, counts=COUNTS)
    criterion = tammes.Criterion(parse_head("auto", loss, 5, 3), loss)
    value = criterion(torch.randn(6, 5), torch.tensor([0, 1, 2, 0, 1, 2]))
    assert value.isfinite()


READY = {
    tammes.Softmax: "softmax",
    tammes.LSoftmax: "l_softmax",
    tammes.SphereFace: "sphereface",
    tammes.NormFace: "normface",
    tammes.CosFace: "cosface",
    tammes.ArcFace: "arcface",
    tammes.CombinedMargin: "combined_margin",
    tammes.GMSoftmax: "gm_softmax",
    tammes.LMSoftmax: "lm_softmax",
    tammes.LDAM: "ldam",
    tammes.LargeMarginGaussian: "large_margin_gaussian",
}


@pytest.mark.parametrize("kind", READY, ids=lambda kind: kind.__name__)
def test_auto_is_the_head_of_the_ready_made_criterion(kind):
    options = {"counts": COUNTS} if kind is tammes.LDAM else {}
    expected = kind(5, 3, **options).head
    head = parse_head("auto", parse_loss(READY[kind], counts=COUNTS), 5, 3)
    assert type(head) is type(expected)
    assert type(head.similarity) is type(expected.similarity)
    assert head.similarity.is_cosine == expected.similarity.is_cosine
    assert (head.bias is None) == (expected.bias is None)
    if not head.similarity.is_cosine:
        assert head.scale == expected.scale


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("direct_sum(softmax, nca)", "linear(bias=False, scale=1.0)"),
        ("spectral_sum(softmax, nca)", "linear(bias=False, scale=1.0)"),
        ("spectral_sum(cosface, nca)", "cosine(scale=30.0)"),
        ("spectral_sum(normface, nca)", "cosine(scale=20.0)"),
        ("nca", "linear(bias=False, scale=1.0)"),
        ("zero_centroid", "linear(bias=False, scale=1.0)"),
        ("softmax + 0.3*logit_divergence", "linear(bias=True, scale=1.0)"),
        ("softmax + lm_softmax", "cosine(scale=20.0)"),
        ("softmax + 0.1*l_softmax(margin=2)", "linear(bias=False, scale=1.0)"),
        ("sample_margin() + cosface(margin=0.1)", "cosine(scale=30.0)"),
        ("sphereface + sample_margin", "cosine(scale=1.0, normalize_features=False)"),
    ],
)
def test_auto_follows_the_main_term_of_a_sum(text, expected):
    assert head_text(parse_head("auto", parse_loss(text), 5, 3)) == expected


def test_auto_says_why_no_head_fits():
    loss = parse_loss("direct_sum(softmax, nca)")
    with pytest.raises(ValueError, match="direct_sum expects more dimensions than classes"):
        parse_head("auto", loss, 3, 10)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("linear(bias=False, scale=5)", "linear(bias=False, scale=5.0)"),
        ("cosine(scale=30)", "cosine(scale=30.0)"),
        ("cosine(scale='learnable')", "cosine(scale='learnable')"),
        ("cosine(normalize_features=False)", "cosine(scale=1.0, normalize_features=False)"),
        ("cosine(subcenters=3, scale=8)", "cosine(scale=8.0, subcenters=3)"),
        (
            "cosine(scale=8, subcenters=2, pooling='soft', temperature=0.2)",
            "cosine(scale=8.0, subcenters=2, pooling='soft', temperature=0.2)",
        ),
        ("simplex(scale=8, implementation='dense')", "simplex(scale=8.0, implementation='dense')"),
        ("gaussian()", "gaussian(scale=1.0)"),
    ],
)
def test_a_head_is_read_and_prints_as_what_it_was_read_from(text, expected):
    head = parse_head(text, tammes.softmax(), 5, 3)
    assert head_text(head) == expected
    assert head_text(parse_head(expected, tammes.softmax(), 5, 3)) == expected


@pytest.mark.parametrize(
    "name", ["cosface", "arcface", "lm_softmax", "normface", "combined_margin"]
)
@pytest.mark.parametrize(("dim", "classes"), [(3, 10), (128, 10), (512, 10_000)])
def test_the_scale_is_the_one_that_is_advised_for_that_margin(name, dim, classes):
    settings = {"combined_margin": {"m2": 0.3, "m3": 0.2}}.get(name, {})
    loss = getattr(tammes, name)(**settings)
    margin = None
    if name in ("cosface", "arcface"):
        margin = loss.settings["margin"]
    elif name == "combined_margin":
        margin = 0.2
    advice = advise(classes, dim, loss=name, margin=margin)
    assert recommended_scale(loss, dim, classes) == advice.scale


def test_a_softmax_on_a_cosine_head_has_the_scale_of_normface():
    head = parse_head("cosine", tammes.softmax(), 3, 10)
    assert head.scale == recommended_scale(tammes.normface(), 3, 10) > 1


def test_a_larger_margin_takes_a_larger_scale():
    scales = [
        recommended_scale(parse_loss(f"cosface(margin={m})"), 3, 10) for m in (0, 0.2, 0.35, 0.5)
    ]
    assert scales == sorted(scales)
    assert scales[0] < scales[-1]


def test_a_scale_that_is_given_holds_unless_the_text_has_one():
    assert parse_head("cosine(scale=12)", tammes.cosface(), 3, 10).scale == 12


def test_asking_for_a_head_draws_numbers_for_that_head_only():
    torch.manual_seed(0)
    expected = tammes.CosineHead(5, 3).weight
    torch.manual_seed(0)
    head = parse_head("auto", parse_loss("softmax + lm_softmax"), 5, 3)
    torch.testing.assert_close(head.weight, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cosin(scale=30)", "... head ... 'cosin' ... cosine ..."),
        ("cosine(scal=30)", "head: cosine ... 'scal' ... scale ..."),
        ("cosine(scale=-1)", "CosineHead ... scale ... -1"),
        ("cosine(3, 4)", "head: cosine takes keyword settings only, such as scale, "
            "got 'cosine(3, 4, scale=20.0)'"),
        ("linear()", "lm_softmax ... head ... LinearHead"),
    ],
)  # fmt: skip
def test_parse_head_says_what_is_wrong(text, message):
    loss = tammes.lm_softmax() if text == "linear()" else tammes.softmax()
    with refused(message):
        parse_head(text, loss, 5, 3)


# -- Schedules.


def test_epochs_become_steps():
    found = parse_schedules(
        "margin=WarmUp(0, 0.35, epochs=5, delay_epochs=1.5, shape='cosine'), "
        "blend=LambdaDecay(epochs=20, start=999), "
        "class_weights=DeferredReweighting(start_epochs=3)",
        steps_per_epoch=10,
        counts=[1000, 10],
    )
    margin, blend, weights = found["margin"], found["blend"], found["class_weights"]
    assert (margin.start, margin.end, margin.length, margin.delay) == (0, 0.35, 50, 15)
    assert (blend.total_steps, blend.start) == (200, 999)
    assert weights.start == 30
    torch.testing.assert_close(
        weights.weights, tammes.schedules.DeferredReweighting([1000, 10], start=30).weights
    )


def test_steps_stay_steps():
    found = parse_schedules("margin=WarmUp(0, 0.35, steps=7, delay=2)", steps_per_epoch=10)
    assert (found["margin"].length, found["margin"].delay) == (7, 2)


@pytest.mark.parametrize("text", ["", "none"])
def test_there_may_be_no_schedule(text):
    assert parse_schedules(text, steps_per_epoch=10) == {}


def test_every_schedule_of_the_library_can_be_named():
    assert set(config.SCHEDULES) == {
        "LambdaAnnealing",
        "LambdaDecay",
        "WarmUp",
        "DeferredReweighting",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("margin=WarmUpp(0, 1, epochs=1)", "... schedule ... 'WarmUpp' ... WarmUp ..."),
        ("margin=WarmUp(0, 1, epoch=1)", "schedule: WarmUp ... 'epoch' ... delay ..."),
        ("margin=WarmUp(0, 1, epochs=-1)", "schedules: WarmUp ... epochs ... -1"),
        ("margin=WarmUp(0, 1, epochs='a')", "schedules: WarmUp ... epochs ... 'a'"),
        ("margin=WarmUp(0, 1, epochs=1, steps=3)", "schedules: WarmUp is given steps twice"),
        ("margin=WarmUp(0, 1, steps=0)", "WarmUp ... steps=0 ... delay=0"),
        ("WarmUp(0, 1, epochs=1)", "schedules ... parts ... 'WarmUp(0, 1, epochs=1)'"),
        ("a=LambdaAnnealing(), a=LambdaAnnealing()", "schedules: a is given twice in "
                                                     "'a=LambdaAnnealing(), a=LambdaAnnealing()'"),
    ],
)  # fmt: skip
def test_parse_schedules_says_what_is_wrong(text, message):
    with refused(message):
        parse_schedules(text, steps_per_epoch=10)
