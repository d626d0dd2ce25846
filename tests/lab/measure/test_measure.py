"""`tammes measure` reads what people have, measures it right, and refuses the rest in words."""

import json
import math
import os
import pickle

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import tammes
from tammes.lab.cli.main import main
from tammes.lab.cli.measure import as_json, as_text
from tammes.lab.measure import files, measures
from tammes.lab.measure.files import read
from tammes.lab.measure.formats import FileError
from tammes.lab.measure.measures import measure

safetensors = pytest.importorskip("safetensors.torch", reason="reading .safetensors needs it")
arrow = pytest.importorskip("pyarrow", reason="reading .parquet needs it")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("plotly", reason="the page needs it")


@pytest.fixture
def arrays(generator):
    """Ten classes in six dimensions, a few examples wrong."""
    prototypes = torch.randn(10, 6, generator=generator)
    labels = torch.arange(10).repeat(12)
    noise = 0.8 * torch.randn(120, 6, generator=generator)
    return {"prototypes": prototypes, "embeddings": prototypes[labels] + noise, "labels": labels}


def save(path, tensors):
    """Write tensors in the format of the suffix; a name may be any key."""
    if path.suffix == ".safetensors":
        safetensors.save_file({key: value.clone() for key, value in tensors.items()}, path)
        return path
    if path.suffix in (".pt", ".pth"):
        torch.save(tensors, path)
        return path
    plain = {key: value.numpy() for key, value in tensors.items()}
    if path.suffix == ".npz":
        np.savez(path, **plain)
    elif path.suffix == ".npy":
        np.save(path, next(iter(plain.values())))
    else:
        columns = {
            key: arrow.array(list(value)) if value.ndim == 2 else arrow.array(value)
            for key, value in plain.items()
        }
        parquet.write_table(arrow.table(columns), path)
    return path


def value_of(measured, key):
    return measured.measure(key).value


def values(measured):
    return {m.key: m.value for _, group in measured.groups for m in group}


def plain_cosines(arrays):
    unit = {
        key: arrays[key].double() / arrays[key].double().norm(dim=1, keepdim=True)
        for key in ("prototypes", "embeddings")
    }
    return unit["embeddings"] @ unit["prototypes"].T, unit


def test_every_measure_is_its_definition(tmp_path, arrays):
    measured = measure(read([save(tmp_path / "a.npz", arrays)]))
    cosine, unit = plain_cosines(arrays)
    labels = arrays["labels"]
    own = cosine.gather(1, labels[:, None]).squeeze(1)
    hardest = cosine.scatter(1, labels[:, None], -2).amax(1)
    margin = own - hardest
    between = unit["prototypes"] @ unit["prototypes"].T
    closest = math.degrees(math.acos((between - 3 * torch.eye(10)).max()))
    norms = arrays["prototypes"].double().norm(dim=1)
    means = torch.stack([unit["embeddings"][labels == c].mean(0) for c in range(10)])
    intra = (1 - means.square().sum(1)).mean()
    inter = 1 - (means @ means.T).fill_diagonal_(0).sum() / 90
    scores = arrays["embeddings"].double() @ arrays["prototypes"].double().T
    others = scores.scatter(1, labels[:, None], -math.inf)
    bias = (others.logsumexp(1) - others.amax(1)).mean()
    expected = {
        "class_margin.angle": closest,
        "centroid": unit["prototypes"].mean(0).square().sum(),
        "norms.ratio": norms.max() / norms.min(),
        "accuracy": 100 * (margin > 0).double().mean(),
        "sample_margin.mean": margin.mean(),
        "sample_margin.minimum": margin.min(),
        "sample_margin.quantile_50": margin.sort().values[59],
        "angles.own": torch.rad2deg(own.acos()).mean(),
        "angles.hardest": torch.rad2deg(hardest.acos()).mean(),
        "discriminability.intra": intra,
        "discriminability.inter": inter,
        "discriminability.ratio": inter / intra,
        "softmax_bias.mean": bias,
        "collapse.nc4": (
            torch.cdist(
                arrays["embeddings"].double(),
                torch.stack(
                    [arrays["embeddings"][labels == c].mean(0) for c in range(10)]
                ).double(),
            ).argmin(1)
            != cosine.argmax(1)
        )
        .double()
        .mean(),
    }
    found = values(measured)
    for key, value in expected.items():
        assert found[key] == pytest.approx(float(value), rel=1e-4, abs=1e-6), key
    assert {"collapse.nc1", "collapse.nc2.widest", "collapse.nc3"} <= set(found)


