r"""Angular margins: the target prototype must be nearer than the others by a margin.

All of them lower the similarity to the target class before the softmax,

.. math:: \ell = \log\bigl(1 + e^{\Lambda - s\,t}\bigr),\qquad t = r\,\Phi(\theta) - m_3,

with :math:`\Lambda` the log-sum-exp of the other classes' scores, :math:`\theta` the angle to the
target prototype, :math:`r` the product of the norms that the head does not normalise, and
:math:`\Phi` the cosine of :math:`\varphi = m_1\theta + m_2`, continued past :math:`\pi`. They
differ in which of the three margins they use, and in the head they are written for.

A function decorated with :func:`tammes.term` is a loss: it receives a :class:`tammes.Split`, its
other arguments are the settings (a number, one per class, or one per example), and its name becomes
a builder: ``cosface(margin=0.35)``.
"""

import math

import torch
from torch import Tensor

from tammes.angles import angle, shifted_cosine
from tammes.split import Split, cross_entropy
from tammes.term_decorator import term
from tammes.terms import Setting


def target_similarity(
    split: Split,
    *,
    m1: Setting = 1.0,
    m2: Setting = 0.0,
    m3: Setting = 0.0,
    extension: str = "monotone",
    gradient: str = "exact",
) -> Tensor:
    r"""Similarity to the target class after the margins, :math:`r\,\Phi(\theta) - m_3`.

    Args:
        split: similarities of N examples, split by their labels.
        m1: factor of the angle.
        m2: radians added to the angle.
        m3: similarity subtracted.
        extension: ``"monotone"``: :math:`\Phi = (-1)^\kappa\cos\varphi - 2\kappa` with
            :math:`\kappa = \lfloor\varphi/\pi\rfloor`, decreasing in :math:`\theta` on the whole
            circle and once differentiable; ``"linear"``: :math:`\cos\theta - m_2\sin m_2` past
            :math:`\pi`, as in most ArcFace code, which jumps there.
        gradient: ``"exact"``; or ``"detached"``, the gradient of the plain
            :math:`r\cos\theta`, as in code that adds the margin under ``no_grad``.

    Returns:
        Similarity of each example to its target class, shape ``(N,)``.
    """
    numbers = isinstance(m1, (int, float)) and isinstance(m2, (int, float))
    if numbers and m1 == int(m1) and m2 == 0:
        bent = _whole_multiple(split.cosine, int(m1))
    elif numbers and m1 == 1 and extension == "monotone":
        bent = shifted_cosine(split.gap, split.opposite, m2)
    else:
        theta = angle(split.gap, split.opposite)
        phi = m1 * theta + m2
        if extension == "monotone":
            turns = (phi.detach() / math.pi).floor()
            bent = (1 - 2 * turns.remainder(2)) * phi.cos() - 2 * turns
        else:
            # A number stays one: copying it to the GPU could not be captured in a CUDA graph.
            shift = m2 * (m2.sin() if isinstance(m2, Tensor) else math.sin(m2))
            bent = torch.where(phi <= math.pi, phi.cos(), split.cosine - shift)
    similarity = bent if split.unit else split.length * bent
    if isinstance(m3, Tensor) or m3:
        similarity = similarity - m3
    if gradient == "detached":
        plain = split.length * split.cosine
        similarity = plain + (similarity - plain).detach()
    return similarity


def margin_target(split: Split, margin: Setting, kind: str) -> Tensor:
    """Similarity to the target class with a margin: angular for ``"arc"``, else of cosines."""
    return target_similarity(split, **({"m2": margin} if kind == "arc" else {"m3": margin}))


