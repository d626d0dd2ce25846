"""Settings that change during training: annealing, warm-up, deferred re-weighting.

A schedule counts its steps in a buffer and computes its value with tensor operations, so it is
saved with the criterion, resumes where it stopped, moves with the device, and needs no
recompilation.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tammes._buffers import ExactBuffers
from tammes.states import read

__all__ = ["DeferredReweighting", "LambdaAnnealing", "LambdaDecay", "Schedule", "WarmUp"]


class Schedule(ExactBuffers):
    """Value that depends on the number of steps taken.

    Attach it with :meth:`tammes.Criterion.schedule`; or call :meth:`step` yourself and pass the
    value on: ``criterion(features, labels, margin=warm_up.value)``. Subclasses define ``at``.

    Example:
        >>> class Halving(tammes.schedules.Schedule):
        ...     def at(self, step):
        ...         return 0.5**step
        >>> halving = Halving()
        >>> halving.step()
        >>> halving.value
        tensor(0.5000)
    """

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    @property
    def value(self) -> Tensor:
        """Current value: a scalar, or one value per class."""
        # Copied, since a step may follow in the same compiled graph.
        return read(self.at(self.steps.to(torch.get_default_dtype())))

    def at(self, step: Tensor) -> Tensor:
        """Compute the value after a number of steps."""
        raise NotImplementedError

    def step(self) -> None:
        """Count one step."""
        self.steps += 1

    def forward(self) -> Tensor:
        """Return the current value."""
        return self.value

    def extra_repr(self) -> str:
        """Describe the settings and the current step."""
        own = {k: v for k, v in vars(self).items() if not k.startswith("_") and k != "training"}
        return ", ".join(f"{key}={value!r}" for key, value in own.items())


class LambdaAnnealing(Schedule):
    r"""Annealing of L-Softmax as in its Caffe code.

    .. math:: \lambda_t = \max\bigl(\lambda_{\min},\ \lambda_0\,(1 + \gamma t)^{-k}\bigr)

    Args:
        base: :math:`\lambda_0`; at 1000 the loss is the softmax.
        gamma: :math:`\gamma`.
        power: :math:`k`.
        minimum: :math:`\lambda_{\min}`; 0 ends at the full margin, 5 is usual for m = 4.

    Example:
        >>> annealing = LambdaAnnealing(base=1000.0, gamma=0.1, power=1.0, minimum=5.0)
        >>> annealing.at(torch.tensor([0.0, 90.0, 1e6]))
        tensor([1000.,  100.,    5.])

    References:
        Liu et al., Large-Margin Softmax Loss, ICML 2016 (with the constants of its released code).
    """

    def __init__(
        self,
        base: float = 1000.0,
        *,
        gamma: float = 2.5e-5,
        power: float = 35.0,
        minimum: float = 0.0,
    ) -> None:
        super().__init__()
        if not (base >= minimum >= 0 and gamma >= 0 and power >= 0):
            raise ValueError(
                "LambdaAnnealing expects base >= minimum >= 0, gamma >= 0 and power >= 0, got "
                f"base={base}, minimum={minimum}, gamma={gamma}, power={power}"
            )
        self.base, self.gamma, self.power, self.minimum = base, gamma, power, minimum

    def at(self, step: Tensor) -> Tensor:
        """Evaluate the formula of the class."""
        return (self.base * (1 + self.gamma * step) ** -self.power).clamp_min(self.minimum)


class LambdaDecay(Schedule):
    r"""Annealing of L-Softmax over a fraction of the training, whatever its length.

    .. math:: 1 + \lambda_t = (1+\lambda_0)^{1-u}\,(1+\lambda_1)^{u},\qquad
              u = \min\bigl(1,\ t / (f\,T)\bigr)

    Linear in the logarithm of :math:`1+\lambda`; the weight of the margin is :math:`1/(1+\lambda)`.

    Args:
        total_steps: :math:`T`, number of training steps.
        start: :math:`\lambda_0`.
        end: :math:`\lambda_1`.
        fraction: :math:`f`, fraction of the training after which the end is reached.

    Example:
        >>> LambdaDecay(total_steps=100, start=999.0, end=0.0, fraction=0.5).at(
        ...     torch.tensor([0.0, 25.0, 50.0, 100.0])).round(decimals=2)
        tensor([999.0000,  30.6200,   0.0000,   0.0000])
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start: float = 1000.0,
        end: float = 0.0,
        fraction: float = 0.5,
    ) -> None:
        super().__init__()
        if not (total_steps >= 1 and start >= end >= 0 and 0 < fraction <= 1):
            raise ValueError(
                "LambdaDecay expects total_steps >= 1, start >= end >= 0 and 0 < fraction <= 1, "
                f"got total_steps={total_steps}, start={start}, end={end}, fraction={fraction}"
            )
        self.total_steps, self.start, self.end, self.fraction = total_steps, start, end, fraction

    def at(self, step: Tensor) -> Tensor:
        """Evaluate the formula of the class."""
        progress = (step / (self.fraction * self.total_steps)).clamp(0, 1)
        logs = math.log1p(self.start) * (1 - progress) + math.log1p(self.end) * progress
        return logs.expm1()


