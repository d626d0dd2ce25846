"""Finite input gives a finite loss and finite gradients: all terms, heads, precisions, cases.

The table of what holds is docs/contract.md, made by ``.venv/bin/python tests/test_contract.py``.
"""

import contextlib
import functools
import math
from pathlib import Path

import pytest
import torch
from catalogue import CLASSES, DENSE_HEADS, FEATURE_TERMS, HEADS, PROTOTYPE_TERMS, TERMS, fits

import tammes
from tammes.angles import shifted_cosine

SIZE, ROWS = 10, 6
DOCUMENT = Path(__file__).parents[1] / "docs" / "contract.md"

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
CASES = {
    "cos = +1": "every feature is its own prototype",
    "cos = −1": "every feature is minus its own prototype",
    "zero feature": "two features of one class are zero",
    "zero prototype": "two prototypes are zero, one of them the own prototype of two examples",
    "s = 1000": "scale 1000; one feature at its prototype, one opposite to it, the rest random",
    "learned s": "the same with a scale that is learned and stands at 1000",
    "C = 2": "two classes",
    "N = 1": "one example",
    "one class": "all examples of one class",
}


def labels_of(case):
    if case == "C = 2":
        return torch.tensor([0, 1, 0, 1, 1, 1])
    if case == "one class":
        return torch.full((ROWS,), 3)
    # The last corner of a simplex is a unit vector of the axes: its cosine is 1 in any precision.
    labels = torch.tensor([CLASSES - 1, CLASSES - 1, 0, 0, 5, 3])
    return labels[:1] if case == "N = 1" else labels


def on_grid(tensor):
    """Numbers that single, half and brain precision all hold exactly."""
    return (tensor * 16).round() / 16


def make_head(name, case, implementation):
    scale = {"scale": "learnable"} if case == "learned s" else {}
    classes = 2 if case == "C = 2" else CLASSES
    head = HEADS[name](SIZE, classes, implementation=implementation, **scale)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        if isinstance(head.weight, torch.nn.Parameter):
            head.weight.copy_(on_grid(torch.randn(head.weight.shape, generator=generator)))
            if case in ("cos = −1", "s = 1000", "learned s") and head.weight.ndim == 3:
                # Behind all centres of its class.
                head.weight.copy_(head.weight[:, :1].clone())
        if head.bias is not None:
            head.bias.normal_(generator=generator)
        if case == "zero prototype":
            head.weight[:2] = 0
    if case in ("s = 1000", "learned s"):
        head.scale = 1000.0
    return head


def make_input(head, labels, case):
    """What the backbone, which changes nothing, is given: the features the case asks for."""
    features = on_grid(torch.randn(len(labels), SIZE, generator=torch.Generator().manual_seed(1)))
    own = head.weight.detach().view(head.num_classes, -1, SIZE)[labels, 0]
    if case == "cos = +1":
        features = own.clone()
    elif case == "cos = −1":
        features = -own
    elif case == "zero feature":
        features[:2] = 0
    elif case in ("s = 1000", "learned s"):
        features[0], features[1] = own[0], -own[1]
    return features


@functools.cache
def make_backbone():
    """A layer that hands on what it is given, in the precision of autocast."""
    backbone = torch.nn.Linear(SIZE, SIZE)
    torch.nn.init.eye_(backbone.weight)
    torch.nn.init.zeros_(backbone.bias)
    return backbone


def on_head(term, head):
    """The term with as many values per class as the head has classes."""
    cut = {key: value[: head.num_classes] for key, value in term.values if isinstance(value, tuple)}
    return term.altered(**cut) if cut else term