def test_every_optimum_is_what_geometry_says(tmp_path, arrays):
    measured = measure(read([save(tmp_path / "a.npz", arrays)]))
    margin = measured.measure("class_margin.angle")
    assert margin.optimum == pytest.approx(tammes.geometry.largest_class_margin(10, 6).degrees)
    assert margin.of_optimum == pytest.approx(margin.value / margin.optimum)
    # Ten classes have no simplex in six dimensions, but one in nine.
    assert measured.measure("sample_margin.mean").optimum == pytest.approx(10 / 9)
    assert measured.measure("sample_margin.mean").bound
    wider = {**arrays, "prototypes": torch.eye(10), "embeddings": torch.eye(10)[arrays["labels"]]}
    wider = measure(read([save(tmp_path / "b.npz", wider)]))
    assert not wider.measure("sample_margin.mean").bound
    assert measured.measure("softmax_bias.mean").optimum == pytest.approx(math.log(9), rel=1e-6)


def test_the_simplex_with_features_at_its_prototypes_reaches_every_optimum(tmp_path):
    simplex, labels = tammes.geometry.simplex(5, 8, dtype=torch.double), torch.arange(5).repeat(3)
    arrays = {"prototypes": simplex, "embeddings": simplex[labels], "labels": labels}
    measured = measure(read([save(tmp_path / "a.npz", arrays)]), scale=64.0)
    for _, group in measured.groups:
        for found in group:
            if found.optimum is not None:
                assert found.value == pytest.approx(found.optimum, abs=1e-5), found.key


def test_the_best_margin_for_the_given_prototypes_is_told(tmp_path):
    # Three directions in a quarter of the circle: the middle one has the others on both sides.
    angles = torch.deg2rad(torch.tensor([0.0, 45.0, 90.0]))
    points = torch.stack([angles.cos(), angles.sin()], 1)
    arrays = {"prototypes": points, "embeddings": points, "labels": torch.arange(3)}
    measured = measure(read([save(tmp_path / "a.npz", arrays)]))
    best = 1 - math.cos(math.radians(45))
    note = measured.measure("sample_margin.minimum").note
    assert note == f"these prototypes allow {best:.4g}"


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pt", ".pth"])
def test_every_format_gives_the_same_measures(tmp_path, arrays, suffix):
    expected = values(measure(read([save(tmp_path / "expected.npz", arrays)])))
    assert values(measure(read([save(tmp_path / f"a{suffix}", arrays)]))) == expected


@pytest.mark.parametrize("kind", ["list", "fixed"])
def test_parquet_holds_embeddings_as_lists(tmp_path, arrays, kind):
    expected = values(measure(read([save(tmp_path / "expected.npz", arrays)])))
    prototypes = save(tmp_path / "p.parquet", {"prototype": arrays["prototypes"]})
    rows = arrays["embeddings"].tolist()
    of = arrow.list_(arrow.float32(), 6) if kind == "fixed" else arrow.list_(arrow.float32())
    table = arrow.table(
        {
            "image": [b"large"] * 120,
            "embedding": arrow.array(rows, type=of),
            "label": arrays["labels"].numpy(),
        }
    )
    examples = tmp_path / "e.parquet"
    # Several row groups are one column again.
    parquet.write_table(table, examples, row_group_size=50)
    assert values(measure(read([prototypes, examples]))) == expected


