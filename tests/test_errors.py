"""The commands that errors advise."""

from importlib import metadata

import pytest

from chairlift.errors import pip_install, pip_install_with_torch


@pytest.mark.parametrize(
    ("installed", "extra", "with_torch", "with_extra_and_torch"),
    [
        ("chairlift", "pip install 'chairlift[png]'", "pip install chairlift", "pip install 'chairlift[nvml]'"),
        (
            "chairlift-cpu",
            "pip install 'chairlift-cpu[png]'",
            "pip uninstall -y chairlift-cpu && pip install chairlift",
            "pip uninstall -y chairlift-cpu && pip install 'chairlift[nvml]'",
        ),
    ],
)
def test_packages_are_added_to_the_distribution_that_is_installed(monkeypatch, installed, extra, with_torch, with_extra_and_torch):
    def distribution(name):
        if name != installed:
            raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    assert pip_install("png") == extra
    assert pip_install_with_torch() == with_torch
    assert pip_install_with_torch("nvml") == with_extra_and_torch
