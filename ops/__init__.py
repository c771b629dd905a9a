"""The public operations: one file each, validate -> signature -> plan -> run."""

from .paged_block_sparse import BlockSparsePagedTSWrapper, block_sparse_attention_with_paged_kv_cache
from .paged_signature import PagedBlockSparseSignature

__all__ = ["BlockSparsePagedTSWrapper", "PagedBlockSparseSignature", "block_sparse_attention_with_paged_kv_cache"]
