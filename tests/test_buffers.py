"""Criteria that are made without memory, moved or cast keep what a state_dict does not bring."""

import pytest
import torch
from torch.testing import assert_close

import tammes
from tammes.schedules import DeferredReweighting

SIZE, CLASSES, ROWS = 6, 5, 8
MARGINS = [0.1 * c for c in range(CLASSES)]
COUNTS = [1000, 300, 100, 30, 10]


def deferred(start=0):
    weights = DeferredReweighting(COUNTS, start=start, beta=0.99)
    return tammes.CosFace(SIZE, CLASSES, scale=8.0).schedule(class_weights=weights)


def sampled():
    head = tammes.ShardedHead(tammes.CosineHead, SIZE, 40, scale=8.0, sample_rate=0.3)
    return tammes.Criterion(head, tammes.cosface())


CRITERIA = {
    "margins": lambda: tammes.CosFace(SIZE, CLASSES, scale=8.0, margin=MARGINS),
    "ldam": lambda: tammes.Criterion(
        tammes.CosineHead(SIZE, CLASSES, scale=8.0), tammes.ldam(counts=COUNTS)
    ),
    "class_weights": lambda: tammes.CosFace(SIZE, CLASSES, scale=8.0, class_weights=COUNTS),
    "deferred": deferred,
    "simplex": lambda: tammes.Criterion(tammes.SimplexHead(SIZE, CLASSES), tammes.softmax()),
    "states": lambda: tammes.Criterion(
        tammes.CosineHead(SIZE, CLASSES, scale=8.0), tammes.adaface() + tammes.center()
    ),
    "sampled": sampled,
}


def batch():
    return torch.randn(ROWS, SIZE), torch.randint(CLASSES, (ROWS,))


def without_memory(name):
    with torch.device("meta"):
        return CRITERIA[name]().to_empty(device="cpu")


def emptied(name):
    return CRITERIA[name]().to_empty(device="cpu")


def there_and_back(name):
    return CRITERIA[name]().to("meta").to_empty(device="cpu")


@pytest.mark.parametrize("made", [without_memory, emptied, there_and_back])
@pytest.mark.parametrize("name", CRITERIA)
def test_a_criterion_without_memory_is_whole_when_its_state_is_loaded(name, made):
    saved, found = CRITERIA[name](), made(name)
    found.load_state_dict(saved.state_dict())
    for (key, expected), (_, value) in zip(
        saved.named_buffers(), found.named_buffers(), strict=True
    ):
        # Where all classes are on one rank nobody reads it.
        assert key == "head.place" or torch.equal(value, expected), key
    features, labels = batch()
    assert_close(found(features, labels), saved(features, labels), rtol=0, atol=0)


def test_sampling_head_keeps_its_seed_if_the_state_has_none():
    plain = tammes.CosineHead(SIZE, 40, scale=8.0)
    torch.manual_seed(3)
    seed = sampled().head.sampler.seed
    torch.manual_seed(3)
    head = without_memory("sampled").head
    head.load_state_dict(plain.state_dict())
    assert torch.equal(head.sampler.seed, seed)
    assert head.sampler.steps == 0


def test_class_weights_that_somebody_has_changed_move_as_they_are():
    criterion = CRITERIA["class_weights"]()
    criterion.class_weights.mul_(2)
    criterion.double().to_empty(device="cpu").to("meta").to_empty(device="cpu")
    assert criterion.class_weights.tolist() == [2 * count for count in COUNTS]
    criterion.class_weights = COUNTS[::-1]
    assert criterion.class_weights.tolist() == COUNTS[::-1]


@pytest.mark.parametrize("cast", [torch.half, torch.bfloat16])
def test_no_cast_rounds_the_weights_of_classes(cast):
    weights = [1e-8, 1.0, 1e5, 3.14159265, 0.1]
    criterion = tammes.CosFace(SIZE, CLASSES, scale=8.0, class_weights=weights).to(cast)
    assert_close(criterion.class_weights, torch.tensor(weights), rtol=0, atol=0)
    criterion, exact = deferred().to(cast), deferred()
    assert torch.equal(
        criterion.schedules["class_weights"].value, exact.schedules["class_weights"].value
    )


def test_class_weights_are_where_the_prototypes_are():
    head = tammes.CosineHead(SIZE, CLASSES).to("meta")
    assert tammes.Criterion(head, tammes.softmax(), class_weights=COUNTS).class_weights.is_meta


def test_class_weights_without_values_are_refused():
    with pytest.raises(ValueError, match="class_weights that have values, got a tensor on meta"):
        tammes.CosFace(SIZE, CLASSES, class_weights=torch.ones(CLASSES, device="meta"))