def trial(term_name, head_name, implementation, precision, case):
    """What is wrong after one forward and backward; empty where the contract holds."""
    head = make_head(head_name, case, implementation)
    criterion = tammes.Criterion(head, on_head(TERMS[term_name], head))
    labels = labels_of(case)
    inputs = make_input(head, labels, case).requires_grad_()
    backbone = make_backbone()
    backbone.zero_grad()
    dtype = PRECISIONS[precision]
    autocast = torch.autocast("cpu", dtype=dtype) if dtype else contextlib.nullcontext()
    with autocast:
        features = backbone(inputs)
        features.retain_grad()
        loss = criterion(features, labels)
    # On a head without parameters nothing can train, and a term on prototypes has no gradient.
    if loss.requires_grad:
        loss.backward()

    gradients = {"features": features.grad}
    if term_name not in PROTOTYPE_TERMS:
        gradients["inputs"] = inputs.grad
        gradients |= {f"backbone.{name}": p.grad for name, p in backbone.named_parameters()}
    gradients |= {name: p.grad for name, p in criterion.named_parameters()}
    wrong = []
    if features.dtype != (dtype or torch.float32):
        wrong.append(f"features are {features.dtype}")
    if loss.dtype != torch.float32 or not loss.isfinite():
        wrong.append(f"loss is {loss.item()} in {loss.dtype}")
    for name, gradient in gradients.items():
        if gradient is None:
            if due(term_name, name):
                wrong.append(f"no gradient of {name}")
        elif not gradient.isfinite().all():
            wrong.append(f"gradient of {name} is not finite")
    for name, tensor in criterion.state_dict().items():
        # Steps are counted in whole numbers.
        wanted = torch.int64 if name.endswith(".steps") else torch.float32
        if tensor.dtype != wanted or not tensor.isfinite().all():
            wrong.append(f"{name} is {tensor.dtype}, or not finite")
    for name, parameter in criterion.named_parameters():
        if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
            wrong.append(f"gradient of {name} is {parameter.grad.dtype}")
    return wrong


def due(term_name, tensor_name):
    """Whether this tensor must get a gradient: a finite nothing would prove nothing."""
    if tensor_name == "head.weight":
        return term_name not in FEATURE_TERMS
    if tensor_name in ("head.bias", "head.log_scale"):
        return False  # a margin of similarities has no scale, and not every term sees the bias
    return term_name not in PROTOTYPE_TERMS


def implementations(term_name, head_name):
    """Only terms on the split know of implementations, and some heads have one."""
    on_split = TERMS[term_name].definition.on == "split"
    return ("dense", "streamed") if on_split and head_name not in DENSE_HEADS else ("dense",)


@functools.cache
def measure(term_name, head_name):
    """What is wrong in each precision and case, on either implementation."""
    found = {}
    for precision in PRECISIONS:
        for case in CASES:
            found[precision, case] = [
                f"{implementation}: {wrong}"
                for implementation in implementations(term_name, head_name)
                for wrong in trial(term_name, head_name, implementation, precision, case)
            ]
    return found


@functools.cache
def heads_of(term_name):
    return [name for name, make in HEADS.items() if fits(TERMS[term_name], make(SIZE, CLASSES))]


PAIRS = [(term, head) for term in TERMS for head in heads_of(term)]


def a_share_of(term_name, head_name):
    """One trial of each case; the implementation and the precision change from pair to pair.

    Three heads in a row see a term in every precision and on either implementation, in every case.
    """
    ways, precisions = implementations(term_name, head_name), list(PRECISIONS)
    shift = list(TERMS).index(term_name) + heads_of(term_name).index(head_name)
    return [
        (ways[number % len(ways)], precisions[number % len(precisions)], case)
        for number, case in enumerate(CASES, start=shift)
    ]


@pytest.mark.parametrize(("term_name", "head_name"), PAIRS)
def test_finite_input_gives_finite_loss_and_gradients(term_name, head_name):
    failures = [
        f"{term_name} on {head_name}, {', '.join(way)}: {wrong}"
        for way in a_share_of(term_name, head_name)
        for wrong in trial(term_name, head_name, *way)
    ]
    assert not failures, "\n".join(failures)


