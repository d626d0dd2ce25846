"""Names of the hub go through `datasets`; here it reads a folder, and no network."""

import sys
import threading

import pytest

from tammes.lab.data import DataError, load
from tammes.lab.data.sources import hub, loading


@pytest.fixture(autouse=True)
def reachable(monkeypatch):
    monkeypatch.setattr(hub, "is_reachable", lambda: True)


@pytest.fixture
def hub_folder(tmp_path, monkeypatch, write_table, picture, encode):
    """A data set as the hub has it; `OWNER/NAME` and `mnist` lead there."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("TAMMES_DATA", str(tmp_path / "nothing"))
    root = tmp_path / "on_the_hub"
    for split, count in (("train", 6), ("test", 4)):
        columns = {
            "image": [encode(picture(number)) for number in range(count)],
            "label": [number % 2 for number in range(count)],
        }
        path = root / "data" / f"{split}-00000-of-00001.parquet"
        write_table(path, columns, names=["zebra", "ant"])

    import datasets

    real = datasets.load_dataset
    asked = []

    def load_dataset(name, config=None):
        asked.append((name, config))
        return real(str(root), cache_dir=str(tmp_path / "hf"))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_a_hub_name_is_read_through_datasets(hub_folder, picture, said):
    train = load("owner/name", "train", report=said.append)
    assert hub_folder == [("owner/name", None)]
    assert train.classes == ("zebra", "ant")
    assert train.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert train.read(3).permute(1, 2, 0).numpy().tolist() == picture(3).tolist()
    assert len(load("owner/name", "test", report=said.append)) == 4
    assert said == ["owner/name: decoding 6 images", "owner/name: decoding 4 images"]


def test_images_that_the_hub_does_not_know_as_such_are_read_too(hub_folder, monkeypatch, said):
    import datasets

    mocked = datasets.load_dataset

    def as_plain_columns(name, config=None):
        loaded = mocked(name, config)
        plain = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
        return loaded.cast_column("image", plain)

    monkeypatch.setattr(datasets, "load_dataset", as_plain_columns)
    assert len(load("owner/name", "train", report=said.append)) == 6


def test_a_path_with_a_slip_in_it_is_said_to_be_looked_for_on_the_hub(
    hub_folder, said, tmp_path, monkeypatch
):
    (tmp_path / "owner").mkdir()
    monkeypatch.chdir(tmp_path)
    load("owner/name", "train", report=said.append)
    assert said[0] == "owner/name: no such local folder, trying the Hugging Face hub"


def test_a_hub_name_may_have_a_configuration(hub_folder, said):
    load("owner/name:small", "train", report=said.append)
    assert hub_folder == [("owner/name", "small")]


def test_a_hub_name_is_cached_too(hub_folder, said):
    load("owner/name", "train", report=said.append)
    said.clear()
    load("owner/name", "train", report=said.append)
    assert said == []


def test_a_hub_set_streams_as_others_do(hub_folder, picture, said):
    lazy = load("owner/name", "train", memory=10, report=said.append)
    assert lazy.pixels is None
    assert lazy.read(2).permute(1, 2, 0).numpy().tolist() == picture(2).tolist()


def test_a_known_name_goes_to_the_hub_where_there_are_no_files(hub_folder, said):
    load("mnist", "test", report=said.append)
    load("svhn", "test", report=said.append)
    assert hub_folder == [("ylecun/mnist", None), ("ufldl-stanford/svhn", "cropped_digits")]


def test_a_known_name_goes_to_files_first(
    tmp_path, monkeypatch, write_table, picture, encode, said
):
    monkeypatch.setattr(hub, "partitions", None)
    monkeypatch.setenv("TAMMES_DATA", str(tmp_path))
    columns = {"image": [encode(picture(0))] * 4, "label": [0, 1] * 2}
    for name in ("cifar10-train.parquet", "cifar10-test.parquet"):
        write_table(tmp_path / name, columns)
    # Not a part of CIFAR-10, though the name begins like it.
    write_table(tmp_path / "cifar100-train.parquet", {**columns, "label": [0, 1, 2, 3]})
    assert len(load("cifar10", "train", report=said.append)) == 4
    assert load("cifar10", "train", report=said.append).classes == ("0", "1")


def test_a_known_name_may_be_a_folder(tmp_path, image_folder, monkeypatch, said):
    monkeypatch.setenv("TAMMES_DATA", str(tmp_path))
    image_folder({"train/1": 2, "train/2": 2, "query/3": 1, "query/4": 2}, name="market1501")
    # Identities to search for are others than those to train on.
    assert load("market1501", "query", report=said.append).classes == ("3", "4")


def test_without_tammes_data_no_folder_beside_the_checkout_is_searched(
    tmp_path, monkeypatch, write_table, picture, encode, said
):
    columns = {"image": [encode(picture(0))] * 4, "label": [0, 1] * 2}
    write_table(tmp_path / "shared" / "data" / "market1501-train.parquet", columns)
    (tmp_path / "checkout").mkdir()
    monkeypatch.chdir(tmp_path / "checkout")
    monkeypatch.delenv("TAMMES_DATA", raising=False)
    with pytest.raises(DataError, match=r"in \$TAMMES_DATA, which is not set"):
        load("market1501", "train", report=said.append)


def test_a_set_without_a_known_copy_says_so(tmp_path, monkeypatch, said):
    monkeypatch.setenv("TAMMES_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"market1501: no files in .*; give its"):
        load("market1501", "train", report=said.append)


def test_the_only_split_is_everything(hub_folder, monkeypatch, said):
    real = hub.partitions
    monkeypatch.setattr(hub, "partitions", lambda *names, **more: {"full": real(*names)["train"]})
    assert len(load("owner/name", "train", report=said.append)) == 5
    assert "held out" in said[0]


def test_what_the_hub_cannot_load_is_one_sentence(monkeypatch, said):
    datasets = pytest.importorskip("datasets")

    def fail(name, config=None):
        raise ConnectionError("Couldn't reach 'owner/name'\nand more\n")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError) as raised:
        load("owner/name", "train", report=said.append)
    assert str(raised.value) == (
        "owner/name: not a local file or folder, and the Hugging Face hub could not load it "
        "(ConnectionError: Couldn't reach 'owner/name')"
    )


def test_a_hub_out_of_reach_is_said_at_once_with_the_name_as_typed(monkeypatch, said, tmp_path):
    # Nobody listens on this port, and datasets, which would retry, must not be imported.
    monkeypatch.undo()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("TAMMES_DATA", str(tmp_path))
    monkeypatch.delenv("https_proxy", raising=False)
    monkeypatch.delenv("HTTPS_PROXY", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"^owner/name: .* the Hugging Face hub cannot be reached;"):
        load("owner/name", "train", report=said.append)
    with pytest.raises(
        DataError, match=r"^mnist: .* hub \(ylecun/mnist\) cannot be reached; check"
    ):
        load("mnist", "train", report=said.append)


def test_a_name_that_never_resolves_is_not_waited_for(monkeypatch):
    monkeypatch.undo()
    waiting = threading.Event()

    def resolve(*_):
        waiting.wait()
        raise OSError

    monkeypatch.setattr(hub.socket, "create_connection", resolve)
    assert not hub.is_reachable(0.01)
    waiting.set()


def test_without_datasets_it_is_said_what_to_install(monkeypatch, said):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'tammes\[lab\]'"):
        load("owner/name", "train", report=said.append)


def test_every_known_name_looks_like_one_of_the_hub():
    names = [name for name, _ in loading.KNOWN.values() if name]
    assert all(name.count("/") == 1 for name in names)
    assert len(set(names)) == len(names)
