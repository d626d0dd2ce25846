"""The class margin: exact for any number of classes, without a matrix of all pairs."""

import math

import numpy as np
import pytest
import scipy.spatial.distance as distance
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import tammes
from tammes.metrics.functional import class_margin
from tammes.metrics.functional import prototypes as implementation


def normal(*shape, seed=0, dtype=torch.double):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def plain(prototypes):
    """Angle in degrees and pair, by all pairs."""
    cosines = 1 - distance.squareform(distance.pdist(prototypes.double().numpy(), "cosine"))
    np.fill_diagonal(cosines, -2)
    pair = divmod(int(cosines.argmax()), len(cosines))
    return math.degrees(math.acos(cosines.max())), list(pair)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 4 classes and tiles of 2 blocks, so that 40 classes make many of each."""
    monkeypatch.setattr(implementation, "_GRAIN", 4)
    monkeypatch.setattr(implementation, "_SPAN", {"cpu": 2})


@pytest.mark.parametrize("dtype", [torch.double, torch.float, torch.float16, torch.bfloat16])
def test_it_is_the_smallest_of_all_angles(dtype):
    prototypes = normal(300, 16).to(dtype)
    result = class_margin(prototypes)
    angle, pair = plain(prototypes)
    assert_close(float(result.angle), angle, rtol=1e-10, atol=1e-10)
    assert result.pair.tolist() == pair


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9, 12, 31, 40])
def test_blocks_of_any_number_of_classes_agree_with_all_pairs(small_blocks, count):
    for seed in range(5):
        prototypes = normal(count, 3, seed=seed)
        result = class_margin(prototypes)
        angle, pair = plain(prototypes)
        assert_close(float(result.angle), angle)
        assert result.pair.tolist() == pair


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_prototypes_are_screened_in_float32(small_blocks, dtype):
    for seed in range(20):
        prototypes = normal(40, 3, seed=seed).to(dtype)
        assert class_margin(prototypes).pair.tolist() == plain(prototypes)[1]


def test_autocast_does_not_reach_the_screen(small_blocks):
    with torch.autocast("cpu", torch.bfloat16):
        for seed in range(20):
            prototypes = normal(40, 3, seed=seed, dtype=torch.float)
            assert class_margin(prototypes).pair.tolist() == plain(prototypes)[1]


def test_a_planted_pair_is_found_in_every_pair_of_blocks(small_blocks):
    base = normal(18, 6, dtype=torch.float)
    for i in range(18):
        for j in range(i + 1, 18):
            prototypes = base.clone()
            prototypes[j] = 3 * base[i] + 1e-3 * normal(6, seed=7, dtype=torch.float)
            assert class_margin(prototypes).pair.tolist() == [i, j]


def test_a_planted_pair_is_found_among_thousands():
    prototypes = normal(5000, 32, dtype=torch.float)
    prototypes[4321] = 0.1 * prototypes[17] + 1e-4 * normal(32, seed=7, dtype=torch.float)
    result = class_margin(prototypes)
    assert result.pair.tolist() == [17, 4321]
    unit = torch.nn.functional.normalize(prototypes[[17, 4321]].double())
    radians = 2 * math.asin(float((unit[0] - unit[1]).norm()) / 2)
    assert_close(float(result.angle), math.degrees(radians), rtol=1e-9, atol=0)


def test_among_near_ties_the_closest_pair_wins():
    # At these angles all cosines are 1 in float32; only the float64 look tells them apart.
    prototypes = torch.nn.functional.normalize(normal(3000, 24, dtype=torch.float))
    pairs = {(11, 2900): 1.2e-4, (1500, 1501): 1.0e-4, (5, 6): 1.1e-4, (900, 2100): 1.4e-4}
    for (i, j), radians in pairs.items():
        aside = torch.zeros(24)
        aside[prototypes[i].abs().argmin()] = radians
        prototypes[j] = prototypes[i] + aside
    unit = torch.nn.functional.normalize(prototypes)
    assert all(float(unit[i] @ unit[j]) >= 1 - 1.2e-7 for i, j in pairs)
    result = class_margin(prototypes)
    assert result.pair.tolist() == [1500, 1501]
    assert_close(float(result.angle), math.degrees(1e-4), rtol=1e-3, atol=0)


def test_equal_prototypes_are_at_an_angle_of_zero():
    prototypes = normal(50, 4)
    prototypes[30], prototypes[40] = 2 * prototypes[20], prototypes[20]
    result = class_margin(prototypes)
    assert float(result.angle) < 1e-6
    assert set(result.pair.tolist()) < {20, 30, 40}


def test_one_pair_pulled_together_stands_out_of_a_simplex():
    # All other cosines are equal and negative, so that padding with zeros would win.
    points = tammes.geometry.simplex(1100, 1100, dtype=torch.double)
    toward = points[1090] - points[3]
    points[3] += 1e-9 * toward
    assert class_margin(points).pair.tolist() == [3, 1090]


@pytest.mark.parametrize("count", [2, 5, 1030])
def test_the_simplex_has_the_optimum(count):
    result = class_margin(tammes.geometry.simplex(count, count))
    optimum = math.degrees(math.acos(-1 / (count - 1)))
    assert_close(float(result.angle), optimum, rtol=1e-6, atol=0)
    assert_close(float(result.ratio), 1.0, rtol=1e-6, atol=0)
    assert result.exact


def test_the_ratio_is_to_the_bound_where_the_optimum_is_unknown():
    result = class_margin(normal(200, 8))
    best = tammes.geometry.largest_class_margin(200, 8)
    assert_close(float(result.optimum), best.degrees)
    assert_close(float(result.ratio), float(result.angle) / best.degrees)
    assert not result.exact


def test_it_depends_on_directions_only():
    prototypes = normal(60, 5)
    rotation = torch.linalg.qr(normal(5, 5, seed=1)).Q
    lengths = torch.linspace(0.01, 100, 60, dtype=torch.double)[:, None]
    found, moved = class_margin(prototypes), class_margin(lengths * prototypes @ rotation)
    assert_close(found.angle, moved.angle)
    assert torch.equal(found.pair, moved.pair)


def test_a_zero_prototype_is_at_a_right_angle():
    result = class_margin(torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]]))
    assert_close(float(result.angle), 90.0)


def test_three_classes_on_a_line_have_no_margin_to_miss():
    result = class_margin(torch.tensor([[1.0], [-1.0], [2.0]]))
    assert float(result.angle) == 0
    assert float(result.ratio) == 1


def rough(monkeypatch, error):
    """Screen in bfloat16, as a GPU would in half precision, with the error one claims for it."""
    exact = implementation._directions
    monkeypatch.setattr(
        implementation, "_directions", lambda *args: exact(*args).bfloat16().float()
    )
    monkeypatch.setattr(implementation, "_screen_error", lambda *_: error)


def test_a_rough_screen_with_its_error_known_rules_nothing_out(small_blocks, monkeypatch):
    rough(monkeypatch, 8 * 2.0**-9)
    for seed in range(20):
        prototypes = normal(40, 12, seed=seed)
        assert class_margin(prototypes).pair.tolist() == plain(prototypes)[1]


def test_a_rough_screen_taken_for_exact_does_go_wrong(small_blocks, monkeypatch):
    # What the test before would miss if it could not fail.
    rough(monkeypatch, 0.0)
    wrong = [
        seed
        for seed in range(20)
        if class_margin(normal(40, 12, seed=seed)).pair.tolist()
        != plain(normal(40, 12, seed=seed))[1]
    ]
    assert wrong


@pytest.mark.parametrize("size", [3, 64, 700])
def test_the_error_of_the_screen_is_within_its_bound(size):
    unit = torch.nn.functional.normalize
    rows, columns = normal(200, size, dtype=torch.float), normal(200, size, seed=1).float()
    exact = unit(rows.double()) @ unit(columns.double()).T
    for dtype in (torch.float, torch.half):
        screen = unit(rows).to(dtype) @ unit(columns).to(dtype).T
        worst = float((screen.double() - exact).abs().max())
        assert worst < implementation._screen_error(dtype, size)


def test_the_bound_grows_where_products_are_rounded_to_bfloat16():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        tight = implementation._screen_error(torch.float, 64)
        torch.set_float32_matmul_precision("medium")
        wide = implementation._screen_error(torch.float, 64)
    finally:
        torch.set_float32_matmul_precision(before)
    assert tight < 1e-5 < 1e-2 < wide


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest tensor any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def test_no_tensor_is_as_large_as_all_pairs():
    prototypes = normal(9000, 4, dtype=torch.float)
    with LargestTensor() as seen:
        class_margin(prototypes)
    assert 1024**2 <= seen.largest <= 4096**2 < 9000**2


@pytest.mark.parametrize("centers", [1, 2, 3, 5])
def test_several_prototypes_of_a_class_are_not_compared_with_each_other(small_blocks, centers):
    for seed in range(5):
        prototypes = normal(11, centers, 3, seed=seed)
        rows = prototypes.flatten(0, 1)
        cosines = 1 - distance.squareform(distance.pdist(rows.numpy(), "cosine"))
        own = np.arange(len(rows)) // centers
        cosines[own[:, None] == own] = -2
        place = divmod(int(cosines.argmax()), len(rows))
        result = class_margin(prototypes)
        assert_close(float(result.angle), math.degrees(math.acos(cosines.max())))
        assert result.pair.tolist() == [own[i] for i in place]
        assert_close(result.optimum, class_margin(prototypes[:, 0]).optimum)
