"""MarginLoss: SentenceTransformerTrainer trains prototypes; a callback saves and resumes them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tammes
from tammes.integrations.sentence_transformers import CriterionCheckpoint, MarginLoss

WORDS = ("play", "music", "song", "rain", "snow", "sun", "call", "phone", "dial")
"""Three words for each of three intents."""


class Bag(nn.Module):
    """Encoder with the interface of a SentenceTransformer."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(9, 8)

    def forward(self, features):
        return {"sentence_embedding": self.table(features["input_ids"])}


def criterion():
    torch.manual_seed(1)
    return tammes.CosFace(8, 3, margin=0.1, scale=8.0)


def test_it_is_the_loss_of_the_embeddings():
    model, labels = Bag(), torch.tensor([0, 1, 2, 0])
    loss = MarginLoss(model, criterion())
    tokens = {"input_ids": torch.arange(8).reshape(4, 2)}
    expected = criterion()(model.table(tokens["input_ids"]), labels)
    torch.testing.assert_close(loss([tokens], labels), expected)
    assert {name.partition(".")[0] for name, _ in loss.named_parameters()} == {"model", "criterion"}
    assert loss.get_config_dict() == {
        "loss": "cosface(margin=0.1)",
        "head": repr(loss.criterion.head),
    }


def test_it_says_what_is_wrong(monkeypatch):
    with pytest.raises(TypeError, match=r"^MarginLoss expects a criterion, .* got Term$"):
        MarginLoss(Bag(), tammes.cosface())
    with pytest.raises(ValueError, match=r"reduction 'mean' or 'sum' .* got reduction 'none'$"):
        MarginLoss(Bag(), tammes.CosFace(8, 3, reduction="none"))
    tokens = {"input_ids": torch.zeros(2, 2, dtype=torch.long)}
    with pytest.raises(ValueError, match=r"expects one column of texts beside the labels, got 2;"):
        MarginLoss(Bag(), criterion())([tokens, tokens], torch.tensor([0, 1]))
    monkeypatch.setattr(tammes.CosineHead, "is_sharded", True)
    with pytest.raises(ValueError, match=r"a head that is not sharded, got a sharded head$"):
        MarginLoss(Bag(), criterion())


def test_a_checkpoint_without_the_criterion_is_not_resumed_in_silence(tmp_path):
    with pytest.raises(ValueError, match=r"expects .*criterion.safetensors, which is not there; "):
        CriterionCheckpoint(criterion()).restore(tmp_path)


# ------------------------------------------------- sentence-transformers itself, where installed


def trainer_of(folder, **settings):
    """Model, loss and trainer of a bag of nine words."""
    library = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    from datasets import Dataset
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate((*WORDS, "[UNK]"))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    embedding = StaticEmbedding(tokenizer, embedding_dim=8)
    model = library.SentenceTransformer(modules=[embedding], device="cpu")
    pairs = [(3 * c + i, 3 * c + j, c) for c in range(3) for i in range(3) for j in range(3)]
    data = Dataset.from_dict(
        {
            "text": [f"{WORDS[i]} {WORDS[j]}" for i, j, _ in pairs][:24],
            "label": [c for *_, c in pairs][:24],
        }
    )
    options = library.SentenceTransformerTrainingArguments(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": 8,
            "max_steps": 6,
            "learning_rate": 0.05,
            "use_cpu": True,
            "save_strategy": "steps",
            "save_steps": 3,
            "report_to": [],
            "disable_tqdm": True,
            "logging_strategy": "no",
            "seed": 0,
        }
        | settings
    )
    loss = MarginLoss(model, criterion())
    callback = CriterionCheckpoint(loss.criterion)
    trainer = library.SentenceTransformerTrainer(
        model, options, train_dataset=data, eval_dataset=data, loss=loss, callbacks=[callback]
    )
    return trainer, loss


# What the libraries warn of among themselves is not ours.
foreign_warnings = pytest.mark.filterwarnings("default")


@pytest.mark.slow
@foreign_warnings
def test_its_trainer_trains_prototypes_and_texts_are_told_apart(tmp_path):
    trainer, loss = trainer_of(tmp_path, max_steps=30)
    before = loss.criterion.head.weight.clone()
    trainer.train()
    assert (loss.criterion.head.weight != before).any()
    embeddings = loss.model.encode(list(WORDS), convert_to_tensor=True)
    assert loss.criterion.logits(embeddings).argmax(1).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.slow
@foreign_warnings
def test_an_interrupted_training_resumes_bit_identically(tmp_path):
    trainer, whole = trainer_of(tmp_path)
    trainer.train()
    trainer, resumed = trainer_of(tmp_path)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


@pytest.mark.slow
@foreign_warnings
def test_the_best_model_comes_with_its_prototypes(tmp_path):
    trainer, loss = trainer_of(
        tmp_path, load_best_model_at_end=True, eval_strategy="steps", eval_steps=3
    )
    # A loss that rises: the first checkpoint is the best.
    trainer.evaluate = rising(trainer)
    trainer.train()
    saved = load_file(tmp_path / "checkpoint-3" / "criterion.safetensors")
    assert torch.equal(loss.criterion.head.weight, saved["head.weight"])
    last = load_file(tmp_path / "checkpoint-6" / "criterion.safetensors")
    assert not torch.equal(last["head.weight"], saved["head.weight"])


def rising(trainer):
    """Stand-in for an evaluation whose loss is the number of the step."""

    def evaluate(*args, **kwargs):
        metrics = {"eval_loss": float(trainer.state.global_step)}
        trainer.control = trainer.callback_handler.on_evaluate(
            trainer.args, trainer.state, trainer.control, metrics
        )
        return metrics

    return evaluate


def train_on_ranks(folder, batch_size):
    """Train for three steps with 8 examples each, over all processes."""
    trainer, loss = trainer_of(
        folder, per_device_train_batch_size=batch_size, optim="sgd", max_steps=3
    )
    if trainer.args.process_index:
        with torch.no_grad():
            # As where the user's ranks have seeds of their own.
            loss.criterion.head.weight.normal_()
    trainer.train()
    torch.save(loss.state_dict(), Path(folder) / f"rank{trainer.args.process_index}.pt")


@pytest.mark.slow
@foreign_warnings
def test_two_processes_train_the_prototypes_of_one(tmp_path):
    train_on_ranks(tmp_path / "one", 8)
    script = tmp_path / "training.py"
    script.write_text(
        "import test_sentence_transformers, torch\n"
        f"test_sentence_transformers.train_on_ranks({str(tmp_path / 'two')!r}, 4)\n"
        "torch.distributed.destroy_process_group()\n"
    )
    paths = [str(Path(tammes.__file__).parents[1]), str(Path(__file__).parent)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one = torch.load(tmp_path / "one" / "rank0.pt", weights_only=True)
    first, second = (
        torch.load(tmp_path / "two" / f"rank{n}.pt", weights_only=True) for n in (0, 1)
    )
    assert not torch.equal(one["criterion.head.weight"], criterion().head.weight)
    for name, value in first.items():
        assert torch.equal(second[name], value), name
        alone = one[name.replace("model.module.", "model.")]
        torch.testing.assert_close(value, alone, rtol=1e-4, atol=1e-5)
