"""python -m cudnn_graphs plans|env|device-props: what is cached, what can run here, what this GPU is.

Exit status: 0; 1 where `plans verify` found damage; 2 where what was asked for is not here.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch

from .ops import PagedBlockSparseSignature, QuerySparseSignature, SageBlockSparseSignature
from .planning import inspect
from .planning.machine import machine_report, machine_tables
from .planning.tables import PlainConsole, until_the_reader_leaves

PLAIN = (
    PagedBlockSparseSignature(batch_size=1, seq_len_q=64, max_seq_len_kv=1024, num_qo_heads=8, num_kv_heads=1, head_dim=128, q_block_size=64,
                              kv_block_size=64, page_size=64),
    SageBlockSparseSignature(batch_size=1, num_heads=1, seq_len_q=64, seq_len_k=1024, capacity=4),
    QuerySparseSignature(num_qo_heads=12, num_kv_heads=1),
)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m cudnn_graphs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    inspect.add_commands(commands.add_parser("plans", help="list, show, verify, diff or clear the plans of a store"))
    env = commands.add_parser("env", help="versions, devices, engines usable here and why not")
    env.add_argument("--json", action="store_true", help="print JSON")
    props = commands.add_parser("device-props", help="this GPU's properties as cuDNN serializes them, to build plans for it where it is not")
    props.add_argument("--device", type=int, default=0, metavar="INDEX", help="default: 0")
    options = parser.parse_args(arguments)
    if options.command == "plans":
        return inspect.run(options)
    return _env(options.json) if options.command == "env" else _device_props(options.device)


def _env(as_json: bool) -> int:
    report = machine_report(PLAIN)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        PlainConsole().print(machine_tables(report))
    return 0


def _device_props(index: int) -> int:
    try:
        import cudnn
    except ImportError:
        print("device-props: got no cudnn module; need nvidia-cudnn-frontend; pip install 'cudnn-graphs[cuda13]' (or cuda12)", file=sys.stderr)
        return 2
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not 0 <= index < devices:
        print(f"device-props: got device {index} of {devices}; need a CUDA device; run it on the machine that has one", file=sys.stderr)
        return 2
    print(cudnn.create_device_properties(index).serialize())
    return 0


if __name__ == "__main__":
    sys.exit(until_the_reader_leaves(main))