def test_a_file_with_one_array_is_known_by_its_name(tmp_path, arrays):
    expected = values(measure(read([save(tmp_path / "expected.npz", arrays)])))
    paths = [save(tmp_path / f"{key}.npy", {key: array}) for key, array in arrays.items()]
    assert values(measure(read(paths))) == expected
    torch.save(arrays["prototypes"], tmp_path / "prototypes.pt")
    assert values(measure(read([tmp_path / "prototypes.pt", *paths[1:]]))) == expected


@pytest.mark.parametrize(
    "key",
    ["weight", "W", "head.weight", "model.head.weight", "module.fc.weight", "classifier.weight"],
)
def test_prototypes_are_found_under_the_usual_keys(tmp_path, arrays, key):
    state = {"stem.conv.weight": torch.zeros(3, 3), key: arrays["prototypes"]}
    path = save(tmp_path / "a.safetensors", state)
    assert_close(read([path]).prototypes, arrays["prototypes"])


def test_the_state_of_a_criterion_inside_a_checkpoint_is_found(tmp_path):
    criterion = tammes.CosFace(6, 10)
    torch.save({"epoch": 3, "criterion": criterion.state_dict()}, tmp_path / "a.pt")
    assert_close(read([tmp_path / "a.pt"]).prototypes, criterion.head.weight.detach())


def test_a_key_can_be_named(tmp_path, arrays):
    path = save(tmp_path / "a.npz", {"mine": arrays["prototypes"], "weight": torch.ones(3, 2)})
    assert_close(read([path], keys={"prototypes": "mine"}).prototypes, arrays["prototypes"])


def test_two_keys_that_could_both_be_meant_are_refused(tmp_path, arrays):
    state = {"a.head.weight": arrays["prototypes"], "b.head.weight": arrays["prototypes"]}
    path = save(tmp_path / "a.safetensors", state)
    with pytest.raises(FileError, match="could all be the prototypes; say which with --prototypes"):
        read([path])


def test_embeddings_of_several_files_are_put_together_in_order(tmp_path, arrays):
    expected = values(measure(read([save(tmp_path / "expected.npz", arrays)])))
    head = save(tmp_path / "head.pt", {"weight": arrays["prototypes"]})
    shards = [
        save(
            tmp_path / f"{part}.npz",
            {"features": arrays["embeddings"][rows], "y": arrays["labels"][rows]},
        )
        for part, rows in enumerate((slice(0, 50), slice(50, 120)))
    ]
    assert values(measure(read([*shards, head]))) == expected


def test_stored_the_other_way_round_prototypes_are_turned(tmp_path, arrays):
    expected = values(measure(read([save(tmp_path / "expected.npz", arrays)])))
    turned = {**arrays, "prototypes": arrays["prototypes"].T}
    path = save(tmp_path / "a.npz", turned)
    assert values(measure(read([path], transpose=True))) == expected
    with pytest.raises(FileError, match="with --transpose they would"):
        read([path])


def test_texts_as_labels_go_by_the_class_names(tmp_path, arrays):
    expected = values(measure(read([save(tmp_path / "expected.npz", arrays)])))
    names = np.array([f"class {9 - place}" for place in range(10)])
    said = names[arrays["labels"].numpy()]
    plain = {key: arrays[key].numpy() for key in ("prototypes", "embeddings")}
    np.savez(tmp_path / "a.npz", **plain, labels=said, class_names=names)
    given = read([tmp_path / "a.npz"])
    assert given.names == tuple(names)
    assert values(measure(given)) == expected
    np.savez(tmp_path / "b.npz", **plain, labels=said)
    with pytest.raises(FileError, match=r"b\.npz: labels are strings, and no class_names map"):
        read([tmp_path / "b.npz"])


