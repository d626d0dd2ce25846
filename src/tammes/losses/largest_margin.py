"""GM-Softmax and LM-Softmax: losses for the largest margins, linear in the target cosine."""

import torch
from torch import Tensor

from tammes.split import Split
from tammes.term_decorator import term
from tammes.terms import Setting


@term(reads="target others")
def gm_softmax(
    split: Split,
    alpha1: Setting = 1.0,
    beta1: Setting = 0.0,
    alpha2: Setting = 1.0,
    beta2: Setting = 0.0,
) -> Tensor:
    r"""GM-Softmax: linear margins in the numerator and in the denominator.

    .. math::
        \ell = -\log\frac{e^{s(\alpha_1\cos\theta_y + \beta_1)}}
        {e^{s(\alpha_2\cos\theta_y + \beta_2)} + \sum_{c\ne y} e^{s\cos\theta_c}}

    ``(1, 0, 1, 0)`` is :func:`tammes.normface`, ``(1, -m, 1, -m)`` :func:`tammes.cosface`,
    ``beta2=-inf`` is s times :func:`tammes.lm_softmax`, and ``alpha=cos(m)`` bounds
    :func:`tammes.arcface` from below. The optimum is the simplex for
    :math:`\alpha_1 \ge \frac12,\ \alpha_2 \le \alpha_1`.

    Args:
        split: cosines of N examples, split by their labels.
        alpha1: factor of the target cosine in the numerator.
        beta1: constant added in the numerator.
        alpha2: factor of the target cosine in the denominator.
        beta2: constant added in the denominator.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> cosine = torch.tensor([[0.9, 0.2, -0.1], [0.3, 0.5, 0.1]])
        >>> tammes.gm_softmax(1.0, -0.35, 1.0, -0.35)(
        ...     tammes.split(cosine, torch.tensor([0, 1]), scale=10.0))
        tensor([0.0312, 1.8064])

    References:
        Zhou et al., Learning Towards the Largest Margins, ICLR 2022, definition of GM-Softmax
        (with the betas inside the scale, as its theorems need them).
    """
    beta1, beta2 = _finite(beta1), _finite(beta2)
    numerator = split.scale * (alpha1 * split.target + beta1)
    denominator = split.scale * (alpha2 * split.target + beta2)
    # logaddexp(denominator, others) - numerator, but with the difference of the two target scores
    # taken first, before anything large is added to it.
    step = split.scale * ((alpha2 - alpha1) * split.target + (beta2 - beta1))
    rest = (-(split.others - denominator).abs()).exp().log1p()
    return torch.maximum(step, split.others - numerator) + rest


def _finite(beta: Setting) -> Setting:
    """Replace minus infinity by a finite number of the same effect, since 0 * inf is NaN."""
    return beta.clamp_min(-1e30) if isinstance(beta, Tensor) else max(beta, -1e30)


@term(reads="target others", requires="cosine")
def lm_softmax(split: Split) -> Tensor:
    r"""LM-Softmax: softmax cross entropy without the target in the denominator.

    .. math:: \ell = \frac1s\log\sum_{c\ne y} e^{s\cos\theta_c} - \cos\theta_y

    A smooth upper bound of the negative sample margin, within :math:`\log(C-1)/s` of it. It has no
    margin to tune, never saturates, and is not bounded below by zero; it needs unit features and
    unit prototypes. :func:`tammes.normface` is ``softplus(s * lm_softmax)``.

    Args:
        split: cosines of N examples, split by their labels.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> cosine = torch.tensor([[0.9, 0.2, -0.1], [0.3, 0.5, 0.1]])
        >>> tammes.lm_softmax()(tammes.split(cosine, torch.tensor([0, 1]), scale=10.0))
        tensor([-0.6951, -0.1873])

    References:
        Zhou et al., Learning Towards the Largest Margins, ICLR 2022.
    """
    return split.others / split.scale - split.target
