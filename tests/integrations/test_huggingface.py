"""MarginModel: Trainer trains, saves and resumes the prototypes; the hub gets a whole model."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModel,
    BertConfig,
    ResNetConfig,
    Trainer,
    TrainingArguments,
    ViTConfig,
    Wav2Vec2Config,
)

import tammes
from tammes.integrations.huggingface import MarginCallback, MarginModel
from tammes.schedules import WarmUp

SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def vit(**settings):
    sizes = SIZES | {"hidden_size": 16, "image_size": 8, "patch_size": 4} | settings
    return AutoModel.from_config(ViTConfig(**sizes))


def bert(**settings):
    return AutoModel.from_config(BertConfig(vocab_size=20, hidden_size=16, **SIZES, **settings))


def model_of_images(criterion=None, **settings):
    torch.manual_seed(0)
    return MarginModel(vit(**settings), criterion or tammes.CosFace(16, 4, margin=0.1, scale=8.0))


def images(n=32):
    """Pictures of four classes, each bright in one quarter."""
    generator = torch.Generator().manual_seed(0)
    pictures = 0.3 * torch.randn(n, 3, 8, 8, generator=generator)
    for i in range(n):
        row, column = divmod(i % 4, 2)
        pictures[i, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1
    return [{"pixel_values": p, "labels": i % 4} for i, p in enumerate(pictures)]


def arguments(folder, **settings):
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "learning_rate": 3e-3,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
        "seed": 0,
    }
    return TrainingArguments(**(given | settings))


# -------------------------------------------------------------------------- forward


def test_output_has_loss_logits_and_embeddings_of_the_criterion():
    model = model_of_images().eval()
    pixels, labels = torch.randn(5, 3, 8, 8), torch.tensor([0, 1, 2, 3, 0])
    output = model(pixel_values=pixels, labels=labels)
    features = model.backbone(pixel_values=pixels).pooler_output
    torch.testing.assert_close(output.embeddings, features)
    torch.testing.assert_close(output.loss, model.criterion(features, labels))
    torch.testing.assert_close(output.logits, model.criterion.logits(features))
    assert model(pixel_values=pixels).loss is None
    weights = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
    first = model(pixel_values=pixels, labels=labels, sample_weight=weights).loss
    torch.testing.assert_close(first, model.criterion(features[:1], labels[:1]))


def test_the_mean_over_tokens_leaves_padding_out():
    model = MarginModel(bert(), tammes.CosFace(16, 3), pooling="mean").eval()
    ids = torch.tensor([[1, 2, 3, 0, 0], [4, 5, 6, 7, 8]])
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    embeddings = model(input_ids=ids, attention_mask=mask).embeddings
    short = model(input_ids=ids[:1, :3], attention_mask=mask[:1, :3]).embeddings
    torch.testing.assert_close(embeddings[:1], short)
    hidden = model.backbone(input_ids=ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(embeddings[1], hidden[1].mean(0))
    model.pooling = "first"
    first = model(input_ids=ids, attention_mask=mask).embeddings
    torch.testing.assert_close(first, hidden[:, 0])


def test_audio_of_unequal_length_is_pooled_over_its_own_frames():
    config = Wav2Vec2Config(
        **SIZES,
        hidden_size=16,
        conv_dim=(8, 8),
        conv_stride=(4, 4),
        conv_kernel=(8, 8),
        num_conv_pos_embeddings=2,
        num_conv_pos_embedding_groups=2,
        feat_extract_norm="layer",
        apply_spec_augment=False,
    )
    model = MarginModel(AutoModel.from_config(config), tammes.CosFace(16, 3)).eval()
    sound = torch.randn(2, 400)
    mask = torch.ones(2, 400, dtype=torch.long)
    mask[0, 200:] = 0
    embeddings = model(input_values=sound, attention_mask=mask).embeddings
    output = model.backbone(input_values=sound, attention_mask=mask).last_hidden_state
    frames = int(model.backbone._get_feat_extract_output_lengths(torch.tensor(200)))
    assert 0 < frames < output.shape[1]
    torch.testing.assert_close(embeddings[0], output[0, :frames].mean(0))
    torch.testing.assert_close(embeddings[1], output[1].mean(0))


def test_a_convolutional_network_and_a_plain_module_are_backbones_too():
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    model = MarginModel(AutoModel.from_config(config), tammes.CosFace(16, 3)).eval()
    assert model(pixel_values=torch.randn(2, 3, 32, 32)).embeddings.shape == (2, 16)
    pooled = model(pixel_values=torch.ones(2, 3, 32, 32)).embeddings
    model.pooling = "mean"
    torch.testing.assert_close(model(pixel_values=torch.ones(2, 3, 32, 32)).embeddings, pooled)
    plain = MarginModel(nn.Linear(6, 16), tammes.CosFace(16, 3))
    assert plain(pixel_values=torch.randn(2, 6)).logits.shape == (2, 3)


@pytest.mark.slow
def test_compiled_it_gives_the_same_loss_and_gradient():
    model = model_of_images()
    pixels, labels = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])
    expected = model(pixel_values=pixels, labels=labels)
    expected.loss.backward()
    gradient = model.criterion.head.weight.grad.clone()
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    output = compiled(pixel_values=pixels, labels=labels)
    output.loss.backward()
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(output.logits, expected.logits)
    torch.testing.assert_close(model.criterion.head.weight.grad, gradient)


# -------------------------------------------------------------------------- Trainer


def test_trainer_trains_backbone_and_prototypes_and_sees_logits(tmp_path):
    model = model_of_images()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def accuracy(prediction):
        assert prediction.predictions.shape == (32, 4)
        right = prediction.predictions.argmax(1) == prediction.label_ids
        return {"accuracy": float(right.mean())}

    trainer = Trainer(
        model,
        arguments(tmp_path, num_train_epochs=10, logging_strategy="epoch"),
        train_dataset=images(),
        compute_metrics=accuracy,
    )
    MarginCallback().add_to(trainer)
    trainer.train()
    assert trainer.evaluate(images())["eval_accuracy"] > 0.9
    assert model.measures["accuracy"] > 0.9
    assert (model.criterion.head.weight != before["criterion.head.weight"]).any()
    changed = [n for n, v in model.state_dict().items() if (v != before[n]).any()]
    assert any(name.startswith("backbone.") for name in changed)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 10
    for entry in logged:
        # One term, so that its mean is the loss; Trainer rounds what it logs.
        assert entry["terms/cosface"] == pytest.approx(entry["loss"], rel=1e-2)
        assert 0 < entry["class_margin"] < 180


def test_reporters_see_the_terms_where_the_callback_is_added_in_front(tmp_path):
    seen = []

    class Reporter(MarginCallback):
        def on_log(self, args, state, control, **kwargs):
            seen.append(set(kwargs["logs"]))

    model = model_of_images(tammes.NormFace(16, 4, scale="learnable"))
    options = arguments(tmp_path, max_steps=2, logging_strategy="steps", logging_steps=1)
    trainer = Trainer(model, options, train_dataset=images(), callbacks=[Reporter()])
    MarginCallback().add_to(trainer)
    trainer.train()
    assert {"terms/normface", "class_margin", "scale"} <= seen[0]


@pytest.mark.parametrize("steps", [1, 4])
def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path, steps):
    model = model_of_images()
    options = arguments(
        tmp_path,
        max_steps=2,
        per_device_train_batch_size=32 // steps,
        gradient_accumulation_steps=steps,
        optim="sgd",
        learning_rate=0.1,
        max_grad_norm=0.0,
    )
    Trainer(model, options, train_dataset=images()).train()
    expected = model_of_images()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    batch = images()
    pixels = torch.stack([example["pixel_values"] for example in batch])
    labels = torch.tensor([example["labels"] for example in batch])
    for rate in (0.1, 0.05):
        optimizer.param_groups[0]["lr"] = rate
        loss = expected(pixel_values=pixels, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(
        model.criterion.head.weight, expected.criterion.head.weight, rtol=1e-4, atol=1e-5
    )


# Its name in newer transformers, and the former one.
CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in TrainingArguments.__dataclass_fields__
)


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({CHECKPOINTING: True}, 1e-6),
        ({"bf16": True}, 1e-2),
        pytest.param(
            {"torch_compile": True, "torch_compile_backend": "aot_eager"},
            1e-5,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["checkpointing", "bf16", "compile"],
)
def test_options_of_trainer_change_the_training_no_more_than_they_should(
    tmp_path, settings, tolerance
):
    def train(folder, **settings):
        model = model_of_images()
        options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3, "optim": "sgd"}
        trainer = Trainer(
            model,
            arguments(folder, **options, **settings),
            train_dataset=images(),
            callbacks=[MarginCallback()],
        )
        trainer.train()
        return MarginModel.from_pretrained(folder / "checkpoint-3").criterion.head.weight

    plain, other = train(tmp_path / "plain"), train(tmp_path / "other", **settings)
    start = model_of_images().criterion.head.weight
    assert (plain - start).norm() > 0
    assert (other - plain).norm() <= tolerance * (plain - start).norm()


def test_accelerate_trains_it_as_any_module():
    accelerator = Accelerator(cpu=True)
    model = model_of_images()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    before = model.criterion.head.weight.clone()
    loader = torch.utils.data.DataLoader(images(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(5):
        for batch in loader:
            loss = model(**batch).loss
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(float(loss.detach()))
    assert sum(losses[-4:]) < sum(losses[:4])
    assert (accelerator.unwrap_model(model).criterion.head.weight != before).any()


def test_the_callback_steps_schedules_once_for_each_optimizer_step(tmp_path):
    warm_up = WarmUp(0.0, 0.2, steps=10)
    criterion = tammes.CosFace(16, 4, scale=8.0).schedule(by_hand=True, margin=warm_up)
    options = arguments(tmp_path, max_steps=3, gradient_accumulation_steps=4)
    trainer = Trainer(
        model_of_images(criterion),
        options,
        train_dataset=images(),
        callbacks=[MarginCallback(step_schedules=True)],
    )
    trainer.train()
    assert int(warm_up.steps) == 3


def test_an_interrupted_training_resumes_bit_identically(tmp_path):
    def train(folder, model, **settings):
        options = arguments(folder, max_steps=6, save_strategy="steps", save_steps=3, **settings)
        trainer = Trainer(model, options, train_dataset=images(), callbacks=[MarginCallback()])
        return trainer, model

    def model():
        # Dropout, and a margin that changes: both go on where they were.
        criterion = tammes.CosFace(16, 4, scale=8.0)
        criterion.schedule(margin=WarmUp(0.0, 0.2, steps=6))
        return model_of_images(criterion, hidden_dropout_prob=0.1)

    trainer, whole = train(tmp_path / "a", model())
    trainer.train()
    trainer, resumed = train(tmp_path / "b", model())
    trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert resumed.criterion.schedules["margin"].steps == 6
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    # The callback made the checkpoint a whole model.
    half = MarginModel.from_pretrained(tmp_path / "a" / "checkpoint-3")
    saved = load_file(tmp_path / "a" / "checkpoint-3" / "model.safetensors")
    assert torch.equal(half.criterion.head.weight, saved["criterion.head.weight"])


def train_for_comparison(folder, batch_size):
    """Train for four steps with 16 examples each, over all processes."""
    # The process group is made here.
    options = arguments(
        folder, max_steps=4, per_device_train_batch_size=batch_size, optim="sgd", learning_rate=0.1
    )
    assert options.world_size * batch_size == 16
    losses = {
        "own": tammes.cosface(margin=0.1),
        # Compares the examples of all processes with each other.
        "group": tammes.cosface(margin=0.1) + tammes.nca(scale=4.0, normalize=True),
    }
    for kind, loss in losses.items():
        torch.manual_seed(0)
        head = tammes.CosineHead(16, 4, scale=8.0)
        criterion = tammes.Criterion(head, loss, group=True if kind == "group" else None)
        trainer = Trainer(model_of_images(criterion), options, train_dataset=images())
        trainer.train()
        trainer.save_model(Path(folder) / kind)


@pytest.mark.slow
def test_two_processes_train_the_model_of_one(tmp_path):
    train_for_comparison(tmp_path / "one", 16)
    script = tmp_path / "training.py"
    script.write_text(
        "import test_huggingface, torch\n"
        f"test_huggingface.train_for_comparison({str(tmp_path / 'two')!r}, 8)\n"
        "torch.distributed.destroy_process_group()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    paths = [str(Path(tammes.__file__).parents[1]), str(Path(__file__).parent)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    start = model_of_images().state_dict()
    for kind in ("own", "group"):
        one, two = (load_file(tmp_path / n / kind / "model.safetensors") for n in ("one", "two"))
        assert (one["backbone.layernorm.weight"] != start["backbone.layernorm.weight"]).any()
        for name, value in one.items():
            torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------- files and the hub


@pytest.mark.parametrize(
    "criterion",
    [
        lambda: tammes.CosFace(16, 3, margin=0.2, scale=8.0),
        lambda: tammes.Softmax(16, 3, class_weights=[1.0, 2.0, 0.5], ignore_index=-1),
        lambda: tammes.LDAM(16, 3, counts=[5, 2, 9]),
        lambda: tammes.LargeMarginGaussian(16, 3),
        lambda: tammes.Criterion(
            tammes.CosineHead(16, 3, scale="learnable"),
            tammes.arcface(margin=0.3) + 0.5 * tammes.center(),
        ),
    ],
)
def test_a_saved_model_loads_as_it_was(tmp_path, criterion):
    model = MarginModel(bert(**DROPOUT), criterion(), pooling="mean")
    ids, labels = torch.randint(20, (4, 6)), torch.tensor([0, 1, 2, 0])
    # States of terms move, too.
    model(input_ids=ids, labels=labels)
    model.eval().save_pretrained(tmp_path)
    loaded = MarginModel.from_pretrained(tmp_path)
    assert (loaded.training, loaded.pooling) == (False, "mean")
    expected, got = (one(input_ids=ids, labels=labels) for one in (model, loaded))
    assert torch.equal(got.logits, expected.logits)
    assert torch.equal(got.loss, expected.loss)
    assert loaded.state_dict().keys() == model.state_dict().keys()


def test_parts_without_a_description_are_given_by_their_owner(tmp_path):
    @tammes.term(reads="target hardest")
    def my_hinge(split, *, margin=0.2):
        return (split.hardest - split.target + margin).relu()

    def criterion():
        head = tammes.CosineHead(16, 3, scale=8.0)
        return tammes.Criterion(head, my_hinge()).schedule(margin=WarmUp(0.0, 0.2, steps=9))

    model = MarginModel(nn.Linear(6, 16), criterion())
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"does not describe its backbone.* give .* a backbone="):
        MarginModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"does not describe its criterion.* give .* a criterion="):
        MarginModel.from_pretrained(tmp_path, backbone=nn.Linear(6, 16))
    with pytest.raises(ValueError, match=r"weights do not fit .*\(backbone.bias\)"):
        MarginModel.from_pretrained(
            tmp_path, backbone=nn.Linear(6, 16, bias=False), criterion=criterion()
        )
    loaded = MarginModel.from_pretrained(tmp_path, backbone=nn.Linear(6, 16), criterion=criterion())
    assert torch.equal(loaded.backbone.weight, model.backbone.weight)


def test_a_backbone_without_its_pooler_loads_without_it(tmp_path):
    backbone = AutoModel.from_config(vit().config, add_pooling_layer=False)
    MarginModel(backbone, tammes.CosFace(16, 4)).save_pretrained(tmp_path)
    loaded = MarginModel.from_pretrained(tmp_path)
    assert loaded.backbone.pooler is None
    pixels = torch.randn(2, 3, 8, 8)
    expected = backbone(pixel_values=pixels).last_hidden_state.mean(1)
    torch.testing.assert_close(loaded(pixel_values=pixels).embeddings, expected)


def test_schedules_are_left_to_training(tmp_path):
    criterion = tammes.CosFace(16, 4).schedule(margin=WarmUp(0.0, 0.2, steps=9))
    model_of_images(criterion).save_pretrained(tmp_path)
    assert len(MarginModel.from_pretrained(tmp_path).criterion.schedules) == 0


def test_a_name_from_a_file_builds_nothing_but_a_model(tmp_path):
    model_of_images().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["tammes"]["backbone"]["class"] = "pipeline"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"expects a model of transformers .* got 'pipeline'"):
        MarginModel.from_pretrained(tmp_path)


def test_the_hub_gets_weights_a_description_and_a_card(monkeypatch):
    uploaded = {}

    class Client:
        def __init__(self, token=None):
            self.token = token

        def create_repo(self, repo_id, **settings):
            return type("Url", (), {"repo_id": repo_id})

        def upload_folder(self, *, repo_id, folder_path, **settings):
            uploaded["to"] = repo_id
            for path in Path(folder_path).iterdir():
                uploaded[path.name] = path.read_bytes()
            return "commit"

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Client)
    model = model_of_images()
    model.measures = {"accuracy": 0.93125}
    assert model.push_to_hub("someone/quarters") == "commit"
    assert uploaded.keys() == {"to", "model.safetensors", "config.json", "README.md"}
    assert uploaded["to"] == "someone/quarters"
    card = uploaded["README.md"].decode()
    assert "library_name: tammes" in card
    assert "| loss | `cosface(margin=0.1)` |" in card
    assert "| accuracy | 0.9313 |" in card
    assert "(optimum 109.47°)" in card


def test_a_model_of_the_hub_is_downloaded(monkeypatch, tmp_path):
    model = model_of_images()
    model.save_pretrained(tmp_path)

    def download(repo_id, filename, **settings):
        assert repo_id == "someone/quarters"
        return str(tmp_path / filename)

    monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", download)
    monkeypatch.setattr("tammes.integrations.huggingface.hf_hub_download", download)
    loaded = MarginModel.from_pretrained("someone/quarters")
    assert torch.equal(loaded.criterion.head.weight, model.criterion.head.weight)


# -------------------------------------------------------------------------- bad input


def test_it_says_what_is_wrong():
    with pytest.raises(TypeError, match=r"MarginModel expects a criterion, .* got Term"):
        MarginModel(vit(), tammes.cosface())
    with pytest.raises(ValueError, match="reduction 'mean' or 'sum', got 'none'"):
        MarginModel(vit(), tammes.CosFace(16, 3, reduction="none"))
    with pytest.raises(ValueError, match=r"expects pooling 'auto', .* got 'max'"):
        MarginModel(vit(), tammes.CosFace(16, 3), pooling="max")
    model = MarginModel(vit(), tammes.CosFace(16, 3), pooling="pooler")
    model.backbone.pooler = None
    with pytest.raises(ValueError, match=r"a pooler for pooling='pooler', got .* of ViTModel"):
        model(pixel_values=torch.randn(1, 3, 8, 8))
    with pytest.raises(ValueError, match="CosineHead expects features"):
        MarginModel(vit(), tammes.CosFace(8, 3))(pixel_values=torch.randn(1, 3, 8, 8))


def test_without_transformers_it_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "tammes.integrations.huggingface")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'tammes\[huggingface\]'"):
        importlib.import_module("tammes.integrations.huggingface")
