"""``tammes gallery``: build, add, remove and query, and what each refuses."""

import json
import re
import shutil

import pytest
import torch
from test_bad_input import sentence

import tammes
from tammes.lab.cli.main import main
from tammes.lab.inference.trained_model import TrainedModel


@pytest.fixture
def folder(photographs, tmp_path):
    """Three individuals with four images each, which a test may change."""
    return shutil.copytree(photographs / "train", tmp_path / "individuals")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "gallery.safetensors"


def gallery(*words):
    return main(["gallery", *map(str, words)])


@pytest.fixture
def built(photograph_run, folder, path, capsys):
    """A gallery in a file."""
    assert gallery("build", photograph_run.folder, folder, path) == 0
    capsys.readouterr()
    return path


def test_build_enrols_the_images_of_each_subfolder(photograph_run, folder, path, capsys):
    assert gallery("build", photograph_run.folder, folder, path) == 0
    said = capsys.readouterr().out
    assert said == f"  {path}: 3 individuals, 12 images, template mean\n"
    found = tammes.Gallery.load(path)
    assert found.ids == ["ape", "bee", "cat"]
    model = tammes.load(photograph_run, device="cpu")
    assert found.digest == model.digest
    expected = tammes.Gallery(model)
    files = sorted(folder.rglob("*.*"))
    expected.enrol(model.embed(files), [file.parent.name for file in files])
    query = torch.randn(3, model.embedding_size)
    torch.testing.assert_close(found.identify(query).scores, expected.identify(query).scores)


def test_query_prints_the_ranked_individuals_of_each_image(
    photograph_run, built, photographs, capsys
):
    images = photographs / "test" / "bee"
    assert gallery("query", built, photograph_run.folder, images, "--top", 2) == 0
    lines = capsys.readouterr().out.splitlines()
    found = tammes.Gallery.load(built, tammes.load(photograph_run, device="cpu")).identify(
        images, 2
    )
    for line, file, ids, scores in zip(
        lines, sorted(images.iterdir()), found.ids, found.scores.tolist(), strict=True
    ):
        assert line.split("  ") == [
            str(file),
            *(f"{i} {s:.3f}" for i, s in zip(ids, scores, strict=True)),
        ]


def test_below_the_threshold_an_image_is_unknown(photograph_run, built, photographs, capsys):
    images = photographs / "test" / "bee" / "c_grey.png"
    words = ("query", built, photograph_run.folder, images, "--threshold", 1.01)
    assert gallery(*words) == 0
    assert "  unknown, nearest:  " in capsys.readouterr().out
    assert gallery(*words, "--json") == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["known"], row["id"], len(row["ranked"])) == (False, None, 3)
    assert row["ranked"][0]["image"].endswith("a_turned.jpg")


def test_the_page_shows_the_query_and_the_ranked_images(
    photograph_run, built, photographs, tmp_path, capsys
):
    images = photographs / "test" / "bee"
    page = tmp_path / "new" / "page.html"
    words = ("query", built, photograph_run.folder, images, "--page", page)
    assert gallery(*words) == 0
    assert capsys.readouterr().out.endswith(f"  page: {page}\n")
    text = page.read_text()
    # Four queries, and three individuals for each.
    assert text.count("<img src=") == 16
    assert "4 images searched among 3 individuals." in text
    assert re.search(r"<figcaption>(ape|bee|cat), 0\.\d{3}</figcaption>", text)
    assert "tammes gallery query" in text


def test_the_page_states_the_threshold_and_the_command_that_were_used(
    photograph_run, built, photographs, tmp_path
):
    known = tammes.Gallery.load(built)
    known.accept_at = 0.25
    known.save(built)
    words = ["query", built, photograph_run.folder, photographs / "test" / "bee", "--skip-corrupt"]
    for more, used in (([], "0.250"), (["--threshold", 0.75], "0.750")):
        page = tmp_path / "page.html"
        assert gallery(*words, *more, "--page", page) == 0
        text = page.read_text()
        assert f"Individuals are known from a similarity of {used} on." in text
        assert "--skip-corrupt" in text


