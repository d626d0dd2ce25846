"""Train on 1,028 Omniglot characters, recognise 423 new ones from one or five drawings.

    python examples/fewshot_omniglot.py

Needs `tammes[lab]`, and Omniglot in $TAMMES_DATA or from the Hugging Face hub. Takes a minute on
two cores; the run is kept in runs/omniglot.
"""

from tammes.lab import Config, train
from tammes.lab.fewshot.features import from_run
from tammes.lab.fewshot.protocol import evaluate

config = Config(data="omniglot", classes="omniglot:base", image_size=28, epochs=3, batch_size=128,
                backbone="conv4(width=0.5)", head="linear(bias=False)", optimizer="adam", lr=3e-3,
                loss="softmax() + proto()", sampler="episodes(way=16, shot=8)")  # fmt: skip
run = train(config, "runs/omniglot")
for row in evaluate(from_run(run.folder, classes="omniglot:novel"), shots=(1, 5), episodes=2000):
    print(f"{row.method:<10}{row.shot}-shot   {row.accuracy.shown()} %")
