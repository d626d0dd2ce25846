"""Checkpoints: saved on some ranks and loaded on others, or refused as they are."""

import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
from cover import cover
from rank_pool import everywhere
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import tammes
from tammes import checkpoint
from tammes.checkpoint import save_load
from tammes.checkpoint.manifest import read
from tammes.lab.cli.main import main
from tammes.lab.training.sharded_head import gather_head
from tammes.schedules import WarmUp

CLASSES = 7
"""On two ranks 4 and 3, on three 3, 3 and 1, on four 2, 2, 2 and 1."""
SIZES = (1, 2, 3, 4)
OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.1, betas=(0.8, 0.9)),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1, amsgrad=True),
}


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(group, *, classes=CLASSES, size=5, kind=tammes.LinearHead, loss=None, optimizer="adamw"):
    """A criterion on some ranks, a backbone that is the same on all, and their optimizer."""
    if group == "plain":
        head = kind(size, classes, scale="learnable")
    else:
        head = tammes.ShardedHead(kind, size, classes, group=group, scale="learnable")
    criterion = tammes.Criterion(head, loss or tammes.softmax())
    backbone = torch.nn.Linear(2, size)
    groups = criterion.param_groups(backbone, lr=0.1, head_lr=0.2, weight_decay=0.01)
    return criterion, backbone, OPTIMIZERS[optimizer](groups)


def train(criterion, backbone, optimizer, steps=2):
    """Steps of an optimizer with gradients that are the same whoever has which rows."""
    head = criterion.head
    start, stop = getattr(head, "start", 0), getattr(head, "stop", CLASSES)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name == "log_scale":
                parameter.fill_(numbers(1).item())
            else:
                parameter.copy_(numbers(CLASSES, *parameter.shape[1:])[start:stop])
        for number, parameter in enumerate(backbone.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=number))
    for step in range(steps):
        for parameter in [*head.parameters(), *backbone.parameters()]:
            spread = any(parameter is mine for mine in (head.weight, head.bias))
            shape = (CLASSES, *parameter.shape[1:]) if spread else parameter.shape
            whole = numbers(*shape, seed=step + 5)
            parameter.grad = whole[start:stop].clone() if spread else whole
        optimizer.step()


def contents(criterion, backbone, optimizer):
    """Everything a checkpoint has to bring back, as arrays of this rank."""
    head = criterion.head
    rows, shared = {}, {}
    for name, parameter in [*head.named_parameters(), *backbone.named_parameters(prefix="b")]:
        spread = name in ("weight", "bias")
        (rows if spread else shared)[name] = parameter.detach().numpy().copy()
        for key, value in optimizer.state.get(parameter, {}).items():
            value = torch.as_tensor(value)
            into = rows if spread and value.ndim else shared
            into[f"{name}.{key}"] = value.detach().numpy().copy()
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return rows, shared, settings


def saved(group, folder, optimizer, fresh=False):
    parts = make(group, optimizer=optimizer)
    train(*parts)
    criterion, backbone, opt = parts
    opt.param_groups[0]["lr"] = 0.05
    checkpoint.save(folder, criterion, opt, backbone=backbone.state_dict(), epoch=3)
    return contents(*parts)


def loaded(group, folder, optimizer):
    parts = make(group, optimizer=optimizer)
    criterion, backbone, opt = parts
    more = checkpoint.load(folder, criterion, opt)
    backbone.load_state_dict(more["backbone"])
    assert more["epoch"] == 3
    return contents(*parts)


def together(ranks):
    """The rows of all ranks one after the other, and what they share."""
    rows = {
        key: torch.cat([torch.from_numpy(own[key]) for own, _, _ in ranks]) for key in ranks[0][0]
    }
    for _, shared, settings in ranks[1:]:
        assert settings == ranks[0][2]
        assert {k: v.tobytes() for k, v in shared.items()} == {
            k: v.tobytes() for k, v in ranks[0][1].items()
        }
    return rows, {k: torch.from_numpy(v) for k, v in ranks[0][1].items()}, ranks[0][2]


