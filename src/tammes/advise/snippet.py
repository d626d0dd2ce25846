"""Code and a command to copy, with the advised settings."""

import inspect
import re
import shlex
from typing import TYPE_CHECKING

from tammes.advise import defaults
from tammes.advise.feasibility import (
    KINDS,
    LINEAR,
    SUMS,
    adapts_scale,
    builder,
    definition,
    term_names,
)
from tammes.advise.warnings import METRIC

if TYPE_CHECKING:
    from tammes.advise.advice import Advice

_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad", "rmsprop": "RMSprop"}
_EPOCHS = 20
"""Default number of epochs in the lab."""
_BATCH = 128
"""Default batch size in the lab."""
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}


class Snippet:
    """Settings written as code: those given, or else the recommended ones.

    If a given setting provably cannot work, all are the recommended ones.
    """

    def __init__(self, advice: "Advice") -> None:
        self.advice, self.work = advice, advice.work
        written = advice.loss.split("+")
        self.names = names = term_names(written)
        self.main = next(name for name in names if name not in SUMS)
        # A variant of a loss is written by its own name, since it has other settings.
        self.written = dict(zip(names, written, strict=True))
        self.rows = rows = {row.setting: row.value for row in advice.recommendations}
        self.margin = advice.margin
        self.scale: float | str = "adaptive" if adapts_scale(names) else advice.scale
        if any(caution.level == "cannot" for caution in advice.cautions):
            kind = KINDS.get(self.main)
            self.margin = None if kind is None else float(rows[kind.setting])
            self.scale = rows.get("scale", advice.scale)

    @property
    def loss(self) -> str:
        """Loss expression, as the lab reads it."""
        terms = {name: f"{written}()" for name, written in self.written.items()}
        terms[self.main] = f"{self.written[self.main]}({self._margin()})"
        combined = next((name for name in self.names if name in SUMS), None)
        metric = next((name for name in self.names if name in METRIC), None)
        if combined is not None and metric is not None:
            inside = f"{combined}({terms[self.main]}, {terms[metric]})"
            rest = [n for n in self.names if n not in (combined, metric, self.main)]
            parts = [inside, *(terms[name] for name in rest)]
        else:
            parts = [terms[name] for name in self.names if name not in SUMS]
        weight = self.rows.get("weight of zero_centroid()")
        if weight is not None:
            parts.append(f"{weight:g}*zero_centroid()")
        return " + ".join(parts)

    def _margin(self) -> str:
        kind = KINDS.get(self.main)
        if self.margin is None:
            return ""
        value = f"{self.margin:g}"
        if kind is None:
            return f"margin={value}"
        if self.main == "combined_margin":
            return f"m2={kind.place(0.0)[1]:g}, m3={value}"
        if self.main == "gm_softmax":
            return f"beta1=-{value}, beta2=-{value}" if self.margin else ""
        return f"{kind.setting}={value}"

    @property
    def head(self) -> str:
        """Head expression, as the lab reads it."""
        if self.main == "large_margin_gaussian":
            return "gaussian()"
        if self.main in ("cac", "arpl"):
            return "distance(reciprocal=True)" if self.main == "arpl" else "distance()"
        scale = f"{self.scale:g}" if isinstance(self.scale, float) else repr(self.scale)
        settings = [f"subcenters={self.work.centers}"] if self.work.centers > 1 else []
        spherical = self.main not in LINEAR and definition(self.main).on == "split"
        if spherical or self.scale == "adaptive":
            settings.insert(0, f"scale={scale}")
        if settings:
            return f"cosine({', '.join(settings)})"
        plain = self.main in ("softmax", "focal") and len(self.names) == 1
        return "linear()" if plain else "linear(bias=False)"

    @property
    def schedule(self) -> str:
        """Schedule of the margin; ``{length}`` stands for its length."""
        if "blend" in self.rows:
            return "blend=LambdaAnnealing()"
        kind = KINDS.get(self.main)
        if "margin warm-up" not in self.rows or kind is None or kind.setting != "margin":
            return ""
        return f"margin=WarmUp(0, {self.margin:g}, {{length}})"

    def code(self) -> str:
        """Return lines of Python that build criterion and optimizer."""
        work = self.work
        name, _, settings = self.head.partition("(")
        cls = f"{name.capitalize()}Head"
        arguments = [str(work.dim), str(work.classes)]
        arguments += [settings[:-1]] if len(settings) > 1 else []
        head = str(self.rows.get("head", ""))
        if head.startswith("ShardedHead"):
            arguments = [f"tammes.{cls}", *arguments, *head.split(", ")[1:]]
            cls = "ShardedHead"
        loss = re.sub(r"(\w+)\(", r"tammes.\1(", self.loss)
        for each in {*self.written.values()} - {*SUMS}:
            if "counts" in inspect.signature(builder(each)).parameters:
                loss = loss.replace(f"tammes.{each}(", f"tammes.{each}(counts, ")
        loss = loss.replace("counts, )", "counts)")
        lines = [f"head = tammes.{cls}({', '.join(arguments)})"]
        lines.append(f"criterion = tammes.Criterion(head, {loss})")
        if self.schedule:
            schedule = self.schedule.format(length="steps=total_steps // 10")
            lines.append(f"criterion.schedule({schedule.replace('=', '=tammes.schedules.', 1)})")
        kind, rate = self._optimizer()
        momentum = f", momentum={defaults.MOMENTUM:g}" if kind == "SGD" else ""
        decay = f"weight_decay={defaults.WEIGHT_DECAY:g}"
        head_rate = "" if self.advice.lr is None else f"head_lr={self.advice.lr:g}, "
        lines.append(f"groups = criterion.param_groups(backbone, lr={rate:g}, {head_rate}{decay})")
        lines.append(f"optimizer = torch.optim.{kind}(groups{momentum})")
        return "\n".join(lines)

    def _optimizer(self) -> tuple[str, float]:
        name = self.work.optimizer
        rates = defaults.LEARNING_RATES
        return _OPTIMIZERS.get(name, "SGD"), rates.get(name, rates["adam"])

    def command(self) -> str:
        """Return a command that trains with the same settings on a folder of images."""
        words = ["tammes", "train"]
        if self.work.gpus > 1:
            words = ["torchrun", "--nproc-per-node", str(self.work.gpus), "-m", *words]
        words += ["--data", "FOLDER", "--loss", self.loss, "--head", self.head]
        words += ["--shard"] if "ShardedHead" in str(self.rows.get("head")) else []
        if self.schedule:
            words += ["--schedules", self.schedule.format(length=f"epochs={_EPOCHS // 10}")]
        if self.work.optimizer in ("adam", "adamw"):
            rate = defaults.LEARNING_RATES[self.work.optimizer]
            words += ["--optimizer", self.work.optimizer, "--lr", f"{rate:g}"]
        words += [] if self.advice.lr is None else ["--head-lr", f"{self.advice.lr:g}"]
        words += [] if self.work.batch == _BATCH else ["--batch-size", str(self.work.batch)]
        if self.work.autocast is not None:
            words += ["--precision", _PRECISIONS[self.work.autocast]]
        return shlex.join(words)