def test_without_prototypes_class_means_stand_for_them(tmp_path, arrays):
    examples = {key: arrays[key] for key in ("embeddings", "labels")}
    measured = measure(read([save(tmp_path / "a.npz", examples)]))
    unit = arrays["embeddings"] / arrays["embeddings"].norm(dim=1, keepdim=True)
    means = torch.stack([unit[arrays["labels"] == c].mean(0) for c in range(10)])
    stated = {**arrays, "prototypes": means}
    expected = measure(read([save(tmp_path / "b.npz", stated)]))
    for key in ("class_margin.angle", "sample_margin.mean", "angles.own"):
        assert value_of(measured, key) == pytest.approx(value_of(expected, key), rel=1e-5)
    assert any("means of the unit embeddings" in note for note in measured.notes)
    assert measured.measure("softmax_bias.mean") is None
    assert measured.measure("norms.ratio") is None


def test_without_prototypes_labels_are_names_of_any_size(tmp_path, arrays):
    examples = {key: arrays[key] for key in ("embeddings", "labels")}
    expected = values(measure(read([save(tmp_path / "a.npz", examples)])))
    far = {**examples, "labels": arrays["labels"] * 10**12 + 5}
    given = read([save(tmp_path / "b.npz", far)])
    assert values(measure(given)) == expected
    assert given.names[1] == str(10**12 + 5)


def test_prototypes_alone_are_measured(tmp_path, arrays):
    measured = measure(read([save(tmp_path / "a.npz", {"prototypes": arrays["prototypes"]})]))
    assert [name for name, _ in measured.groups] == ["prototypes"]
    assert measured.split is None


def test_examples_labelled_minus_100_are_left_out(tmp_path, arrays):
    some = arrays["labels"].clone()
    some[::3] = -100
    kept = some != -100
    shorter = {
        **arrays,
        "embeddings": arrays["embeddings"][kept],
        "labels": arrays["labels"][kept],
    }
    expected = values(measure(read([save(tmp_path / "a.npz", shorter)])))
    measured = measure(read([save(tmp_path / "b.npz", {**arrays, "labels": some})]))
    assert values(measured) == expected
    assert measured.notes[0] == "40 examples labelled -100 are ignored."


def test_a_class_without_examples_is_noted_and_the_rest_is_measured(tmp_path, arrays):
    more = torch.cat([arrays["prototypes"], torch.ones(1, 6)])
    path = save(tmp_path / "a.npz", {**arrays, "prototypes": more})
    measured = measure(read([path]))
    assert any("1 of 11 classes have no example" in note for note in measured.notes)
    assert all(math.isfinite(value) for value in values(measured).values())


def test_the_scale_decides_which_scores_the_softmax_bias_is_of(tmp_path, arrays):
    given = read([save(tmp_path / "a.npz", arrays)])
    cosine, _ = plain_cosines(arrays)
    others = (20 * cosine).scatter(1, arrays["labels"][:, None], -math.inf)
    expected = (others.logsumexp(1) - others.amax(1)).mean().item()
    assert value_of(measure(given, scale=20.0), "softmax_bias.mean") == pytest.approx(
        expected, rel=1e-4
    )


def test_blocks_of_rows_do_not_change_the_answer(tmp_path, arrays, monkeypatch):
    given = read([save(tmp_path / "a.npz", arrays)])
    expected = values(measure(given, scale=16.0))
    monkeypatch.setattr(measures, "_BLOCK", 70)
    found = values(measure(given, scale=16.0))
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-5, abs=1e-7), key


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_half_precision_is_read_and_measured_in_single(tmp_path, arrays, dtype):
    half = {
        key: value.to(dtype) if value.is_floating_point() else value
        for key, value in arrays.items()
    }
    given = read([save(tmp_path / "a.safetensors", half)])
    assert given.prototypes.dtype == torch.float32
    assert_close(given.prototypes, half["prototypes"].float())
    assert all(math.isfinite(value) for value in values(measure(given)).values())