def test_images_that_are_gone_are_grey_on_the_page(
    photograph_run, built, folder, photographs, tmp_path
):
    shutil.rmtree(folder)
    page = tmp_path / "page.html"
    words = (photographs / "test" / "bee" / "c_grey.png", "--page", page)
    assert gallery("query", built, photograph_run.folder, *words) == 0
    sources = re.findall(r'<img src="([^"]+)', page.read_text())
    assert len(sources) == 4
    assert len(set(sources)) == 2


def test_add_and_remove_change_the_file(photograph_run, built, photographs, tmp_path, capsys):
    more = shutil.copytree(photographs / "test", tmp_path / "more")
    (more / "ape").rename(more / "dog")
    shutil.rmtree(more / "cat")
    assert gallery("add", built, photograph_run.folder, more, "--existing", "add") == 0
    found = tammes.Gallery.load(built)
    assert {each: found.images(each) for each in found.ids} == {
        "ape": 4,
        "bee": 8,
        "cat": 4,
        "dog": 4,
    }
    assert gallery("add", built, photograph_run.folder, more, "--existing", "replace") == 0
    assert tammes.Gallery.load(built).images("bee") == 4
    capsys.readouterr()
    assert gallery("remove", built, "ape", "dog") == 0
    assert capsys.readouterr().out == f"  {built}: 2 individuals, 8 images, template mean\n"
    assert sorted(tammes.Gallery.load(built).ids) == ["bee", "cat"]


def test_integers_are_removed_too(path):
    known = tammes.Gallery()
    known.enrol(torch.eye(3), [1, 2, 3])
    known.save(path)
    assert gallery("remove", path, 2) == 0
    assert tammes.Gallery.load(path).ids == [1, 3]


def test_far_is_calibrated_on_an_image_of_each_that_is_not_enrolled(
    photograph_run, folder, path, capsys
):
    assert gallery("build", photograph_run.folder, folder, path, "--far", 0.5) == 0
    said = capsys.readouterr().out.splitlines()
    model = tammes.load(photograph_run, device="cpu")
    files = sorted(folder.rglob("*.*"))
    last = [file for file in files if file.name == "d_large.jpg"]
    rest = [file for file in files if file not in last]
    known = tammes.Gallery(model)
    known.enrol(rest, [file.parent.name for file in rest])
    expected = known.threshold(0.5, last, [file.parent.name for file in last])
    assert (expected.same, expected.different) == (3, 6)
    found = tammes.Gallery.load(path)
    assert found.accept_at == pytest.approx(expected.threshold, abs=1e-4)
    assert found.images("bee") == 4
    assert said[1].startswith(f"  threshold {found.accept_at:.3f} for a FAR of 50 %: accepts ")
    assert said[1].endswith("of 3 of the same")


def test_skip_corrupt_leaves_out_what_cannot_be_read(photograph_run, folder, path, capsys):
    (folder / "bee" / "b_clear.png").write_bytes(b"none")
    assert gallery("build", photograph_run.folder, folder, path, "--skip-corrupt") == 0
    assert "b_clear.png cannot be read (not an image), it is left out" in capsys.readouterr().err
    assert tammes.Gallery.load(path).images("bee") == 3
    query = ("query", path, photograph_run.folder, folder / "bee", "--skip-corrupt")
    assert gallery(*query) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


# ---------------------------------------------------------------------------------- bad input


def refused(capsys, path, *words):
    """The sentence about a command that is refused; the file of the gallery stays as it is."""
    before = path.read_bytes() if path.exists() else None
    capsys.readouterr()
    said = sentence(capsys, "gallery", *words)
    assert (path.read_bytes() if path.exists() else None) == before
    return said


def test_an_unreadable_image_is_named_and_nothing_is_written(photograph_run, folder, path, capsys):
    broken = folder / "bee" / "b_clear.png"
    broken.write_bytes(b"none")
    said = refused(capsys, path, "build", photograph_run.folder, folder, path)
    assert said == f"{broken} cannot be read (not an image); --skip-corrupt leaves such images out"


def test_a_gallery_is_not_overwritten(photograph_run, folder, built, capsys):
    said = refused(capsys, built, "build", photograph_run.folder, folder, built)
    assert said == f"{built}: a new file is expected; `tammes gallery add` adds to a gallery"