def assert_same(got, expected):
    assert got[2] == expected[2]
    for ours, theirs in zip(got[:2], expected[:2], strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert ours[key].dtype == theirs[key].dtype
            assert torch.equal(ours[key], theirs[key]), key


@pytest.mark.parametrize(
    ("ranks", "optimizer"), cover(itertools.product(SIZES, OPTIMIZERS), lambda *case: case)
)
def test_what_some_ranks_saved_any_other_number_loads_bit_for_bit(tmp_path, ranks, optimizer):
    expected = together(everywhere(ranks, saved, tmp_path, optimizer))
    assert len(expected[0]["weight"]) == CLASSES
    assert any("weight." in key for key in expected[0])
    assert any("b.weight." in key for key in expected[1])
    for others in SIZES:
        assert_same(together(everywhere(others, loaded, tmp_path, optimizer)), expected)
    # And a process that is no rank of anything, sharded or not.
    assert_same(together([loaded(None, tmp_path, optimizer)]), expected)
    assert_same(together([loaded("plain", tmp_path, optimizer)]), expected)


def test_fault_g_a_checkpoint_of_four_ranks_is_one_and_its_rows_are_nobodys(tmp_path):
    # peers.md 1.6 g: a file for each rank that only the same number of ranks could load.
    everywhere(4, saved, tmp_path, "sgd")
    index = read(tmp_path)
    assert [chunk.shape for _, chunk in index.chunks("head.weight")] == [(2, 5)] * 3 + [(1, 5)]
    assert index.tensors["head.weight"].shape == (CLASSES, 5)
    # What all ranks have is written once.
    assert len(index.chunks("more.backbone.weight")) == 1


def test_a_plain_heads_checkpoint_loads_into_a_sharded_head(tmp_path):
    expected = together([saved("plain", tmp_path, "adamw")])
    assert_same(together(everywhere(3, loaded, tmp_path, "adamw")), expected)


def few(group, folder):
    """More ranks than classes: the last has none, and its optimizer has no state for them."""
    head = tammes.ShardedHead(tammes.CosineHead, 2, 3, group=group)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    if len(head.weight):
        head.weight.grad = torch.ones_like(head.weight) * (1 + head.start)
        optimizer.step()
    checkpoint.save(folder, head, optimizer)
    head.add_classes(3, optimizer=optimizer)
    checkpoint.save(folder, head, optimizer)
    checkpoint.load(folder, head, optimizer)
    return optimizer.state[head.weight]["momentum_buffer"][:, 0].tolist()


def test_a_rank_without_classes_takes_part_in_saving_adding_and_loading(tmp_path):
    assert everywhere(4, few, tmp_path) == [[1.0, 2.0], [3.0, 0.0], [0.0, 0.0], []]
    head = tammes.CosineHead(2, 6)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    checkpoint.load(tmp_path, head, optimizer)
    assert optimizer.state[head.weight]["momentum_buffer"][:, 0].tolist() == [1, 2, 3, 0, 0, 0]


def test_what_terms_remember_and_schedules_come_back(tmp_path):
    def make_one():
        head = tammes.ShardedHead(tammes.CosineHead, 4, 6, scale=8.0)
        loss = tammes.adaface() + 0.1 * tammes.center()
        return tammes.Criterion(head, loss).schedule(margin=WarmUp(0.0, 0.4, steps=10))

    one, two = make_one(), make_one()
    for _ in range(3):
        one(numbers(5, 4), torch.arange(5))
    checkpoint.save(tmp_path, one)
    checkpoint.load(tmp_path, two)
    assert len(one.state_dict()) > 3
    for name, value in one.state_dict().items():
        assert torch.equal(two.state_dict()[name], value), name
    assert two.schedules["margin"]() == one.schedules["margin"]() > 0


def test_a_sampling_head_goes_on_with_the_samples_it_would_have_drawn(tmp_path):
    def make_one(rate):
        return tammes.ShardedHead(tammes.CosineHead, 4, 50, sample_rate=rate)

    head, own = make_one(0.2), torch.tensor([1, 2])
    for _ in range(3):
        head.sampler(own, 50)
    checkpoint.save(tmp_path, head)
    following = head.sampler(own, 50).index
    again, all_of_them = make_one(0.2), make_one(1.0)
    checkpoint.load(tmp_path, again)
    assert torch.equal(again.sampler(own, 50).index, following)
    # One that does not sample has no use for it, and does not ask for it.
    checkpoint.load(tmp_path, all_of_them)
    checkpoint.save(tmp_path, all_of_them)
    checkpoint.load(tmp_path, make_one(0.2))


MORE = {
    "epoch": 3,
    "share": 0.5,
    "done": False,
    "nothing": None,
    "text": "ü",
    "list": [1, [2.0, None], ()],
    "pair": (1, "a"),
    "by number": {1: {"x": 2}, "y": (3,)},
    "limits": [float("inf"), float("-inf")],
    "tensors": {
        "half": torch.tensor([1.0, -0.0], dtype=torch.half),
        "bf16": torch.tensor(2.0, dtype=torch.bfloat16),
        "double": torch.tensor([[1.0]], dtype=torch.double),
        "mask": torch.tensor([True, False]),
        "bytes": torch.arange(3, dtype=torch.uint8),
        "whole": torch.tensor([[2**62, -1]]),
        "none": torch.zeros(0, 3),
        "view": torch.arange(6.0).view(2, 3).T,
    },
    "a.b": {"c": torch.tensor(1.0)},
    "a": {"b.c": torch.tensor(2.0)},
}


def test_what_is_saved_beside_comes_back_as_it_was(tmp_path):
    head = tammes.CosineHead(2, 3)
    checkpoint.save(tmp_path, head, **MORE)
    got = checkpoint.load(tmp_path, head)
    tensors, expected = got.pop("tensors"), dict(MORE)
    for name, value in expected.pop("tensors").items():
        assert tensors[name].dtype == value.dtype
        assert tensors[name].shape == value.shape
        assert torch.equal(tensors[name], value)
    assert got.pop("a.b")["c"] == expected.pop("a.b")["c"]
    assert got.pop("a")["b.c"] == expected.pop("a")["b.c"]
    assert got == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"x": {1, 2}}, "got set as more.state.x"),
        (torch.nn.Linear(1, 1), "got Linear as more.state"),
        (torch.zeros(2, dtype=torch.complex64), "cannot hold tensors of torch.complex64"),
    ],
)
def test_what_cannot_be_saved_without_a_pickle_is_refused(tmp_path, value, message):
    with pytest.raises(TypeError, match=message):
        checkpoint.save(tmp_path / "new", tammes.CosineHead(2, 3), state=value)
    assert not (tmp_path / "new").exists()


