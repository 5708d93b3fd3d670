"""`neuron-push key`: a new key for the side channel, on standard output."""

from __future__ import annotations

import argparse
import sys

import zmq


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command: none."""
    parser.description = (
        "Print a new key for side_channel_keys: (umask 077; neuron-push key > FILE). "
        "A second line is accepted too, which is how keys are rotated."
    )


def main(args: argparse.Namespace) -> int:
    """Print one key."""
    _, secret = zmq.curve_keypair()
    sys.stdout.write(f"{secret.decode()}\n")
    return 0