def test_an_individual_that_is_enrolled_is_refused(photograph_run, folder, built, capsys):
    said = refused(capsys, built, "add", built, photograph_run.folder, folder)
    assert said.startswith("Gallery.enrol expects identities that are not enrolled yet, got 'ape'")


@pytest.mark.parametrize("action", ["add", "query"])
def test_another_model_is_refused(photograph_run, digits_run, folder, built, capsys, action):
    said = refused(capsys, built, action, built, digits_run.folder, folder)
    assert "expects embeddings of the model of the gallery" in said


def test_strangers_cannot_be_removed(built, capsys):
    said = refused(capsys, built, "remove", built, "bee", "dog")
    assert said == (
        "Gallery.remove expects identities of the gallery, got 'dog', which is not among its 3"
    )


def test_a_gallery_does_not_become_empty(built, capsys):
    said = refused(capsys, built, "remove", built, "ape", "bee", "cat")
    assert said == (
        f"{built}: these are all its individuals, and a gallery needs one; delete the file instead"
    )


def test_a_rate_that_cannot_be_measured_is_refused(photograph_run, folder, path, capsys):
    said = refused(capsys, path, "build", photograph_run.folder, folder, path, "--far", 0.01)
    assert said == (
        "Gallery.threshold expects 100 pairs of different identities or more to measure at a FAR "
        "of 0.01, got 6"
    )


@pytest.mark.parametrize("far", [0.01, 2, "nan"])
def test_a_rate_is_refused_before_any_image_is_embedded(
    photograph_run, folder, path, capsys, monkeypatch, far
):
    def embed(*_, **__):
        raise AssertionError("images were embedded")

    monkeypatch.setattr(TrainedModel, "embed_batches", embed)
    said = refused(capsys, path, "build", photograph_run.folder, folder, path, "--far", far)
    assert said.startswith("Gallery.threshold expects ")


def test_one_individual_is_not_several(photograph_run, folder, path, capsys):
    for name in ("bee", "cat"):
        shutil.rmtree(folder / name)
    for each in sorted((folder / "ape").iterdir())[1:]:
        each.unlink()
    assert gallery("build", photograph_run.folder, folder, path) == 0
    assert capsys.readouterr().out == f"  {path}: 1 individual, 1 image, template mean\n"


def test_individuals_with_one_image_cannot_calibrate(photograph_run, folder, path, capsys):
    for name in ("a_turned.jpg", "b_clear.png", "c_grey.png"):
        for each in folder.iterdir():
            (each / name).unlink()
    said = refused(capsys, path, "build", photograph_run.folder, folder, path, "--far", 0.5)
    assert said == (
        "--far expects individuals with two images or more, of which one is held out, got none"
    )


def test_embeddings_that_are_not_numbers_are_refused(
    photograph_run, folder, built, capsys, monkeypatch
):
    features = TrainedModel.embed_batches

    def broken(self, images, **settings):
        for batch in features(self, images, **settings):
            yield batch._replace(embeddings=batch.embeddings * torch.nan)

    monkeypatch.setattr(TrainedModel, "embed_batches", broken)
    words = ("add", built, photograph_run.folder, folder, "--existing", "add")
    assert "expects finite embeddings, got NaN or infinity in row 0" in refused(
        capsys, built, *words
    )


def test_wrong_places_are_named(photograph_run, built, folder, tmp_path, capsys):
    run = photograph_run.folder
    missing = tmp_path / "none"
    said = refused(capsys, built, "query", built, run, missing)
    assert said == f"{missing}: there is no such image or folder"
    other = tmp_path / "other.safetensors"
    assert refused(capsys, built, "query", other, run, folder) == f"{other}: there is no such file"
    said = refused(capsys, built, "build", run, missing, other)
    assert said == f"{missing}: a folder with a subfolder for each individual is expected"
    said = refused(capsys, built, "build", run, folder, tmp_path / "gallery.pt")
    assert said == f"{tmp_path / 'gallery.pt'}: a gallery with the suffix .safetensors is expected"