def test_nothing_is_pickled(tmp_path, monkeypatch):
    criterion, backbone, optimizer = make(None)
    train(criterion, backbone, optimizer)

    def refuse(*_, **__):
        raise AssertionError("pickled")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch, "save", refuse)
    checkpoint.save(tmp_path, criterion, optimizer, backbone=backbone.state_dict())
    checkpoint.load(tmp_path, criterion, optimizer)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}


def test_a_second_save_leaves_nothing_of_the_first(tmp_path):
    everywhere(3, saved, tmp_path, "adamw")
    first = {path.name for path in tmp_path.iterdir()}
    saved(None, tmp_path, "sgd")
    second = {path.name for path in tmp_path.iterdir()}
    assert first & second == {"index.json"}
    assert (len(first), len(second)) == (4, 2)


# ------------------------------------------------------------------------------- interruption

KILLED = """
import os, sys, torch, tammes
from tammes import checkpoint
from tammes.checkpoint import manifest, safetensors_io

def dies(*_):
    os.kill(os.getpid(), 9)

folder = sys.argv[1]
head = tammes.CosineHead(64, 1000)
with torch.no_grad():
    head.weight.fill_(1)
checkpoint.save(folder, head, step=1)
with torch.no_grad():
    head.weight.fill_(2)
# At the first byte, after the file, before the index takes its place, and right after it.
points = [(safetensors_io, "byte_view"), (os, "fsync"), (os, "replace"), (manifest.Path, "iterdir")]
for module, name in points:
    child = os.fork()
    if child == 0:
        setattr(module, name, dies)
        checkpoint.save(folder, head, step=2)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9, name
    step = checkpoint.load(folder, head)["step"]
    assert bool((head.weight == step).all())
    print(name, step)
    with torch.no_grad():
        head.weight.fill_(2)
checkpoint.save(folder, head, step=3)
print(len(os.listdir(folder)))
"""


def test_a_save_that_is_killed_leaves_the_checkpoint_before_it(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "saved")],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    # Only when the index is there does the new one count; what was left over is taken away.
    assert done.stdout.split("\n") == ["byte_view 1", "fsync 1", "replace 1", "iterdir 2", "2", ""]


RANK_KILLED = """
import datetime, os, sys, torch, tammes
from tammes import checkpoint
from tammes.checkpoint import safetensors_io

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2,
    timeout=datetime.timedelta(seconds=20),
)
head = tammes.ShardedHead(tammes.CosineHead, 8, 100)
with torch.no_grad():
    head.weight.fill_(1)
checkpoint.save(f"{folder}/saved", head)
with torch.no_grad():
    head.weight.fill_(2)
if rank == 1:
    safetensors_io.blocks.__globals__["byte_view"] = lambda tensor: os.kill(os.getpid(), 9)
checkpoint.save(f"{folder}/saved", head)
"""