def test_the_closest_pairs_are_the_closest(tmp_path, arrays):
    measured = measure(read([save(tmp_path / "a.npz", arrays)]))
    _, unit = plain_cosines(arrays)
    angles = torch.rad2deg((unit["prototypes"] @ unit["prototypes"].T).clamp(-1, 1).acos())
    pairs = sorted((angles[i, j].item(), i, j) for i in range(10) for j in range(i + 1, 10))[:10]
    for found, expected in zip(measured.pairs, pairs, strict=True):
        assert found[0] == pytest.approx(expected[0], abs=1e-3)
        assert found[1:] == expected[1:]


def test_of_several_prototypes_of_a_class_the_nearest_counts(tmp_path, arrays, generator):
    first = arrays["prototypes"]
    several = torch.stack([torch.randn(10, 6, generator=generator), first], 1)
    given = read([save(tmp_path / "a.npz", {**arrays, "prototypes": several})])
    measured = measure(given, scale=16.0)
    unit = torch.nn.functional.normalize
    cosines = torch.einsum("nd,ckd->nck", unit(arrays["embeddings"]), unit(several, dim=2)).amax(2)
    expected = 100 * (cosines.argmax(1) == arrays["labels"]).double().mean()
    assert value_of(measured, "accuracy") == pytest.approx(float(expected))
    angles = torch.einsum("ikd,jld->ijkl", unit(several, dim=2), unit(several, dim=2))
    angles = torch.rad2deg(angles.amax((2, 3)).clamp(-1, 1).acos())
    pairs = sorted((angles[i, j].item(), i, j) for i in range(10) for j in range(i + 1, 10))[:10]
    for found, wanted in zip(measured.pairs, pairs, strict=True):
        assert found[0] == pytest.approx(wanted[0], abs=1e-3)
        assert found[1:] == wanted[1:]
    assert value_of(measured, "class_margin.angle") == pytest.approx(pairs[0][0], abs=1e-3)
    assert main(["measure", str(tmp_path / "a.npz"), "--out", str(tmp_path / "out")]) == 0
    with pytest.raises(FileError, match=r"--transpose expects prototypes of shape \(D, C\)"):
        read([tmp_path / "a.npz"], transpose=True)


