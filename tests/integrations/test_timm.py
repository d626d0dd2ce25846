"""margin_model: timm's own networks with a criterion in place of the classifier."""

import sys
import types

import pytest
import torch
from torch import nn

import tammes
from tammes.integrations.timm import margin_model
from tammes.optional import require


class Network(nn.Module):
    """A network as timm builds them: pooled features, then the classifier that its entry names."""

    def __init__(self, place="head.fc", num_classes=1000, in_chans=3, classifier=nn.Linear):
        super().__init__()
        self.stem = nn.Conv2d(in_chans, 6, 3)
        self.head = nn.Sequential()
        self.head.add_module("norm", nn.LayerNorm(6))
        self.head.add_module("fc", classifier(6, num_classes))
        self.num_classes = num_classes
        self.pretrained_cfg = {"classifier": place}

    def get_classifier(self):
        return self.head.fc

    def forward(self, images):
        return self.head(self.stem(images).mean((2, 3)))


class StubTimm(types.ModuleType):
    """Stand-in for as much of timm as margin_model calls."""

    settings = None
    networks = types.MappingProxyType(
        {
            "tiny": {},
            "distilled": {"place": ("head", "head_dist")},
            "convolutional": {"classifier": lambda n, m: nn.Conv2d(n, m, 1)},
        }
    )

    def list_models(self):
        return [*self.networks]

    def create_model(self, name, pretrained=False, **settings):
        self.settings = {"pretrained": pretrained, **settings}
        if name not in self.networks:
            raise RuntimeError(f"Unknown model ({name})")
        if settings.get("in_chans") == 0:
            raise RuntimeError("no channels")
        return Network(**self.networks[name], **settings)


@pytest.fixture
def stub(monkeypatch):
    module = StubTimm("timm")
    monkeypatch.setitem(sys.modules, "timm", module)
    return module


def cosface(size):
    return tammes.CosFace(size, num_classes=4, margin=0.1, scale=8.0)


def check_training(model, images):
    """It trains prototypes and network by timm's two calls, and its state is complete."""
    labels = torch.arange(len(images)) % 4
    criterion = model.get_classifier().criterion
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    output = model(images)
    assert output.shape == (len(images), criterion.head.embedding_size)
    criterion(output, labels).backward()
    optimizer.step()
    moved = {name for name, value in model.state_dict().items() if (value != before[name]).any()}
    own = [name for name in moved if name.endswith("criterion.head.weight")]
    assert len(own) == 1
    assert len(moved) > 1
    model.eval()
    with torch.no_grad():
        logits = model(images)
    assert logits.shape == (len(images), 4) == (len(images), model.num_classes)
    return own[0]


@pytest.mark.usefixtures("stub")
def test_the_criterion_takes_the_place_of_the_classifier():
    model = margin_model("tiny", cosface)
    assert check_training(model, torch.randn(8, 3, 8, 8)) == "head.fc.criterion.head.weight"
    images = torch.randn(2, 3, 8, 8)
    embeddings = model.head.norm(model.stem(images).mean((2, 3)))
    expected = model.get_classifier().criterion.logits(embeddings)
    torch.testing.assert_close(model(images), expected)
    torch.testing.assert_close(model.train()(images), embeddings)


def test_settings_reach_timm_and_a_criterion_of_the_right_size_is_taken_as_it_is(stub):
    criterion = cosface(6)
    model = margin_model("tiny", criterion, pretrained=True, in_chans=1)
    assert stub.settings == {"pretrained": True, "num_classes": 1, "in_chans": 1}
    assert model.get_classifier().criterion is criterion


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize(
    ("name", "criterion", "error", "message"),
    [
        ("tinny", cosface, ValueError, r"^timm has no network 'tinny'; did you mean tiny\?$"),
        ("tiny", cosface(5), ValueError, r"embedding_size=6 for tiny, got 5; give a function of"),
        ("tiny", lambda size: tammes.cosface(), TypeError, "expects a criterion, .* got Term$"),
        ("distilled", cosface, ValueError, r"got distilled with Linear at \('head', 'head_dist'\)"),
        ("convolutional", cosface, ValueError, "got convolutional with Conv2d at 'head.fc'"),
    ],
)
def test_it_says_what_is_wrong(name, criterion, error, message):
    with pytest.raises(error, match=message):
        margin_model(name, criterion)


@pytest.mark.usefixtures("stub")
def test_other_errors_of_timm_are_its_own():
    with pytest.raises(RuntimeError, match="no channels"):
        margin_model("tiny", cosface, in_chans=0)


def test_without_timm_it_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r"^timm could not .* pip install 'tammes\[timm\]'$"):
        margin_model("resnet18", cosface)


# ------------------------------------------------------------- timm itself, where it is installed


@pytest.fixture
def timm():
    try:
        return require("timm", extra="timm")
    except ImportError as error:
        pytest.skip(str(error))


@pytest.mark.timm
@pytest.mark.filterwarnings("default")  # what timm warns of is not ours
@pytest.mark.parametrize(
    ("name", "size", "settings"),
    [
        ("resnet10t", 512, {}),
        ("mobilenetv3_small_050", 1024, {}),
        ("convnext_atto", 320, {}),
        ("vit_tiny_patch16_224", 192, {"img_size": 32}),
    ],
)
def test_networks_of_timm_train_with_a_criterion(timm, name, size, settings):
    torch.manual_seed(0)
    model = margin_model(name, cosface, in_chans=1, **settings)
    assert model.get_classifier().criterion.head.embedding_size == size
    place = check_training(model, torch.randn(8, 1, 32, 32))
    assert place.startswith(f"{model.pretrained_cfg['classifier']}.")
    plain = timm.create_model(name, num_classes=0, in_chans=1, **settings).eval()
    state = {k: v for k, v in model.state_dict().items() if k in plain.state_dict()}
    plain.load_state_dict(state)
    images = torch.randn(2, 1, 32, 32)
    with torch.no_grad():
        expected = model.get_classifier().criterion.logits(plain(images))
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.timm
@pytest.mark.filterwarnings("default")
def test_timm_writes_no_network_that_it_does_not_have(timm):
    with pytest.raises(ValueError, match="timm has no network 'resnet10u'; did you mean resnet10t"):
        margin_model("resnet10u", cosface)
