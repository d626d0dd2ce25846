"""A scikit-learn classifier that learns an embedding and class prototypes with a margin loss."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tammes.criterion.criterion import Criterion
from tammes.lab.config import parse_head, parse_loss
from tammes.metrics.functional import energy_score
from tammes.optional import require
from tammes.terms import Loss

if TYPE_CHECKING:
    import numpy as np
    from sklearn.base import (
        BaseEstimator,
        ClassifierMixin,
        ClassNamePrefixFeaturesOutMixin,
        TransformerMixin,
    )
    from sklearn.utils.class_weight import compute_sample_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import (
        _check_sample_weight,
        check_is_fitted,
        check_random_state,
        validate_data,
    )
else:
    _base = require("sklearn.base", extra="sklearn")
    BaseEstimator, ClassifierMixin = _base.BaseEstimator, _base.ClassifierMixin
    ClassNamePrefixFeaturesOutMixin = _base.ClassNamePrefixFeaturesOutMixin
    TransformerMixin = _base.TransformerMixin
    _validation = require("sklearn.utils.validation", extra="sklearn")
    _check_sample_weight = _validation._check_sample_weight
    check_is_fitted, validate_data = _validation.check_is_fitted, _validation.validate_data
    check_random_state = _validation.check_random_state
    compute_sample_weight = require(
        "sklearn.utils.class_weight", extra="sklearn"
    ).compute_sample_weight
    check_classification_targets = require(
        "sklearn.utils.multiclass", extra="sklearn"
    ).check_classification_targets
    np = require("numpy", extra="sklearn")

__all__ = ["MarginClassifier"]

_ROWS = 4096
"""Rows that are embedded at a time when predicting."""


class MarginClassifier(
    ClassNamePrefixFeaturesOutMixin, ClassifierMixin, TransformerMixin, BaseEstimator
):
    """Classifier that learns an embedding and a prototype for each class with a margin loss.

    The network is linear, or has hidden layers with ReLU; it is trained with AdamW and a cosine
    learning rate schedule. Everything is computed in the dtype of ``X``, float64 or float32.
    Features should have similar scales, for example by
    :class:`sklearn.preprocessing.StandardScaler`. Sparse matrices stay sparse.

    Args:
        loss: a loss as text, such as ``"arcface(margin=0.3) + 0.5*sample_margin()"``
            (``tammes losses`` lists them), or made of terms, such as ``tammes.arcface()``.
        head: the head as text, such as ``"cosine(scale=30)"``; ``"auto"`` is the usual head of the
            loss, with the recommended scale.
        embedding_size: size of an embedding.
        hidden_layer_sizes: sizes of the hidden layers between the input and the embedding.
        epochs: passes over the training examples.
        batch_size: largest number of examples in a step. If all examples fit in one step, a weight
            of 2 is the same as repeating an example.
        learning_rate: initial learning rate.
        weight_decay: weight decay of network and prototypes.
        class_weight: weight of each class's examples as a dictionary, or ``"balanced"``.
        device: where to train and predict, such as ``"cuda"``.
        random_state: seed, numpy generator, or ``None``.

    Attributes:
        classes_: labels, in the order of the prototypes.
        network_: module that computes the embeddings.
        criterion_: :class:`tammes.Criterion` with the prototypes.
        loss_curve_: mean loss of each epoch.
        n_features_in_: number of features.

    Example:
        >>> from sklearn.datasets import load_digits
        >>> from sklearn.pipeline import make_pipeline
        >>> from sklearn.preprocessing import StandardScaler
        >>> from tammes.integrations.sklearn import MarginClassifier
        >>> X, y = load_digits(return_X_y=True)
        >>> model = make_pipeline(StandardScaler(), MarginClassifier(epochs=5, random_state=0))
        >>> model.fit(X[:1000], y[:1000]).score(X[1000:], y[1000:]) > 0.85
        True
    """

    def __init__(
        self,
        loss: str | Loss = "cosface(margin=0.2)",
        *,
        head: str = "auto",
        embedding_size: int = 128,
        hidden_layer_sizes: Sequence[int] = (),
        epochs: int = 50,
        batch_size: int = 256,
        learning_rate: float = 0.01,
        weight_decay: float = 0.01,
        class_weight: Mapping[Any, float] | str | None = None,
        device: str = "cpu",
        random_state: Any = None,
    ) -> None:
        self.loss = loss
        self.head = head
        self.embedding_size = embedding_size
        self.hidden_layer_sizes = hidden_layer_sizes
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.class_weight = class_weight
        self.device = device
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "MarginClassifier":
        """Train on labelled examples.

        Args:
            X: array or sparse matrix, shape ``(N, D)``.
            y: labels, shape ``(N,)``.
            sample_weight: weight of each example, shape ``(N,)``; 0 leaves it out.
        """
        self._check_settings()
        X, y = validate_data(self, X, y, **self._input(np.float64, np.float32))
        check_classification_targets(y)
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        self.classes_, labels = np.unique(y, return_inverse=True)
        there = np.flatnonzero(weights)
        X, y, labels, weights = X[there], y[there], labels[there], weights[there]
        counts = np.bincount(labels, minlength=len(self.classes_))
        if (counts > 0).sum() < 2:
            raise ValueError(
                "MarginClassifier expects examples of at least 2 classes (with a weight above 0), "
                f"got {(counts > 0).sum()} class"
            )
        weights = weights * compute_sample_weight(self.class_weight, y)
        weights = torch.from_numpy(weights * (len(weights) / weights.sum()))

        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        dtype = torch.from_numpy(np.empty(0, X.dtype)).dtype
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._build(counts.tolist())
        self.network_.to(self.device, dtype).train()
        self.criterion_.to(self.device, dtype).train()
        self._train(X, torch.from_numpy(labels), weights.to(dtype), seed)
        self.network_.eval()
        self.criterion_.eval()
        return self

    def _check_settings(self) -> None:
        for name in ("embedding_size", "epochs", "batch_size"):
            value = getattr(self, name)
            if not _is_count(value):
                raise ValueError(
                    f"MarginClassifier expects {name} to be a whole number of 1 or more, "
                    f"got {value!r}"
                )
        layers = self.hidden_layer_sizes
        if not isinstance(layers, Sequence | np.ndarray) or not all(map(_is_count, layers)):
            raise ValueError(
                "MarginClassifier expects hidden_layer_sizes to be a sequence of whole numbers of "
                f"1 or more, got {layers!r}"
            )
        if not isinstance(self.loss, str | Loss):
            raise TypeError(
                "MarginClassifier expects a loss as text or made of terms, such as "
                f"tammes.cosface(), got {type(self.loss).__name__}"
            )

    @staticmethod
    def _input(*dtypes: Any) -> dict[str, Any]:
        return {"accept_sparse": "csr", "dtype": dtypes, "order": "C"}

    def _build(self, counts: list[int]) -> None:
        sizes = [*self.hidden_layer_sizes, self.embedding_size]
        layers: list[nn.Module] = [_InputLayer(self.n_features_in_, sizes[0])]
        for before, after in pairwise(sizes):
            layers += [nn.ReLU(), nn.Linear(before, after)]
        self.network_ = nn.Sequential(*layers)
        loss = parse_loss(self.loss, counts=counts) if isinstance(self.loss, str) else self.loss
        if all(term.definition.on != "split" for _, term in loss.leaves()):
            raise ValueError(
                "MarginClassifier expects a loss with a term that classifies, such as softmax(), "
                f"got {loss!r}"
            )
        head = parse_head(self.head, loss, self.embedding_size, len(counts))
        # Weights are normalised over all examples, not within a batch.
        self.criterion_ = Criterion(head, loss, reduction="sum", validate=None)
        self._n_features_out = self.embedding_size

    def _train(self, X: Any, labels: Tensor, weights: Tensor, seed: int) -> None:
        groups = self.criterion_.param_groups(
            self.network_, lr=self.learning_rate, weight_decay=self.weight_decay
        )
        optimizer = torch.optim.AdamW(groups, fused=True)
        generator = torch.Generator().manual_seed(seed)
        parts = -(-len(labels) // self.batch_size)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs * parts)
        self.loss_curve_ = []
        for epoch in range(self.epochs):
            order = torch.randperm(len(labels), generator=generator)
            total = torch.zeros((), dtype=weights.dtype, device=self.device)
            for index in order.tensor_split(parts):
                batch = _Rows.of(X[index.numpy()]).to(self.device)
                loss = self.criterion_(
                    self.network_(batch),
                    labels[index].to(self.device),
                    weights=weights[index].to(self.device),
                )
                optimizer.zero_grad()
                (loss / len(index)).backward()
                optimizer.step()
                schedule.step()
                total += loss.detach()
            self.loss_curve_.append(float(total) / len(labels))
            if not np.isfinite(self.loss_curve_[-1]):
                raise ValueError(
                    f"MarginClassifier diverged in epoch {epoch + 1}: "
                    f"try a learning_rate below {self.learning_rate}, or scale the features"
                )

    def _embeddings(self, X: Any) -> Iterator[Tensor]:
        """Embed a block of rows at a time."""
        check_is_fitted(self)
        dtype = np.dtype(str(self.network_[0].weight.dtype).removeprefix("torch."))
        X = validate_data(self, X, reset=False, **self._input(dtype))
        with torch.no_grad():
            for start in range(0, X.shape[0], _ROWS):
                yield self.network_(_Rows.of(X[start : start + _ROWS]).to(self.device))

    def _logits(self, X: Any) -> Tensor:
        with torch.no_grad():
            return torch.cat([self.criterion_.logits(part).cpu() for part in self._embeddings(X)])

    def transform(self, X: Any) -> Any:
        """Embed examples; shape ``(N, embedding_size)``."""
        return torch.cat([part.cpu() for part in self._embeddings(X)]).numpy()

    def decision_function(self, X: Any) -> Any:
        """Scores of the classes without margin, shape ``(N, C)``.

        With two classes, the score of the second minus that of the first, shape ``(N,)``.
        """
        logits = self._logits(X)
        return (logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits).numpy()

    def predict_proba(self, X: Any) -> Any:
        """Softmax of the scores, shape ``(N, C)``; no better calibrated than any network's."""
        return self._logits(X).softmax(1).numpy()

    def predict(self, X: Any, reject: float | None = None, unknown: Any = None) -> Any:
        """Predict labels, and reject examples of unknown classes.

        Args:
            X: shape ``(N, D)``.
            reject: reject examples whose :meth:`known_score` is below this threshold, such as that
                of :meth:`rejection_threshold`. By default nothing is rejected.
            unknown: label of rejected examples; by default ``"unknown"`` if labels are strings, and
                -1 if they are numbers.

        Returns:
            Labels, shape ``(N,)``.
        """
        logits = self._logits(X)
        labels = self.classes_[logits.argmax(1).numpy()]
        if reject is None:
            return labels
        if unknown is None:
            unknown = -1 if np.issubdtype(labels.dtype, np.number) else "unknown"
        if unknown in self.classes_:
            raise ValueError(
                "predict expects a label for unknown that is not among the classes, "
                f"got {unknown!r}"
            )
        label = np.asarray(unknown)
        number = [np.issubdtype(kind, np.number) for kind in (label.dtype, labels.dtype)]
        text = [kind.kind in "SU" for kind in (label.dtype, labels.dtype)]
        # numpy would convert numbers next to a string to strings.
        dtype = np.result_type(label, labels) if all(number) or all(text) else object
        rejected = energy_score(logits).numpy() < reject
        return np.where(rejected, label.astype(dtype), labels.astype(dtype))

    def known_score(self, X: Any) -> Any:
        """Score that is higher for examples of the known classes: the energy of the scores.

        Returns:
            The logarithm of the summed exponentials of the scores, shape ``(N,)``; see
            :func:`tammes.metrics.functional.energy_score`.
        """
        return energy_score(self._logits(X)).numpy()

    def rejection_threshold(self, X: Any, recall: float = 0.95) -> float:
        """Return the highest threshold at which enough examples of known classes are kept.

        Args:
            X: held-out examples of known classes, shape ``(N, D)``: training examples have higher
                scores, and a threshold from them would reject too many others.
            recall: fraction of them to keep.
        """
        if not 0 < recall <= 1:
            raise ValueError(f"rejection_threshold expects 0 < recall <= 1, got {recall}")
        scores = np.sort(self.known_score(X))[::-1]
        # In floating point, 0.55 * 100 is slightly above 55.
        kept = max(int(np.ceil(recall * len(scores) * (1 - 1e-9))), 1)
        return float(scores[kept - 1])

    def __sklearn_tags__(self) -> Any:
        """Declare that sparse matrices are accepted."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and bool(value >= 1)


class _Rows:
    """Rows of a matrix as tensors; for a sparse one, only the stored entries."""

    def __init__(self, values: Tensor, columns: Tensor | None, starts: Tensor | None) -> None:
        self.values, self.columns, self.starts = values, columns, starts

    @classmethod
    def of(cls, rows: Any) -> "_Rows":
        if isinstance(rows, np.ndarray):
            return cls(torch.tensor(rows), None, None)
        return cls(
            torch.tensor(rows.data),
            torch.tensor(rows.indices, dtype=torch.long),
            torch.tensor(rows.indptr[:-1], dtype=torch.long),
        )

    def to(self, device: str) -> "_Rows":
        if self.columns is None or self.starts is None:
            return _Rows(self.values.to(device), None, None)
        return _Rows(self.values.to(device), self.columns.to(device), self.starts.to(device))


class _InputLayer(nn.Module):
    """Linear layer for dense and sparse rows; initially, it preserves norms on average."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(in_features, out_features) / out_features**0.5)
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, rows: _Rows) -> Tensor:
        if rows.columns is None:
            return rows.values @ self.weight + self.bias
        sums = nn.functional.embedding_bag(
            rows.columns,
            self.weight,
            rows.starts,
            per_sample_weights=rows.values,
            mode="sum",
        )
        return sums + self.bias
