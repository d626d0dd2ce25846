"""Losses of every class against its absence, with a threshold of the scores that is learned."""

import math
from typing import TYPE_CHECKING

from torch import Tensor

from tammes.split import Split, softplus
from tammes.states import LearnedNumber
from tammes.terms import Setting, Term, term

if TYPE_CHECKING:
    from tammes.heads.head import Head


def _threshold(term: Term, head: "Head") -> LearnedNumber:
    return LearnedNumber(math.log(10 * head.num_classes), head.weight)


def _below_threshold(state: Tensor, **_: Setting) -> tuple[Tensor, None]:
    return -state, None


@term(reads="target softplus", in_cosines="margin", state=_threshold, adjust=_below_threshold)
def uniface(split: Split, *, margin: Setting = 0.4, negative_weight: Setting = 1.0) -> Tensor:
    r"""UniFace (unified cross entropy): one learned threshold for all examples and all classes.

    .. math::
        \ell = \log\bigl(1 + e^{-(s(\cos\theta_y - m) - b)}\bigr)
        + \lambda\sum_{c\ne y}\log\bigl(1 + e^{s\cos\theta_c - b}\bigr)

    The threshold :math:`b` is a parameter of the criterion that starts at :math:`\log(10\,C)`. A
    softmax only asks that an example's own class wins; here all of them are to be above one
    similarity :math:`b/s`, and all others below it, as verification with one threshold needs it.
    With :math:`b = 0` and without margin it is :func:`tammes.bce`.

    Args:
        split: cosines of N examples less the threshold, split by their labels.
        margin: cosine :math:`m` by which the own class must be above the threshold.
        negative_weight: weight :math:`\lambda` of the other classes.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> criterion = tammes.Criterion(tammes.CosineHead(4, 3), tammes.uniface())
        >>> sorted(criterion.state_dict())
        ['head.weight', 'states.uniface.value']
        >>> criterion.states["uniface"].value
        Parameter containing:
        tensor([3.4012], requires_grad=True)

    References:
        Zhou et al., UniFace: Unified Cross-Entropy Loss for Deep Face Recognition, ICCV 2023.
    """
    if split.softplus is None:
        raise ValueError("uniface expects a split with rest, got one without: add it to reads")
    own = softplus(-split.scale * (split.target - margin))
    return own + negative_weight * split.softplus
