"""Other names by which losses are known.

A plain alias is the same builder, so its terms have the library's name for the loss.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from tammes.losses.angular import arcface, cosface, normface, sphereface
from tammes.losses.imbalance import logit_adjustment
from tammes.losses.largest_margin import gm_softmax
from tammes.losses.proxies import multi_positive
from tammes.terms import Setting, Term

_Builder = TypeVar("_Builder", bound=Callable[..., Term])


def _variant_of(builder: Callable[..., Term]) -> Callable[[_Builder], _Builder]:
    """Mark a function as building the terms of another builder."""

    def declare(function: _Builder) -> _Builder:
        function.definition = builder.definition  # type: ignore[attr-defined]
        return function

    return declare


am_softmax = lmcl = cosface
aam_softmax = arcface
a_softmax = sphereface
proxy_nca_pp = normface


@_variant_of(logit_adjustment)
def balanced_softmax(counts: Sequence[float] | Tensor) -> Term:
    r"""Balanced softmax: softmax with classes weighted by their frequency in the training set.

    .. math:: \ell = -\log\frac{n_y e^{f_y}}{\sum_c n_c e^{f_c}}

    It is ``logit_adjustment(counts, tau=1)``.

    Args:
        counts: number of training examples of each class, C of them.

    Returns:
        A term named ``logit_adjustment``.

    Example:
        >>> tammes.balanced_softmax([500, 50, 5])
        logit_adjustment(counts=(500, 50, 5), tau=1.0)

    References:
        Ren et al., Balanced Meta-Softmax for Long-Tailed Visual Recognition, NeurIPS 2020.
    """
    return logit_adjustment(counts, tau=1.0)


@_variant_of(multi_positive)
def mlcd(*, scale: Setting = 64.0, margin: Setting = 0.0) -> Term:
    r"""MLCD: several positives, with separate sums over positives and other classes.

    .. math::
        \ell_i = \log\Bigl(1 + \sum_{c\notin P_i} e^{s\cos\theta_{ic}}\Bigr)
        + \log\Bigl(1 + \sum_{p\in P_i} e^{-s\cos(\theta_{ip} + m)}\Bigr)

    It is ``multi_positive(scale=scale, margin=margin, form="apart")``.

    Args:
        scale: :math:`s`; the scale of the head is not used.
        margin: :math:`m`, in radians; 0 in the paper.

    Returns:
        A term named ``multi_positive``.

    Example:
        >>> tammes.mlcd()
        multi_positive(scale=64.0, margin=0.0, kind='arc', form='apart')

    References:
        An et al., Multi-label Cluster Discrimination for Visual Representation Learning, ECCV 2024.
    """
    return multi_positive(scale=scale, margin=margin, form="apart")


@_variant_of(gm_softmax)
def proxy_nca() -> Term:
    r"""ProxyNCA: the target proxy against the others, without itself in the denominator.

    .. math:: \ell = \Lambda - s\cos\theta_y

    It is ``gm_softmax(beta2=-inf)``, and the scale times :func:`tammes.lm_softmax`. For a ProxyNCA
    on squared distances of unit vectors, use twice its scale. ProxyNCA++ is
    :func:`tammes.normface`.

    Returns:
        A term named ``gm_softmax``.

    Example:
        >>> cosine = torch.tensor([[0.9, 0.2, -0.1], [0.3, 0.5, 0.1]])
        >>> tammes.proxy_nca()(tammes.split(cosine, torch.tensor([0, 1]), scale=10.0))
        tensor([-6.9514, -1.8731])

    References:
        Movshovitz-Attias et al., No Fuss Distance Metric Learning using Proxies, ICCV 2017.
    """
    return gm_softmax(beta2=float("-inf"))


@_variant_of(sphereface)
def sphereface_r(*, margin: Setting = 1.7) -> Term:
    r"""SphereFace-R: SphereFace on unit features, with the gradient of the plain cosine.

    .. math:: \ell = \log\bigl(1 + e^{\Lambda - s\,\psi(\theta_y)}\bigr)

    with :math:`\psi` of :func:`tammes.l_softmax`, for a :class:`tammes.CosineHead` of scale 30. It
    is ``sphereface(margin=margin, gradient="detached")``.

    Args:
        margin: factor :math:`m` of the angle.

    Returns:
        A term named ``sphereface``.

    Example:
        >>> tammes.sphereface_r()
        sphereface(margin=1.7, blend=0.0, gradient='detached')

    References:
        Liu et al., SphereFace Revived: Unifying Hyperspherical Face Recognition, TPAMI 2022.
    """
    return sphereface(margin=margin, gradient="detached")


ALIASES: dict[str, Callable[..., Term]] = {
    "a_softmax": a_softmax,
    "aam_softmax": aam_softmax,
    "am_softmax": am_softmax,
    "balanced_softmax": balanced_softmax,
    "lmcl": lmcl,
    "mlcd": mlcd,
    "proxy_nca": proxy_nca,
    "proxy_nca_pp": proxy_nca_pp,
    "sphereface_r": sphereface_r,
}
"""Builders by their other names."""
