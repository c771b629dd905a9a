"""The public operations: one file each, validate -> signature -> plan -> run."""

from .merge_states import merge_attention_states
from .paged_block_sparse import BlockSparsePagedTSWrapper, block_sparse_attention_with_paged_kv_cache
from .paged_signature import PagedBlockSparseSignature
from .qsa_metadata import QsaMetadata, build_qsa_metadata, select_qsa_blocks
from .query_sparse import QuerySparseSignature, qsa_forward, qsa_indexed_forward
from .sage_block_sparse import bsa_attn_sm120_blk64_sage_fwd, sage_block_sparse_attention
from .sage_quantize import SageTensors, convert_sage_v_layout, quantize_sage_qkv
from .sage_signature import SageBlockSparseSignature
from .select_blocks import select_blocks

__all__ = ["BlockSparsePagedTSWrapper", "PagedBlockSparseSignature", "block_sparse_attention_with_paged_kv_cache",
           "merge_attention_states", "SageBlockSparseSignature", "SageTensors", "bsa_attn_sm120_blk64_sage_fwd", "convert_sage_v_layout",
           "quantize_sage_qkv", "sage_block_sparse_attention", "select_blocks", "QsaMetadata", "QuerySparseSignature",
           "build_qsa_metadata", "qsa_forward", "qsa_indexed_forward", "select_qsa_blocks"]
