"""The documented way in: ``from tammes.lab import train, compare, load_model, Config``."""

import subprocess
import sys

import pytest

import tammes.lab
from tammes.lab.config.schema import Config
from tammes.lab.runner.sweep import compare
from tammes.lab.training.loop import train
from tammes.lab.training.model import load_model


def test_public_names_are_those_of_their_modules():
    assert tammes.lab.Config is Config
    assert tammes.lab.compare is compare
    assert tammes.lab.load_model is load_model
    assert tammes.lab.train is train
    assert set(tammes.lab.__all__) <= set(dir(tammes.lab))


def test_importing_the_lab_imports_none_of_its_modules():
    text = "import sys, tammes.lab; print([n for n in sys.modules if n.startswith('tammes.lab.')])"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'tammes.lab' has no attribute 'trian'"):
        _ = tammes.lab.trian
