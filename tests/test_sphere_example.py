"""The toy of eight classes on the sphere: what the losses want, and what training gives them."""

import runpy
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def sphere():
    path = Path(__file__).parents[1] / "examples" / "sphere.py"
    return runpy.run_path(str(path))


@pytest.mark.parametrize("name", ["NormFace", "ArcFace 0.5", "LM-Softmax"])
def test_solved_to_the_optimum_the_losses_coincide(name, sphere):
    prototypes, _ = sphere["solve"](sphere["LOSSES"][name], 64.0, starts=1)
    assert sphere["margins"](prototypes)[0] == pytest.approx(74.675, abs=0.005)


@pytest.mark.slow
def test_the_table_has_every_loss_and_at_the_optimum_they_coincide(sphere, capsys):
    numbers = sphere["main"](seeds=2, steps=5)
    assert len(capsys.readouterr().out.splitlines()) == 4 + 10
    for (scale, _), (trained, solved) in numbers.items():
        assert len(trained) == 2
        assert solved == pytest.approx({20.0: 74.271, 64.0: 74.675}[scale], abs=0.005)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scale", "least", "most"),
    [
        # LM-Softmax ends at the optimum of its scale, the others far below.
        ("LM-Softmax", 20.0, 74.26, 74.28),
        ("LM-Softmax", 64.0, 74.67, 74.69),
        ("NormFace", 20.0, 0, 65),
        ("NormFace", 64.0, 0, 50),
        ("CosFace 0.1", 64.0, 0, 55),
        ("CosFace 0.35", 64.0, 0, 68),
        ("ArcFace 0.5", 64.0, 0, 62),
    ],
)
def test_trained_the_losses_do_not_coincide(name, scale, least, most, sphere):
    prototypes, _ = sphere["train"](sphere["LOSSES"][name], scale, seeds=3)
    assert all(least < margin < most for margin in sphere["margins"](prototypes))
