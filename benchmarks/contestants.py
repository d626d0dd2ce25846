"""Contestants of ``head.py``: their inputs, and how each takes a step.

Every contestant gets the same float32 features and prototypes, computes under bf16 autocast, and
runs forward and backward to both. Prototypes have unit norm and features the norm of the scale, so
that kernels without normalisation see the same scores as those with it; such kernels have no margin
either, and get bf16 copies, whose creation is timed. The bare products are ``x @ W.T``, ``g @ W``
and ``g.T @ x`` of bf16 inputs that exist beforehand; "fp32 out" writes the last one, the gradient
of the prototypes, in float32 as a step must, "bf16 out" in half of that. If ``g`` would take
more than 8 GiB, they run over blocks of classes.
"""

import torch
import torch.nn.functional as F
from criterion import ANGLE, COSINE_MARGIN, SCALE, ByHand

BLOCK = 8 << 30
"""Size in bytes of the score matrix above which the products run over blocks of classes."""
MARGINS = {"CosFace": COSINE_MARGIN, "ArcFace": ANGLE}


class Inputs:
    """Inputs shared by all contestants at one size."""

    def __init__(self, n, d, c, device):
        self.n, self.d, self.c, self.device = n, d, c, device
        generator = torch.Generator(device).manual_seed(0)

        def directions(rows):
            made = torch.randn(rows, d, device=device, generator=generator)
            return made.div_(torch.linalg.vector_norm(made, dim=1, keepdim=True))

        self.features = directions(n).mul_(SCALE).requires_grad_()
        self.prototypes = torch.nn.Parameter(directions(c))
        self.labels = torch.randint(c, (n,), device=device, generator=generator)
        self.half = self.gradient = None

    def autocast(self):
        """Autocast to bf16."""
        return torch.autocast(self.device, torch.bfloat16)

    def for_products(self):
        """Return bf16 copies, and random numbers in place of the gradient of the scores."""
        if self.half is None:
            self.half = self.features.detach().bfloat16(), self.prototypes.detach().bfloat16()
            width = min(self.c, max(1, BLOCK // (2 * self.n)))
            shape = self.n, width
            self.gradient = torch.randn(shape, device=self.device, dtype=torch.bfloat16)
        return *self.half, self.gradient


# --------------------------------------------------------------------------------- contestants
# Each is a function of the inputs that returns a step, which returns a loss or None, and the
# parameters whose gradients it fills.


def products(out):
    def make(inputs):
        features, prototypes, gradient = inputs.for_products()
        width = gradient.shape[1]

        def step():
            found = torch.empty(inputs.c, inputs.d, dtype=out, device=inputs.device)
            back = torch.zeros_like(features)
            for start in range(0, inputs.c, width):
                block = slice(start, min(start + width, inputs.c))
                g = gradient[:, : block.stop - block.start]
                features @ prototypes[block].T
                back.addmm_(g, prototypes[block])
                if out is features.dtype:
                    torch.mm(g.T, features, out=found[block])
                else:
                    torch.mm(g.T, features, out_dtype=out, out=found[block])

        return step, ()

    return make


def training(inputs, loss_of, prototypes=None):
    """Build a step from a function of features and labels."""
    prototypes = inputs.prototypes if prototypes is None else prototypes

    def step():
        with inputs.autocast():
            loss = loss_of(inputs.features, inputs.labels)
        loss.backward()
        return loss.detach()

    return step, (inputs.features, prototypes)


def tammes_loss(loss, implementation):
    def make(inputs):
        import tammes

        with torch.device(inputs.device):
            criterion = getattr(tammes, loss)(
                inputs.d,
                inputs.c,
                margin=MARGINS[loss],
                scale=SCALE,
                implementation=implementation,
            )
        criterion.head.weight = inputs.prototypes
        return training(inputs, criterion)

    return make


def pml(loss):
    degrees = 180 / torch.pi if loss == "ArcFace" else 1

    def make(inputs):
        from pytorch_metric_learning import losses

        # Created small and then given its prototypes: drawing them on the CPU would take long.
        criterion = getattr(losses, f"{loss}Loss")(
            2, inputs.d, margin=MARGINS[loss] * degrees, scale=SCALE
        )
        criterion.num_classes = inputs.c
        criterion.W = torch.nn.Parameter(inputs.prototypes.detach().T.contiguous())
        return training(inputs, criterion, criterion.W)

    return make


def by_hand(loss, *, compiled):
    def arcface(cosine):
        angle = cosine.float().clamp(-1 + 1e-6, 1 - 1e-6).acos()
        return (angle + ANGLE).cos().to(cosine.dtype)

    bends = {"CosFace": lambda cosine: cosine - COSINE_MARGIN, "ArcFace": arcface}

    def make(inputs):
        with torch.device("meta"):
            module = ByHand(bends[loss], inputs.d, inputs.c)
        module.weight = inputs.prototypes
        return training(inputs, torch.compile(module, dynamic=False) if compiled else module)

    return make


def torch_own(*, chunked):
    def make(inputs):
        function = F.linear_cross_entropy
        options = {"options": torch.nn.LinearCrossEntropyOptions()} if chunked else {}

        def loss_of(features, labels):
            return function(features.bfloat16(), inputs.prototypes.bfloat16(), labels, **options)

        return training(inputs, loss_of)

    return make


def liger(*, large):
    def make(inputs):
        from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

        # Its default chunk is N D numbers: two or four rows of a million classes.
        times = max(1, (1 << 29) // (inputs.n * inputs.d)) if large else 1
        accumulate = torch.float32 if large else None

        def loss_of(features, labels):
            # The values in between are defaults: apply takes no keyword arguments.
            defaults = (None, None, -100, 0.0, 0.0, "mean", None, False)
            more = (accumulate, False, False, False, None, None, times)
            halves = features.bfloat16(), inputs.prototypes.bfloat16()
            return LigerFusedLinearCrossEntropyFunction.apply(*halves, labels, *defaults, *more)[0]

        return training(inputs, loss_of)

    return make


def cut_cross_entropy(filtered):
    def make(inputs):
        from cut_cross_entropy import linear_cross_entropy

        def loss_of(features, labels):
            halves = features.bfloat16(), inputs.prototypes.bfloat16()
            return linear_cross_entropy(*halves, labels, filter_eps="high" if filtered else None)

        return training(inputs, loss_of)

    return make


CONTESTANTS = {
    "products, bf16 out": products(torch.bfloat16),
    "products, fp32 out": products(torch.float32),
    "Tammes CosFace fused": tammes_loss("CosFace", "fused"),
    "Tammes ArcFace fused": tammes_loss("ArcFace", "fused"),
    "Tammes CosFace streamed": tammes_loss("CosFace", "streamed"),
    "Tammes ArcFace streamed": tammes_loss("ArcFace", "streamed"),
    "PML CosFace": pml("CosFace"),
    "PML ArcFace": pml("ArcFace"),
    "eager CosFace": by_hand("CosFace", compiled=False),
    "eager ArcFace": by_hand("ArcFace", compiled=False),
    "compiled CosFace": by_hand("CosFace", compiled=True),
    "compiled ArcFace": by_hand("ArcFace", compiled=True),
    "torch linear_cross_entropy": torch_own(chunked=False),
    "torch linear_cross_entropy, chunked": torch_own(chunked=True),
    "cut-cross-entropy, exact": cut_cross_entropy(filtered=False),
    "cut-cross-entropy, filtered": cut_cross_entropy(filtered=True),
    "Liger, chunks of 1 GiB": liger(large=True),
    "Liger": liger(large=False),
}
PRODUCTS = [name for name in CONTESTANTS if name.startswith("products")]
