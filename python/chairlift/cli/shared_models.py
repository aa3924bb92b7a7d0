"""The flag `--models` of the commands that simulate."""

from __future__ import annotations

import argparse

from chairlift.cli import flags
from chairlift.server.model_specs import read_models
from chairlift.sim.models import SharedModel


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--models`."""
    parser.add_argument("--models", metavar="FILE", help="several models, in a file as for 'chairlift serve --models'")


def read(args: argparse.Namespace) -> list[SharedModel]:
    """The models in the file of `--models`. Raises InvalidSetting, also beside `--model`."""
    flags.reject("the models are in the file of --models", model=args.model)
    specs = read_models(args.models, args.engine, args.server)
    return [SharedModel(spec.name, spec.config, spec.aliases, spec.weight) for spec in specs]