def test_the_command_prints_a_table_and_writes_a_page(tmp_path, arrays, capsys):
    path = save(tmp_path / "a.npz", arrays)
    assert main(["measure", str(path), "--out", str(tmp_path / "new" / "out")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    measured = measure(read([path]))
    assert as_text(measured) in out
    margin = measured.measure("class_margin.angle")
    line = next(line for line in out.splitlines() if line.startswith("  class margin"))
    assert f"{margin.value:.2f}°" in line
    assert f"{margin.optimum:.2f}°" in line
    assert f" {100 * margin.of_optimum:.1f} " in line
    page = tmp_path / "new" / "out" / "measure.html"
    assert str(page) in out
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert [file.name for file in page.parent.iterdir()] == ["measure.html"]


def test_json_holds_every_measure_as_a_plain_number(tmp_path, arrays, capsys):
    path = save(tmp_path / "a.npz", arrays)
    assert main(["measure", str(path), "--out", str(tmp_path), "--json", "--scale", "30"]) == 0
    found = json.loads(capsys.readouterr().out)
    measured = measure(read([path]), scale=30.0)
    assert found["measures"] == as_json(measured)["measures"]
    assert found["measures"]["sample_margin.mean"]["value"] == value_of(
        measured, "sample_margin.mean"
    )
    assert (found["classes"], found["dimensions"], found["examples"]) == (10, 6, 120)
    assert found["page"] == str(tmp_path / "measure.html")


def test_json_has_null_where_a_number_is_not_finite(tmp_path):
    points = torch.eye(3)
    path = save(
        tmp_path / "a.npz",
        {"prototypes": points, "embeddings": points[:2], "labels": torch.tensor([0, 1])},
    )
    measured = measure(read([path]))
    assert value_of(measured, "discriminability.ratio") == math.inf
    text = json.dumps(as_json(measured), allow_nan=False)
    assert json.loads(text)["measures"]["discriminability.ratio"]["value"] is None


class Trap:
    """What would run if a file were unpickled with trust."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def truncated(path, arrays):
    save(path, arrays)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def with_nan(path, arrays):
    arrays["embeddings"][3, 1] = math.nan
    arrays["embeddings"][5, 0] = math.inf
    save(path, arrays)


def beyond(path, arrays):
    arrays["labels"][7] = 10
    save(path, arrays)


def ragged(path, _):
    parquet.write_table(arrow.table({"embedding": [[1.0], [1.0, 2.0]], "label": [0, 1]}), path)


def holed(path, _):
    parquet.write_table(arrow.table({"embedding": [[1.0], None], "label": [0, 1]}), path)


def trapped(path, _):
    with open(path, "wb") as file:
        pickle.dump({"weight": Trap(path.parent / "sprung")}, file)


BROKEN = {
    "missing": (".npz", lambda path, arrays: None, "there is no such file"),
    "a folder": (".npz", lambda path, arrays: path.mkdir(), "the folder of a finished run is"),
    "empty": (".npz", lambda path, arrays: path.touch(), "damaged, or not a .npz file"),
    "no npz": (".npz", lambda path, arrays: path.write_text("x"), "damaged, or not a .npz file"),
    "truncated npz": (".npz", truncated, "damaged, or not a .npz file"),
    "truncated npy": (".npy", truncated, "damaged, or not a .npy file"),
    "truncated safetensors": (".safetensors", truncated, "damaged, or not a .safetensors file"),
    "truncated pt": (".pt", truncated, "damaged, or not a .pt file"),
    "truncated parquet": (".parquet", lambda p, a: truncated(p, {"embedding": a["embeddings"]}),
                          "damaged, or not a .parquet file"),
    "more than weights": (".pt", trapped, "holds more than tensors, and only weights are loaded"),
    "unknown suffix": (".txt", lambda path, arrays: path.write_text("x"), "got .txt"),
    "wrong keys": (".npz", lambda p, a: save(p, {"foo": a["labels"]}),
                   "no prototypes, embeddings or labels in it, only 'foo'"),
    "wrong columns": (".parquet", lambda p, a: save(p, {"foo": a["labels"]}), "only 'foo'"),
    "NaN": (".npz", with_nan, "embeddings ('embeddings') hold NaN or infinity in 2 of 120 rows"),
    "labels beyond": (".npz", beyond, "label 10 is beyond the 10 prototypes"),
    "negative labels": (".npz", lambda p, a: save(p, a | {"labels": a["labels"] - 1}),
                        "expected to be 0 or more, or -100"),
    "fractions": (".npz", lambda p, a: save(p, a | {"labels": a["labels"] / 2}),
                  "labels ('labels') are expected to be whole numbers"),
    "one label for each class": (".npz", lambda p, a: save(p, a | {"labels": torch.zeros(120, 10)}),
                                 "one number for each example, got shape (120, 10)"),
    "fewer labels": (".npz", lambda p, a: save(p, a | {"labels": a["labels"][:-1]}),
                     "120 embeddings do not go with 119 labels"),
    "other dimensions": (".npz", lambda p, a: save(p, a | {"prototypes": torch.ones(10, 5)}),
                         "embeddings of 6 dimensions do not go with prototypes of 5"),
    "a vector": (".npz", lambda p, a: save(p, {"prototypes": torch.ones(5)}),
                 "expected to be a matrix of rows, got shape (5,)"),
    "no rows": (".npz", lambda p, a: save(p, {"prototypes": torch.ones(0, 5)}), "got shape (0, 5)"),
    "one class": (".npz", lambda p, a: save(p, {"prototypes": torch.ones(1, 5)}),
                  "prototypes of 2 classes or more are needed, got 1"),
    "one class of examples": (
        ".npz", lambda p, a: save(p, {"embeddings": torch.eye(3), "labels": torch.zeros(3)}),
        "examples of 2 classes or more are needed, got 1",
    ),
    "nothing labelled": (".npz", lambda p, a: save(p, a | {"labels": a["labels"] * 0 - 100}),
                         "no example has a label"),
    "labels missing": (".npz", lambda p, a: save(p, {"embeddings": a["embeddings"]}),
                       "embeddings without labels cannot be measured"),
    "embeddings missing": (".npz", lambda p, a: save(p, {"labels": a["labels"]}),
                           "labels without embeddings cannot be measured"),
    "complex numbers": (".npz", lambda p, a: save(p, {"prototypes": torch.ones(3, 2) + 1j}),
                        "expected to be real"),
    "rows of two lengths": (".parquet", ragged, "column 'embedding' have different lengths"),
    "empty rows": (".parquet", holed, "column 'embedding' has 1 empty rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_in_one_sentence_and_nothing_is_written(
    name, tmp_path, arrays, capsys
):
    suffix, make, sentence = BROKEN[name]
    path = tmp_path / f"broken{suffix}"
    make(path, arrays)
    before = sorted(tmp_path.iterdir())
    assert main(["measure", str(path), "--out", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"tammes measure: {path}: ")
    assert sentence in err
    assert sorted(tmp_path.iterdir()) == before


def test_the_second_file_is_named_where_it_is_the_broken_one(tmp_path, arrays, capsys):
    good = save(tmp_path / "good.npz", arrays)
    bad = save(tmp_path / "bad.npz", {"embeddings": torch.ones(4, 3), "labels": torch.arange(4)})
    assert main(["measure", str(good), str(bad), "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert f"{bad}: embeddings of 3 dimensions do not go with the 6 of {good}" in err


def test_prototypes_in_two_files_are_refused(tmp_path, arrays, capsys):
    paths = [str(save(tmp_path / f"{name}.npz", arrays)) for name in "ab"]
    assert main(["measure", *paths, "--out", str(tmp_path / "out")]) == 2
    assert "only one file may hold prototypes" in capsys.readouterr().err


@pytest.mark.parametrize("scale", ["0", "-3", "nan", "inf"])
def test_a_scale_that_is_none_is_refused(tmp_path, arrays, capsys, scale):
    path = save(tmp_path / "a.npz", arrays)
    assert main(["measure", str(path), "--out", str(tmp_path / "out"), f"--scale={scale}"]) == 2
    assert "--scale is expected to be above 0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_written_is_refused_in_one_sentence(tmp_path, arrays, capsys):
    path = save(tmp_path / "a.npz", arrays)
    (tmp_path / "out").write_text("in the way")
    assert main(["measure", str(path), "--out", str(tmp_path / "out" / "deeper")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert str(tmp_path / "out" / "deeper" / "measure.html") in err
    assert "the page cannot be written" in err


def test_where_writing_fails_the_old_page_stays_and_nothing_is_left(
    tmp_path, arrays, capsys, monkeypatch
):
    path = save(tmp_path / "a.npz", arrays)
    out = tmp_path / "out"
    out.mkdir()
    (out / "measure.html").write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert main(["measure", str(path), "--out", str(out)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert [(file.name, file.read_text()) for file in out.iterdir()] == [("measure.html", "old")]
    assert main(["measure", str(path), "--out", str(tmp_path / "new" / "deep")]) == 2
    assert not (tmp_path / "new").exists()


def test_a_package_that_is_missing_is_named(tmp_path, arrays, capsys, monkeypatch):
    path = save(tmp_path / "a.safetensors", arrays)

    def missing(name, *, extra):
        raise ImportError(f"{name} could not be imported; install it with: pip install {extra}")

    monkeypatch.setattr("tammes.lab.measure.formats.require", missing)
    assert main(["measure", str(path), "--out", str(tmp_path / "out")]) == 2
    assert "safetensors.torch could not be imported" in capsys.readouterr().err


def test_every_key_is_looked_for_only_once():
    keys = [key for names in files.KEYS.values() for key in names]
    assert len(keys) == len(set(keys))