def _whole_multiple(cosine: Tensor, m: int) -> Tensor:
    r"""Monotone :math:`\Phi` of :math:`m\theta` for integer m: a polynomial of the cosine.

    Chebyshev's recurrence needs no angle, which makes it the most accurate.
    """
    before, now = torch.ones_like(cosine), cosine
    for _ in range(m - 1):
        before, now = now, 2 * cosine * now - before
    joints = [math.cos(math.pi * r / m) for r in range(1, m)]
    turns = sum(((cosine < joint).to(cosine.dtype) for joint in joints), torch.zeros_like(cosine))
    return (1 - 2 * turns.remainder(2)) * now - 2 * turns


def check_margins(
    extension: str = "monotone",
    gradient: str = "exact",
    m1: float = 1.0,
    m2: float = 0.0,
    **_: Setting,
) -> None:
    """Reject invalid margins and options of :func:`target_similarity`."""
    if m1 <= 0:
        raise ValueError(f"a margin expects m1 above 0, got {m1}")
    if abs(m2) > math.pi:
        raise ValueError(
            f"a margin expects radians, at most pi either way, got {m2}; "
            f"{m2:g} degrees are {math.radians(m2):.4g}"
        )
    if extension not in ("monotone", "linear"):
        raise ValueError(f"a margin expects extension 'monotone' or 'linear', got {extension!r}")
    if gradient not in ("exact", "detached"):
        raise ValueError(f"a margin expects gradient 'exact' or 'detached', got {gradient!r}")
    if extension == "linear" and m1 != 1:
        raise ValueError(f"extension 'linear' expects m1=1, got m1={m1}: it continues cos(θ + m2)")


def check_margin_kind(name: str, margin: float, kind: str, cosine_kind: str) -> None:
    """Reject a margin out of range: radians for ``"arc"``, a difference of cosines otherwise."""
    if kind not in ("arc", cosine_kind):
        first, second = sorted(("arc", cosine_kind))
        raise ValueError(f"{name} expects kind {first!r} or {second!r}, got {kind!r}")
    check_margins(m2=margin if kind == "arc" else 0.0)
    if kind == cosine_kind and abs(margin) > 2:
        raise ValueError(
            f"{name} expects margin to be a difference of cosines, at most 2 either way, "
            f"got {margin:g}"
        )


@term(reads="target others", requires="cosine")
def normface(split: Split) -> Tensor:
    r"""NormFace: softmax cross entropy on scaled cosines.

    .. math:: \ell = \log\bigl(1 + e^{\Lambda - s\cos\theta_y}\bigr)

    :func:`tammes.cosface` and :func:`tammes.arcface` without their margin, and a monotone,
    saturating function of :func:`tammes.lm_softmax`.

    Args:
        split: cosines of N examples, split by their labels.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> cosine = torch.tensor([[0.9, 0.2, -0.1], [0.3, 0.5, 0.1]])
        >>> tammes.normface()(tammes.split(cosine, torch.tensor([0, 1]), scale=10.0))
        tensor([0.0010, 0.1429])

    References:
        Wang et al., NormFace: L2 Hypersphere Embedding for Face Verification, ACM MM 2017.
    """
    return cross_entropy(split, split.target)


@term(reads="target others", in_cosines="margin")
def cosface(split: Split, *, margin: Setting = 0.35) -> Tensor:
    r"""CosFace: softmax cross entropy with an additive cosine margin.

    .. math:: \ell = \log\bigl(1 + e^{\Lambda - s(\cos\theta_y - m)}\bigr)

    ``margin=0`` is :func:`tammes.normface`; Liu et al. 2020 pre-train few-shot features with a
    negative margin, which relaxes the softmax. On a linear head it is
    ``softmax(margin=...)``. It equals ``softplus(s * (lm_softmax + m))``.

    Args:
        split: cosines of N examples, split by their labels.
        margin: cosine by which the target class must win; any sign.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> cosine = torch.tensor([[0.9, 0.2, -0.1], [0.3, 0.5, 0.1]])
        >>> tammes.cosface(margin=0.35)(tammes.split(cosine, torch.tensor([0, 1]), scale=10.0))
        tensor([0.0312, 1.8064])

    References:
        Wang et al., CosFace: Large Margin Cosine Loss for Deep Face Recognition, CVPR 2018, eq. 4.
        Liu et al., Negative Margin Matters, ECCV 2020, eq. 8.
    """
    return cross_entropy(split, split.target, margin)


