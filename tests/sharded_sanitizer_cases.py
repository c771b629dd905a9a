"""Small launches of the attention over held blocks for compute-sanitizer: `compute-sanitizer python tests/sharded_sanitizer_cases.py`. Not a pytest file."""

from __future__ import annotations

from test_sharded import DECODING, test_attention_over_held_blocks_has_the_bits_of_two_launches

CASES = ("as it is", "causal", "many requests")


def main() -> None:
    for name in CASES:
        test_attention_over_held_blocks_has_the_bits_of_two_launches(DECODING[name])
    print(f"ran {len(CASES)} cases, all right")


if __name__ == "__main__":
    main()