@pytest.mark.slow
def test_a_rank_that_is_killed_while_saving_leaves_the_checkpoint_before_it(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_KILLED, str(rank), str(tmp_path)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    told, _ = (process.communicate(timeout=60)[1] for process in processes)
    assert processes[1].returncode == -9
    assert processes[0].returncode == 1, told
    head = tammes.CosineHead(8, 100)
    checkpoint.load(tmp_path / "saved", head)
    assert bool((head.weight == 1).all())


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before_and_says_why(
    tmp_path, monkeypatch
):
    head = tammes.CosineHead(2, 3)
    checkpoint.save(tmp_path, head, step=1)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(checkpoint.CheckpointError, match=r"the previous one stays .*No space"):
            checkpoint.save(tmp_path, head, step=2)
    assert checkpoint.load(tmp_path, head) == {"step": 1}
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / "file").write_text("")
    with pytest.raises(checkpoint.CheckpointError, match="file: the checkpoint could not be saved"):
        checkpoint.save(tmp_path / "file", head)


# ------------------------------------------------------------------------------------- damage


def part_of(folder, number):
    return sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")[number]


def remove(folder):
    part_of(folder, 1).unlink()
    return "part-00002-of-00003-.*: this part of the checkpoint is missing"


def truncate(folder):
    path = part_of(folder, 2)
    os.truncate(path, path.stat().st_size - 1)
    return "part-00003-of-00003-.*: this part .* is damaged, it has .* bytes of"