def _check_arcface(margin: float, **others: Setting) -> None:
    check_margins(m2=margin, **others)


@term(reads="gap length others", requires="angle", check=_check_arcface)
def arcface(
    split: Split, *, margin: Setting = 0.5, extension: str = "monotone", gradient: str = "exact"
) -> Tensor:
    r"""ArcFace: softmax cross entropy with an additive angular margin.

    .. math:: \ell = \log\bigl(1 + e^{\Lambda - s\,\Phi(\theta_y)}\bigr),\qquad
              \Phi(\theta) = \cos(\theta + m)\ \text{for}\ \theta + m \le \pi

    Args:
        split: cosines of N examples, split by their labels.
        margin: angle :math:`m` in radians by which the target class must win.
        extension: continuation of :math:`\Phi` past :math:`\pi`: ``"monotone"`` as
            :math:`-2 - \cos(\theta + m)`, or ``"linear"`` as :math:`\cos\theta - m\sin m`.
        gradient: ``"exact"`` or ``"detached"``, see
            :func:`tammes.losses.angular.target_similarity`.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> cosine = torch.tensor([[0.9, 0.2, -0.1], [0.3, 0.5, 0.1]])
        >>> tammes.arcface(margin=0.5)(tammes.split(cosine, torch.tensor([0, 1]), scale=10.0))
        tensor([0.0230, 2.9450])

    References:
        Deng et al., ArcFace: Additive Angular Margin Loss for Deep Face Recognition, CVPR 2019,
        eq. 3.
    """
    similarity = target_similarity(split, m2=margin, extension=extension, gradient=gradient)
    return cross_entropy(split, similarity)


@term(reads="gap length others", requires="angle", in_cosines="m3", check=check_margins)
def combined_margin(
    split: Split,
    m1: Setting = 1.0,
    m2: Setting = 0.0,
    m3: Setting = 0.0,
    *,
    extension: str = "monotone",
    gradient: str = "exact",
) -> Tensor:
    r"""Combination of all three margins.

    .. math:: \ell = \log\bigl(1 + e^{\Lambda - s(\Phi(\theta_y) - m_3)}\bigr),\qquad
              \Phi(\theta) = \cos(m_1\theta + m_2)\ \text{up to}\ \pi

    ``(m, 0, 0)`` is :func:`tammes.sphereface`, ``(1, m, 0)`` :func:`tammes.arcface`, ``(1, 0, m)``
    :func:`tammes.cosface` and ``(1, 0, 0)`` :func:`tammes.normface`.

    Args:
        split: cosines of N examples, split by their labels.
        m1: factor of the angle; need not be an integer.
        m2: radians added to the angle.
        m3: cosine subtracted.
        extension: continuation of :math:`\Phi` past :math:`\pi`, see :func:`tammes.arcface`.
        gradient: ``"exact"`` or ``"detached"``, see
            :func:`tammes.losses.angular.target_similarity`.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> cosine = torch.tensor([[0.9, 0.2, -0.1]])
        >>> tammes.combined_margin(1.0, 0.3, 0.2)(
        ...     tammes.split(cosine, torch.tensor([0]), scale=10.0))
        tensor([0.0376])

    References:
        Deng et al., ArcFace, CVPR 2019, eq. 4; Zhou et al., Learning Towards the Largest Margins,
        ICLR 2022.
    """
    similarity = target_similarity(
        split, m1=m1, m2=m2, m3=m3, extension=extension, gradient=gradient
    )
    return cross_entropy(split, similarity)


