"""Small launches of the attention over held blocks for compute-sanitizer: `compute-sanitizer python tests/sharded_sanitizer_cases.py`. Not a pytest file."""

from __future__ import annotations

from test_sharded import DECODING, decoding, test_attention_over_held_blocks_has_the_bits_of_two_launches

from cudnn_graphs.engines.held_paged import HeldDesign
from cudnn_graphs.runtime.devices import device_facts

CASES = ("as it is", "causal", "many requests")


def main() -> None:
    served = [name for name in CASES if HeldDesign.of(decoding(**DECODING[name]).signature().lower(), device_facts("cuda"), 2) is not None]
    for name in served:
        test_attention_over_held_blocks_has_the_bits_of_two_launches(DECODING[name])
    print(f"ran {len(served)} cases, all right")


if __name__ == "__main__":
    main()