class WarmUp(Schedule):
    r"""Margin that grows from one value to another.

    .. math::
        m_t = m_0 + (m_1 - m_0)\,g(u),\qquad u = \mathrm{clip}_{[0,1]}\,\frac{t - t_0}{T}

    with :math:`g(u) = u` (linear), :math:`\frac{1-\cos\pi u}{2}` (cosine) or
    :math:`\frac{e^{5u} - 1}{e^5 - 1}` (exponential). The sign may change on the way.

    Args:
        start: :math:`m_0`.
        end: :math:`m_1`.
        steps: :math:`T`, length of the growth.
        shape: ``"linear"``, ``"cosine"`` or ``"exponential"``.
        delay: :math:`t_0`, steps before the growth begins.

    Example:
        >>> WarmUp(0.0, 0.5, steps=10, delay=5).at(torch.tensor([0.0, 5.0, 10.0, 15.0, 20.0]))
        tensor([0.0000, 0.0000, 0.2500, 0.5000, 0.5000])
    """

    def __init__(
        self, start: float, end: float, *, steps: int, shape: str = "linear", delay: int = 0
    ) -> None:
        super().__init__()
        if steps < 1 or delay < 0:
            raise ValueError(
                f"WarmUp expects steps >= 1 and delay >= 0, got steps={steps} and delay={delay}"
            )
        if shape not in ("linear", "cosine", "exponential"):
            raise ValueError(
                f"WarmUp expects shape 'linear', 'cosine' or 'exponential', got {shape!r}"
            )
        self.start, self.end, self.length, self.shape, self.delay = start, end, steps, shape, delay

    def at(self, step: Tensor) -> Tensor:
        """Evaluate the formula of the class."""
        progress = ((step - self.delay) / self.length).clamp(0, 1)
        if self.shape == "cosine":
            progress = (1 - (math.pi * progress).cos()) / 2
        elif self.shape == "exponential":
            progress = (5 * progress).expm1() / math.expm1(5)
        return self.start + (self.end - self.start) * progress


class DeferredReweighting(Schedule):
    r"""Class weights that start late: first learn the features, then balance the classes.

    .. math:: w_j = 1\ (t < T_0),\qquad
              w_j \propto \frac{1-\beta}{1-\beta^{n_j}},\quad \sum_j w_j = C\ (t \ge T_0)

    Attach it to ``class_weights``.

    Args:
        counts: number of training examples of each class.
        start: :math:`T_0`, steps before the weights apply.
        beta: :math:`\beta`, between 0 (no weights) and just below 1 (one over the count).

    Example:
        >>> DeferredReweighting([1000, 10], start=5).at(torch.tensor(5.0)).round(decimals=3)
        tensor([0.0210, 1.9790])

    References:
        Cao et al., LDAM, NeurIPS 2019, Algorithm 1; Cui et al., Class-Balanced Loss Based on
        Effective Number of Samples, CVPR 2019, eq. 2.
    """

    weights: Tensor

    def __init__(self, counts: Sequence[float], *, start: int, beta: float = 0.9999) -> None:
        super().__init__()
        numbers = torch.as_tensor(counts, dtype=torch.double, device="cpu")
        if numbers.ndim != 1 or len(numbers) < 2 or bool((numbers <= 0).any()):
            raise ValueError(
                f"DeferredReweighting expects a positive count for each class, got {counts!r}"
            )
        if start < 0 or not 0 <= beta < 1:
            raise ValueError(
                f"DeferredReweighting expects start >= 0 and 0 <= beta < 1, got {start} and {beta}"
            )
        weights = (1 - beta) / (1 - beta**numbers)
        weights = weights * len(weights) / weights.sum()
        self.start = start
        weights = weights.to(torch.promote_types(torch.get_default_dtype(), torch.float32))
        self.register_constant("weights", weights, torch.get_default_device())

    def at(self, step: Tensor) -> Tensor:
        """Return ones before ``start``, then the weights."""
        return torch.where(step >= self.start, self.weights, 1.0)
