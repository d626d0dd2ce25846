"""Margin losses in the training loops of other libraries: one module for each.

:mod:`tammes.integrations.sklearn` is a classifier for scikit-learn,
:mod:`tammes.integrations.huggingface` a model for Hugging Face's Trainer and hub,
:mod:`tammes.integrations.sentence_transformers` a loss for Sentence Transformers,
:mod:`tammes.integrations.timm` timm networks with a criterion as classifier,
:mod:`tammes.integrations.lightning` a module for Lightning. Each needs the library that it is named
after; ``import tammes`` imports none of them.
"""