def flip(folder):
    path = part_of(folder, 0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return "part-00001-of-00003-.*damaged, its checksum does not match"


def cut_index(folder):
    path = folder / "index.json"
    path.write_bytes(path.read_bytes()[:-20])
    return "index.json: damaged"


def alter_index(folder):
    path = folder / "index.json"
    path.write_text(path.read_text().replace('"epoch",\n    3', '"epoch",\n    4'))
    return "index.json: damaged, its checksum does not match"


def lose_index(folder):
    (folder / "index.json").unlink()
    return "not a checkpoint, it has no index.json"


def foreign_index(folder):
    (folder / "index.json").write_text('{"a": 1}')
    return "index.json: not the index of a 'tammes checkpoint 1'"


DAMAGES = [remove, truncate, flip, cut_index, alter_index, lose_index, foreign_index]


def refused(group, folder, make_options, give_optimizer=True):
    """Load what is to be refused into something that was trained; say whether it is as before."""
    parts = make(group, **make_options)
    criterion, _, optimizer = parts
    if not make_options:
        train(*parts)
    before = pickle.dumps(contents(*parts))
    try:
        checkpoint.load(folder, criterion, optimizer if give_optimizer else None)
    except checkpoint.CheckpointError as error:
        assert pickle.dumps(contents(*parts)) == before
        return str(error)
    return None


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("intact")
    everywhere(3, saved, folder, "adamw")
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_all_ranks_and_changes_nothing(
    tmp_path, intact, damage, capsys
):
    folder = tmp_path / "copy"
    shutil.copytree(intact, folder)
    message = damage(folder)
    # On two ranks the files are read through by one of them each, and both have to know.
    told = everywhere(2, refused, folder, {})
    assert told[0] == told[1]
    assert told[0].startswith(str(folder))
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.load(folder, make(None)[0])
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.export(folder, tmp_path / "one.safetensors")
    assert not (tmp_path / "one.safetensors").exists()
    assert main(["checkpoint", "inspect", str(folder)]) == 2
    assert str(folder) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 6}, "the head has embedding size 5 there and 6 here"),
        ({"classes": 8}, "the head has num classes 7 there and 8 here"),
        ({"kind": tammes.GaussianHead}, "the head has kind LinearHead there and GaussianHead here"),
        ({"loss": tammes.focal()}, "was saved with another loss"),
        (
            {"loss": 2 * tammes.softmax()},
            "another loss, weight of softmax there is 1.0 and here 2.0; load into criterion.head",
        ),
        ({"optimizer": "sgd"}, "the optimizer is AdamW there and SGD here"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_and_says_what_differs(intact, options, message):
    for told in everywhere(2, refused, intact, options):
        assert message in told
    assert message in refused("plain", intact, options)


def test_prototypes_of_another_loss_load_into_the_head(intact):
    criterion, _, _ = make("plain", loss=tammes.focal())
    checkpoint.load(intact, criterion.head)
    expected, _, _ = make("plain")
    checkpoint.load(intact, expected)
    assert torch.equal(criterion.head.weight, expected.head.weight)


def test_a_setting_that_a_term_did_not_have_then_is_its_default(tmp_path, monkeypatch):
    def make_one(**settings):
        return tammes.Criterion(tammes.CosineHead(3, 4), tammes.multi_positive(**settings))

    with monkeypatch.context() as before:
        known = {"multi_positive": {"weight": 1.0}, "schedules": {}}
        before.setattr(save_load, "describe_loss", lambda _: known)
        checkpoint.save(tmp_path, make_one())
    checkpoint.load(tmp_path, make_one())
    with pytest.raises(checkpoint.CheckpointError, match="form of multi_positive there is each"):
        checkpoint.load(tmp_path, make_one(form="apart"))


def test_settings_of_every_class_are_compared(tmp_path):
    def make_one(counts):
        return tammes.Criterion(tammes.CosineHead(3, 40, scale=8.0), tammes.ldam(counts=counts))

    counts = list(range(1, 41))
    checkpoint.save(tmp_path, make_one(counts))
    checkpoint.load(tmp_path, make_one(counts))
    with pytest.raises(checkpoint.CheckpointError, match="counts of ldam there is 40 values"):
        checkpoint.load(tmp_path, make_one(counts[::-1]))


def other_groups(folder):
    criterion, backbone, _ = make(None)
    optimizer = torch.optim.AdamW([*criterion.parameters(), *backbone.parameters()])
    checkpoint.load(folder, criterion, optimizer)


def test_an_optimizer_of_other_groups_is_refused(intact):
    with pytest.raises(
        checkpoint.CheckpointError, match=r"groups of \[2, 1, 2\] parameters there and of \[5\]"
    ):
        other_groups(intact)


def test_an_optimizer_that_was_not_saved_is_refused(tmp_path):
    criterion, _, optimizer = make(None)
    checkpoint.save(tmp_path, criterion)
    with pytest.raises(checkpoint.CheckpointError, match="no optimizer is in it"):
        checkpoint.load(tmp_path, criterion, optimizer)


def test_a_state_that_is_not_of_rows_is_refused_on_a_sharded_head(tmp_path):
    head = tammes.ShardedHead(tammes.CosineHead, 4, 6)
    optimizer = torch.optim.Adafactor(head.parameters())
    head.weight.grad = torch.ones_like(head.weight)
    optimizer.step()
    with pytest.raises(TypeError, match="got Adafactor with row_var of shape"):
        checkpoint.save(tmp_path / "new", head, optimizer)


def test_an_optimizer_with_numbers_for_rows_and_columns_comes_back(tmp_path):
    def make_one():
        criterion, backbone, _ = make("plain")
        parameters = [*criterion.parameters(), *backbone.parameters()]
        return criterion, backbone, torch.optim.Adafactor(parameters, lr=0.1)

    first, second = make_one(), make_one()
    train(*first)
    checkpoint.save(tmp_path, first[0], first[2])
    checkpoint.load(tmp_path, second[0], second[2])
    expected, got = (each[2].state_dict()["state"] for each in (first, second))
    assert expected.keys() == got.keys()
    for number, state in expected.items():
        for key, value in state.items():
            assert torch.equal(got[number][key], value), key


def test_a_state_of_another_shape_than_its_parameter_is_refused(tmp_path):
    def make_one(size):
        criterion = tammes.CosFace(4, 6)
        parameters = [torch.nn.Parameter(torch.ones(size, 3)), *criterion.parameters()]
        return criterion, torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    criterion, optimizer = make_one(5)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    checkpoint.save(tmp_path, criterion, optimizer)
    with pytest.raises(checkpoint.CheckpointError, match=r"shape \(5, 3\), expected \(2, 3\)"):
        checkpoint.load(tmp_path, *make_one(2))


def save_apart(group, folder):
    criterion, _, optimizer = make(group)
    torch.distributed.barrier(group)
    own = folder / str(torch.distributed.get_rank(group))
    try:
        checkpoint.save(own, criterion, optimizer)
    except checkpoint.CheckpointError as error:
        return str(error), sorted(path.name for path in own.iterdir())
    return None


def test_ranks_that_save_to_different_folders_are_told_and_lose_nothing(tmp_path):
    checkpoint.save(tmp_path / "0", make(None)[0])
    before = sorted(path.name for path in (tmp_path / "0").iterdir())
    first, second = everywhere(2, save_apart, tmp_path)
    for said, _ in (first, second):
        assert "part-00002-of-00002" in said
        assert "all ranks are expected to write to the same folder" in said
    assert first[1] == before
    assert second[1] == []
    checkpoint.load(tmp_path / "0", make(None)[0])


def test_what_is_no_criterion_is_refused(tmp_path):
    with pytest.raises(TypeError, match="expects a criterion or a head, got Linear"):
        checkpoint.save(tmp_path, torch.nn.Linear(2, 3))


def test_a_file_outside_of_the_folder_is_never_named(tmp_path):
    checkpoint.save(tmp_path, tammes.CosineHead(2, 3))
    path = tmp_path / "index.json"
    content = json.loads(path.read_text())
    del content["checksum"]
    ((_, part),) = content["parts"].items()
    content["parts"] = {"../secret.safetensors": part}
    from tammes.checkpoint.manifest import _checksum

    path.write_text(json.dumps({**content, "checksum": _checksum(content)}))
    with pytest.raises(checkpoint.CheckpointError, match="is not the name of a part"):
        read(tmp_path)


# -------------------------------------------------------------------------------- single files


def test_file_of_a_sharded_head_loads_into_a_plain_one_and_is_saved_again(tmp_path, intact):
    file, folder = tmp_path / "head.safetensors", tmp_path / "again"
    checkpoint.export(intact, file)
    plain, _, _ = make("plain")
    plain.head.load_state_dict(load_file(file))
    expected, _, _ = make("plain")
    checkpoint.load(intact, expected)
    for name, value in expected.head.state_dict().items():
        assert torch.equal(plain.head.state_dict()[name], value)
    checkpoint.divide(file, folder, parts=3)
    assert [chunk.shape[0] for _, chunk in read(folder).chunks("head.weight")] == [3, 3, 1]
    again, _, _ = make("plain")
    assert checkpoint.load(folder, again) == {}
    assert torch.equal(again.head.weight, expected.head.weight)
    assert torch.equal(again.head.bias, expected.head.bias)
    with pytest.raises(checkpoint.CheckpointError, match="kind LinearHead there and Cosine"):
        checkpoint.load(folder, tammes.CosineHead(5, CLASSES))


def test_a_file_of_somebody_else_becomes_a_checkpoint(tmp_path):
    weight = numbers(9, 4)
    for name in ("weight", "head.weight", "prototypes"):
        save_file({name: weight, "other": numbers(1)}, tmp_path / "a.safetensors")
        checkpoint.divide(tmp_path / "a.safetensors", tmp_path / "folder", parts=2)
        head = tammes.CosineHead(4, 9)
        checkpoint.load(tmp_path / "folder", head)
        assert torch.equal(head.weight, weight)


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\0\0\0\0{}", b"x" * 100])
def test_a_file_that_is_none_is_refused(tmp_path, content):
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(checkpoint.CheckpointError, match="damaged, or not a safetensors file"):
        checkpoint.divide(tmp_path / "a.safetensors", tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_a_file_without_prototypes_is_refused(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(checkpoint.CheckpointError, match="no prototypes of shape"):
        checkpoint.divide(tmp_path / "a.safetensors", tmp_path / "folder")


@pytest.mark.parametrize(
    ("more", "said", "message"),
    [
        ({"bias": torch.zeros(5)}, {}, r"bias has shape \(5,\), expected \(6,\)"),
        ({"log_scale": torch.zeros(2)}, {}, r"log_scale has shape \(2,\), expected \(1,\)"),
        ({"bias": torch.zeros(6, dtype=torch.int32)}, {}, "bias has dtype I32, expected a float"),
        ({"head.weight": torch.zeros(6, 4)}, {}, "it has more than one weight"),
        ({}, {"tammes_head": "{"}, "its description of the head does not match its tensors"),
        ({}, {"tammes_head": "[]"}, "its description of the head does not match its tensors"),
        ({}, {"tammes_head": '{"num_classes": 7}'}, "its description of the head does not match"),
    ],
)
def test_a_file_that_is_refused_leaves_the_checkpoint_that_was_there(tmp_path, more, said, message):
    head, file, folder = tammes.CosineHead(4, 6), tmp_path / "a.safetensors", tmp_path / "folder"
    checkpoint.save(folder, head)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    save_file({"weight": numbers(6, 4), **more}, file, said)
    with pytest.raises(checkpoint.CheckpointError, match=message) as error:
        checkpoint.divide(file, folder)
    assert str(file) in str(error.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_file_that_cannot_be_divided_to_its_end_leaves_no_parts(tmp_path, monkeypatch):
    save_file({"weight": numbers(6, 4)}, tmp_path / "a.safetensors")
    names = []

    def part_name(number, parts, token):
        names.append(number)
        if len(names) == 3:
            raise KeyboardInterrupt
        return f"part-{number + 1:05d}-of-{parts:05d}-{token}.safetensors"

    monkeypatch.setattr("tammes.checkpoint.save_load.part_name", part_name)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.divide(tmp_path / "a.safetensors", tmp_path / "folder", parts=4)
    assert not list((tmp_path / "folder").iterdir())


def test_a_tensor_as_a_key_is_refused_when_it_is_saved(tmp_path):
    with pytest.raises(TypeError, match=r"expects no tensors as keys, got one in more\.v"):
        checkpoint.save(tmp_path / "new", tammes.CosineHead(4, 6), v={torch.zeros(1): 1})


def resume_fully_sharded(group, folder):
    """Steps of a backbone within fully_shard, half of them after a load into new objects."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    def make_one():
        criterion, backbone, _ = make(group)
        fully_shard(backbone, mesh=DeviceMesh.from_group(group, "cpu"))
        groups = [{"params": [*criterion.parameters()]}, {"params": [*backbone.parameters()]}]
        return criterion, backbone, torch.optim.AdamW(groups, lr=0.1)

    def steps(criterion, backbone, optimizer, count):
        for step in range(count):
            optimizer.zero_grad()
            criterion(backbone(numbers(3, 2, seed=step)), torch.tensor([0, 3, 6])).backward()
            optimizer.step()

    first, second = make_one(), make_one()
    steps(*first, 2)
    checkpoint.save(folder, first[0], first[2], backbone=first[1].state_dict())
    saved = checkpoint.load(folder, second[0], second[2])["backbone"]
    set_model_state_dict(second[1], saved, options=StateDictOptions(full_state_dict=True))
    steps(*first, 2)
    steps(*second, 2)
    for mine, theirs in zip(second[1].parameters(), first[1].parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())
    assert torch.equal(second[0].head.weight, first[0].head.weight)


def test_the_optimizer_of_a_fully_sharded_backbone_goes_on_where_it_was(tmp_path):
    everywhere(2, resume_fully_sharded, tmp_path)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.ASGD])
def test_learned_scale_and_its_optimizer_state_come_back_in_any_shape(tmp_path, kind):
    def make_one(sharded, shape):
        criterion, backbone, _ = make(None if sharded else "plain")
        # Without a dimension, as it was in older checkpoints.
        scale = criterion.head.log_scale.detach().view(shape)
        criterion.head.log_scale = torch.nn.Parameter(scale)
        parameters = [*criterion.parameters(), *backbone.parameters()]
        return criterion, backbone, kind(parameters, lr=0.1)

    for old, new in itertools.product([False, True], repeat=2):
        first, second = make_one(old, ()), make_one(new, (1,))
        train(*first)
        checkpoint.save(tmp_path, first[0], first[2], backbone=first[1].state_dict())
        second[1].load_state_dict(checkpoint.load(tmp_path, second[0], second[2])["backbone"])
        for criterion, _, optimizer in (first, second):
            for parameter in criterion.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        assert second[0].head.log_scale.shape == (1,)
        assert torch.equal(second[0].head.scale, first[0].head.scale)


def test_the_file_of_a_learned_scale_is_divided_by_rows_but_for_the_scale(tmp_path):
    head = tammes.CosineHead(4, 6, scale="learnable")
    head.scale = 3.0
    checkpoint.save(tmp_path / "saved", head)
    checkpoint.export(tmp_path / "saved", tmp_path / "head.safetensors")
    checkpoint.divide(tmp_path / "head.safetensors", tmp_path / "divided", parts=3)
    again = tammes.CosineHead(4, 6, scale="learnable")
    checkpoint.load(tmp_path / "divided", again)
    assert torch.equal(again.weight, head.weight)
    assert torch.equal(again.log_scale, head.log_scale)


def test_every_part_is_read_through_by_somebody(tmp_path):
    save_file({"weight": numbers(8, 4)}, tmp_path / "a.safetensors")
    for number in range(4):
        folder = tmp_path / str(number)
        checkpoint.divide(tmp_path / "a.safetensors", folder, parts=4)
        part = sorted(folder.glob("part-*"))[number]
        part.write_bytes(part.read_bytes()[:-1] + b"x")
        with pytest.raises(checkpoint.CheckpointError, match="its checksum does not match"):
            checkpoint.load(folder, tammes.CosineHead(4, 8))


def test_a_head_that_is_put_together_has_the_scale_of_now():
    head = tammes.ShardedHead(tammes.CosineHead, 4, 3, scale=10.0, implementation="streamed")
    head.scale = 20.0
    whole = gather_head(head)
    assert whole.scale == 20.0
    assert whole.implementation == "streamed"
    assert torch.equal(whole.weight, head.weight)


def test_torchs_own_reader_of_safetensors_reads_the_parts(intact):
    import torch.distributed.checkpoint as dcp

    expected, _, _ = make("plain")
    checkpoint.load(intact, expected)
    state = {"head.weight": torch.zeros(CLASSES, 5)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(intact)))
    assert_close(state["head.weight"], expected.head.weight.detach(), rtol=0, atol=0)


def test_rows_travel_in_blocks(tmp_path, monkeypatch):
    from tammes.checkpoint import safetensors_io

    # Two rows at a time, so that a block is never the whole.
    monkeypatch.setattr(safetensors_io, "_BLOCK", 2 * 4 * 4)
    head, file = tammes.LinearHead(4, 9), tmp_path / "head.safetensors"
    checkpoint.save(tmp_path / "saved", head)
    checkpoint.export(tmp_path / "saved", file)
    assert torch.equal(load_file(file)["weight"], head.weight)
    again = tammes.LinearHead(4, 9)
    checkpoint.divide(file, tmp_path / "divided", parts=4)
    checkpoint.load(tmp_path / "divided", again)
    assert torch.equal(again.weight, head.weight)
    longest = max(len(block) for block in safetensors_io.blocks(torch.zeros(9, 4)))
    assert longest == 2


# -------------------------------------------------------------------------------- the command


def test_the_command_inspects_merges_and_splits(tmp_path, intact, capsys):
    file, folder = tmp_path / "one.safetensors", tmp_path / "split"
    assert main(["checkpoint", "inspect", str(intact)]) == 0
    said = capsys.readouterr().out
    assert "7 classes of 5 numbers, float32" in said
    assert "LinearHead(scale=learnable, bias=True)" in said
    assert "optimizer       AdamW" in said
    assert "beside          backbone, epoch" in said
    assert said.count("classes 0 to 2") == said.count("classes 6 to 6") == 1
    assert main(["checkpoint", "merge", str(intact), str(file)]) == 0
    assert "7 prototypes of 5 numbers" in capsys.readouterr().out
    assert main(["checkpoint", "split", str(file), str(folder), "--parts", "2"]) == 0
    assert "parts           2" in capsys.readouterr().out
    assert main(["checkpoint", "inspect", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["classes"], found["embedding_size"], found["optimizer"]) == (7, 5, None)
    assert [part["classes"] for part in found["parts"].values()] == [[0, 3], [4, 6]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect"], "arguments are required: FOLDER"),
        (["merge", "FOLDER", "one.pt"], "one.pt: a file with the suffix .safetensors is expected"),
        (["split", "none.safetensors", "FOLDER"], "none.safetensors: there is no such file"),
        (["split", "none.safetensors", "x", "--parts", "0"], "1 part or more, got 0"),
        (["look", "x"], "invalid choice: 'look'"),
    ],
)
def test_the_command_says_what_is_wrong_in_a_sentence(intact, capsys, words, message):
    words = [str(intact) if word == "FOLDER" else word for word in words]
    assert main(["checkpoint", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def save_pooled(group, folder):
    torch.manual_seed(4)
    whole = tammes.CosineHead(4, 7, subcenters=3)
    head = tammes.ShardedHead(tammes.CosineHead, 4, 7, group=group, subcenters=3)
    head.load_state_dict(whole.state_dict())
    checkpoint.save(folder, head)
    return whole.weight.detach().numpy()


def test_several_prototypes_per_class_are_saved_by_some_ranks_and_loaded_by_one(tmp_path):
    weight = torch.from_numpy(everywhere(3, save_pooled, tmp_path / "folder")[0])
    assert read(tmp_path / "folder").tensors["head.weight"].shape == (7, 3, 4)
    head = tammes.CosineHead(4, 7, subcenters=3)
    checkpoint.load(tmp_path / "folder", head)
    assert torch.equal(head.weight, weight)
    checkpoint.export(tmp_path / "folder", tmp_path / "one.safetensors")
    checkpoint.divide(tmp_path / "one.safetensors", tmp_path / "again", parts=2)
    again = tammes.CosineHead(4, 7, subcenters=3)
    checkpoint.load(tmp_path / "again", again)
    assert torch.equal(again.weight, weight)
    soft = tammes.CosineHead(4, 7, subcenters=3, pooling="soft")
    with pytest.raises(
        checkpoint.CheckpointError, match="the head has pooling max there and soft here"
    ):
        checkpoint.load(tmp_path / "folder", soft)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"head.weight has shape \(7, 3, 4\), expected"
    ):
        checkpoint.load(tmp_path / "folder", tammes.CosineHead(4, 7))