def _multiplied_angle(split: Split, margin: Setting, blend: Setting, gradient: str) -> Tensor:
    """Loss of L-Softmax and SphereFace, which differ only in their heads."""
    bent = target_similarity(split, m1=margin, gradient=gradient)
    return cross_entropy(split, (blend * split.target + bent) / (1 + blend))


def _check_multiple(margin: float, blend: float, gradient: str) -> None:
    if margin < 1:
        raise ValueError(f"a multiplicative margin is expected to be 1 or more, got {margin}")
    if blend < 0:
        raise ValueError(f"blend is expected to be 0 or more, got {blend}")
    check_margins(gradient=gradient)


@term(reads="target gap length others", requires="angle", check=_check_multiple)
def l_softmax(
    split: Split, *, margin: Setting = 4.0, blend: Setting = 0.0, gradient: str = "exact"
) -> Tensor:
    r"""L-Softmax: softmax cross entropy with the angle to the target prototype multiplied.

    .. math::
        \ell = \log\bigl(1 + e^{\Lambda - f_y}\bigr),\qquad
        f_y = \lVert w_y\rVert\lVert x\rVert\,\frac{\lambda\cos\theta + \psi(\theta)}{1+\lambda},
        \qquad \psi(\theta) = (-1)^k\cos(m\theta) - 2k

    with :math:`k = \lfloor m\theta/\pi\rfloor`. For a :class:`tammes.LinearHead` without bias;
    :func:`tammes.sphereface` is the same on unit prototypes. ``margin=1`` is the softmax.

    Args:
        split: inner products of N examples, split by their labels.
        margin: factor :math:`m` of the angle; need not be an integer.
        blend: :math:`\lambda`, weight of the plain cosine; anneal it from about 1000 down with
            :class:`tammes.schedules.LambdaAnnealing`.
        gradient: ``"exact"`` or ``"detached"``, see
            :func:`tammes.losses.angular.target_similarity`.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> cosine = torch.tensor([[0.9, 0.2, -0.1]])
        >>> tammes.l_softmax(margin=2)(tammes.split(cosine, torch.tensor([0]), scale=10.0))
        tensor([0.0156])

    References:
        Liu et al., Large-Margin Softmax Loss for Convolutional Neural Networks, ICML 2016, eq. 4-6.
    """
    return _multiplied_angle(split, margin, blend, gradient)


@term(reads="target gap length others", requires="angle", check=_check_multiple)
def sphereface(
    split: Split, *, margin: Setting = 4.0, blend: Setting = 0.0, gradient: str = "exact"
) -> Tensor:
    r"""SphereFace (A-Softmax): L-Softmax on unit prototypes.

    .. math::
        \ell = \log\bigl(1 + e^{\Lambda - f_y}\bigr),\qquad
        f_y = \lVert x\rVert\,\frac{\lambda\cos\theta + \psi(\theta)}{1+\lambda}

    with :math:`\psi` of :func:`tammes.l_softmax`. ``CosineHead(..., normalize_features=False)``
    gives the original; on unit features :math:`\lVert x\rVert` is replaced by the scale, and
    margins between 1.3 and 1.7 are usual.

    Args:
        split: similarities of N examples to unit prototypes, split by their labels.
        margin: factor :math:`m` of the angle; need not be an integer.
        blend: :math:`\lambda`, weight of the plain cosine; see :func:`tammes.l_softmax`.
        gradient: ``"exact"`` or ``"detached"``, see
            :func:`tammes.losses.angular.target_similarity`.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> cosine = torch.tensor([[0.9, 0.2, -0.1]])
        >>> tammes.sphereface(margin=1.5)(tammes.split(cosine, torch.tensor([0]), scale=10.0))
        tensor([0.0032])

    References:
        Liu et al., SphereFace: Deep Hypersphere Embedding for Face Recognition, CVPR 2017, eq. 7.
    """
    return _multiplied_angle(split, margin, blend, gradient)