@pytest.mark.slow
def test_finite_input_gives_finite_loss_and_gradients_in_every_trial():
    failures = [
        f"{term_name} on {head_name}, {precision}, {case}, {wrong}"
        for term_name, head_name in PAIRS
        for (precision, case), wrongs in measure(term_name, head_name).items()
        for wrong in wrongs
    ]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("head_name", HEADS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_cases_are_what_they_say(head_name, precision):
    dtype = PRECISIONS[precision] or torch.float32
    exact = head_name != "simplex" or precision == "fp32"
    for case in CASES:
        head, labels = make_head(head_name, case, "auto"), labels_of(case)
        features = make_input(head, labels, case).to(dtype)
        split = head.split(features, labels)
        rows = slice(None) if exact else slice(2)  # both are of the class that is exact anywhere
        if case == "cos = +1":
            assert (split.gap[rows] == 0).all()
        elif case == "cos = −1":
            torch.testing.assert_close(split.cosine[rows], -torch.ones(len(split.gap[rows])))
        elif case == "zero feature":
            assert (features[:2] == 0).all()
            assert labels[0] == labels[1]
        elif case == "zero prototype":
            assert (head.prototypes[labels[2]] == 0).all()
        elif case in ("s = 1000", "learned s"):
            torch.testing.assert_close(torch.as_tensor(head.scale), torch.tensor(1000.0))
            assert split.gap[0] == 0
            assert split.gap[1] > 1.999
        elif case == "C = 2":
            assert head.num_classes == 2
        elif case == "N = 1":
            assert features.shape == (1, SIZE)
        else:
            assert labels.unique().numel() == 1


def test_a_broken_loss_is_noticed(monkeypatch):
    # The contract is worth something only if this test can fail: a plain root breaks it.
    monkeypatch.setattr("tammes.angles.sine", lambda gap, opposite: (gap * opposite).sqrt())
    assert trial("arcface", "cosine", "streamed", "fp32", "cos = +1")


def test_a_broken_cross_entropy_is_noticed(monkeypatch):
    # Where it is one function of the batch, a slope without care at both ends breaks it.
    def plain(gap, opposite, shift):
        cotangent = (opposite - gap) / (2 * (gap * opposite).sqrt())
        slope = math.cos(shift) + math.sin(shift) * cotangent
        return shifted_cosine(gap, opposite, shift), slope

    monkeypatch.setattr("tammes.kernels.dense.shifted_cosine_and_slope", plain)
    assert trial("arcface", "cosine", "dense", "fp32", "cos = +1")


@pytest.mark.slow
def test_the_document_says_what_was_measured():
    assert DOCUMENT.read_text() == render(), "run .venv/bin/python tests/test_contract.py"


# -------------------------------------------------------------------------------- the document

WHY_NOT = {
    "cosine": "needs a similarity bounded by one: unit features and unit prototypes",
    "angle": "needs a length times a cosine: no bias, no distance",
    "product": "needs a product of feature and prototype: no distance",
    "adaptive": "needs a scale that follows the angles of each batch",
}


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cell(results):
    """A tick, or where it fails."""
    results = list(results)
    broken = [where for where, wrongs in results if wrongs]
    if len(broken) == len(results):
        return "✗ all"
    return "✗ " + ", ".join(broken) if broken else "✓"


def render():
    """The document, from what is measured now."""
    trials = sum(len(PRECISIONS) * len(CASES) * len(implementations(*pair)) for pair in PAIRS)
    by_case, by_head = [], []
    for term in TERMS:
        heads = heads_of(term)
        by_case.append(
            [f"`{term}`"]
            + [
                cell(
                    (f"{head} {precision}", measure(term, head)[precision, case])
                    for head in heads
                    for precision in PRECISIONS
                )
                for case in CASES
            ]
        )
        cells = [
            cell((f"{p} {c}", wrongs) for (p, c), wrongs in measure(term, head).items())
            if head in heads
            else "–"
            for head in HEADS
        ]
        by_head.append([f"`{term}`", *cells, WHY_NOT.get(TERMS[term].definition.requires, "")])
    cases = "\n".join(f"- **{case}**: {meaning}." for case, meaning in CASES.items())
    return f"""# The finite contract

You can rely on this: finite input gives a finite loss, and finite gradients of the features and of
every parameter. Parameters and their gradients stay float32. This page shows where that was tested.

`.venv/bin/python tests/test_contract.py` generates this page from what it measures, and the same
file as a test fails if the page is out of date. A trial is a forward and a backward pass of one
term on one head, with D = {SIZE}, C = {CLASSES}, N = {ROWS}; there are {trials:,} trials on the
CPU. The features are the output of a linear layer in float32, or in bfloat16 or float16 under
`torch.autocast`, with float32 parameters. Terms on the split run both dense and streamed.
`tests/catalogue.py` has the settings of each term.

The dangerous cases are:

{cases}

## By case

✓ means that it holds in fp32, bf16 and fp16, on every head that fits the term. Otherwise the table
names the head and the precision in which it fails.

{table(["term", *CASES], by_case)}

## By head

✓ means that it holds in all three precisions and all {len(CASES)} cases, – that the criterion
rejects the term on this head, for the reason in the last column.

{table(["term", *(f"`{head}`" for head in HEADS), "why not on all"], by_head)}
"""


if __name__ == "__main__":
    DOCUMENT.write_text(render())
