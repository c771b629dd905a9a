"""torch.ops.cudnn_graphs.*: what torch.library checks of an operator, compiled calls, shapes without data, and no backward."""

import subprocess
import sys

import pytest
import torch
from cases_qsa import bitmap_indices, packed_batch, qkv, random_bitmap
from paged_cases import PagedCase
from sage_cases import SageCase

import cudnn_graphs.ops.torch_operators  # noqa: F401 - registers
from cudnn_graphs import BlockSparsePagedTSWrapper, default_store, qsa_forward, qsa_indexed_forward, sage_block_sparse_attention

OPERATORS = torch.ops.cudnn_graphs


def paged(**facts):
    case = PagedCase(**facts).make()
    cache = (case.cache[:, 0], case.cache[:, 1]) if case.kv_layout == "combined" else case.cache
    tensors = (case.q, *cache, case.page_indptr, case.page_indices, case.seq_lens, case.block_indptr, case.block_indices, case.block_tables, case.valid_bits)
    sizes = dict(q_block_size=case.q_block_size, kv_block_size=case.kv_block_size, max_seq_len_kv=case.max_seq_len_kv, mask_type=case.mask_type)

    def eager():
        wrapper = BlockSparsePagedTSWrapper()
        names = ("kv_layout", "page_stride", "page_table", "shared_pattern")
        wrapper.plan(case.batch, case.seq_len_q, case.max_seq_len_kv, case.num_qo_heads, case.num_kv_heads, case.head_dim, case.q_block_size,
                     case.kv_block_size, case.page_size, device="cpu", use_kv_valid_bits=case.bits, mask_type=case.mask_type, q_data_type=case.dtype,
                     return_lse=True, **{name: getattr(case, name) for name in names})
        positional, keywords = case.arguments()
        return wrapper.run(*positional, **keywords)
    return OPERATORS.paged_block_sparse_attention, tensors, sizes, eager


def sage(**facts):
    case = SageCase(**facts).make()
    inputs = (case.q, case.k, case.v, case.q_scale, case.k_scale, case.v_scale, case.index, case.count, case.sizes, case.nums)
    settings = dict(v_layout=case.v_layout, uniform_block_count=case.uniform, contiguous_block_indices=case.contiguous)
    return OPERATORS.sage_block_sparse_attention, inputs, settings, lambda: sage_block_sparse_attention(*inputs, **settings, return_lse=True)


def qsa(source, scale):
    metadata = packed_batch(2, 16)
    q, k, v = qkv(metadata.lo.numel())
    bitmap = random_bitmap(metadata, 0.5)
    if source == "bitmap":
        inputs = (q, k, v, bitmap, *metadata, scale)
        return OPERATORS.qsa_forward, inputs, {}, lambda: qsa_forward(*inputs)
    inputs = (q, k, v, bitmap_indices(bitmap, metadata, 40), scale)
    return OPERATORS.qsa_indexed_forward, inputs, {}, lambda: qsa_indexed_forward(*inputs)


CALLS = {
    "paged": lambda: paged(),
    "paged, everything": lambda: paged(kv_layout="combined", page_table="block_tables", bits=True, mask_type="causal", shared_pattern=True, strided_q=True),
    "sage": lambda: sage(),
    "sage, everything": lambda: sage(counts=True, sizes_rank=3, v_layout="interleaved16"),
    "sage, contiguous": lambda: sage(uniform=True, contiguous=True),
    "qsa bitmap": lambda: qsa("bitmap", 1 / 16),
    "qsa indices": lambda: qsa("indices", -0.125),
}


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]()


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    """All cases compile one function of this file, and dynamo bounds how often one is compiled."""
    torch.compiler.reset()


def equal(got, want):
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.fixture
def comparable_fp8(monkeypatch):
    """opcheck compares inputs before and after with torch.allclose, which has no float8."""
    allclose = torch.allclose
    monkeypatch.setattr(torch, "allclose", lambda a, b, **how: (
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.dtype == torch.float8_e4m3fn else allclose(a, b, **how)))


def test_opcheck(call, comparable_fp8):
    operator, inputs, settings, _ = call
    assert set(torch.library.opcheck(operator.default, inputs, settings).values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_whole_it_equals_the_function(call, backend):
    operator, inputs, settings, eager = call

    @torch.compile(fullgraph=True, backend=backend)
    def compiled(*inputs):
        out, *others = operator(*inputs, **settings)
        return out.float() + 1, *others

    out, *others = eager()
    equal(operator(*inputs, **settings), (out, *others))
    equal(compiled(*inputs), (out.float() + 1, *others))


def test_any_length_runs_on_one_compiled_graph():
    operator = OPERATORS.qsa_indexed_forward
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda *inputs: operator(*inputs), fullgraph=True, backend=count, dynamic=True)
    for tokens in (9, 30, 57):
        q, k, v = qkv(tokens)
        indices = torch.randint(-1, tokens, (tokens, 8), dtype=torch.int32)
        equal(compiled(q, k, v, indices), qsa_indexed_forward(q, k, v, indices))
    assert len(graphs) == 1


def test_meta_tensors_give_shapes_dtypes_and_devices(call):
    operator, inputs, settings, eager = call
    got = operator(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in inputs), **settings)
    for fake, real in zip(got, eager(), strict=True):
        assert fake.is_meta and fake.shape == real.shape and fake.dtype == real.dtype and fake.stride() == real.stride()


def test_a_cuda_graph_is_traced_without_a_gpu():
    from torch._subclasses.fake_tensor import FakeTensorMode
    operator, inputs, settings, _ = paged()
    with FakeTensorMode():
        out, lse = operator(*(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") if isinstance(x, torch.Tensor) else x for x in inputs),
                            **settings)
    assert out.device.type == lse.device.type == "cuda"


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_backward_raises_and_forward_does_not(call, backend):
    operator, inputs, settings, eager = call
    inputs = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) and x.dtype in (torch.bfloat16, torch.float32) else x for x in inputs]
    run = torch.compile(lambda *inputs: operator(*inputs, **settings), fullgraph=True, backend=backend) if backend else lambda *a: operator(*a, **settings)
    got = run(*inputs)
    equal([x.detach() for x in got], eager())
    for i in (0, -1):
        with pytest.raises(NotImplementedError, match="the operators register no autograd"):
            got[i].nan_to_num().sum().backward(retain_graph=True)
    with torch.no_grad():
        assert not any(x.requires_grad for x in run(*inputs))


def test_the_plan_is_the_default_stores_and_a_hit_in_steady_state(call):
    operator, inputs, settings, _ = call
    operator(*inputs, **settings)
    before = default_store().stats()
    for _ in range(3):
        operator(*inputs, **settings)
    after = default_store().stats()
    assert (after.hits - before.hits, after.builds, after.misses) == (3, before.builds, before.misses)


def test_errors_are_the_operations():
    operator, inputs, settings, _ = paged()
    with pytest.raises(ValueError, match="kv_block_size: got 24"):
        operator(*inputs, **{**settings, "kv_block_size": 24})
    with pytest.raises(ValueError, match="k_cache|paged_kv_cache"):
        operator(*inputs[:2], inputs[2].half(), *inputs[3:], **settings)


def test_importing_the_package_registers_nothing():
    code = "import torch, cudnn_graphs; cudnn_graphs.qsa_forward; print(hasattr(torch.ops.cudnn_graphs, 'qsa_forward'), end=' '); " \
           "import cudnn_graphs.ops.torch_operators; print(hasattr(torch.ops.cudnn_graphs, 'qsa_forward'), torch.cuda.is_initialized())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["False", "True", "False"], done.stderr


# -- on a GPU -----------------------------------------------------------------------------------------

ON_CUDA = {"paged": OPERATORS.paged_block_sparse_attention, "sage": OPERATORS.sage_block_sparse_attention, "qsa": OPERATORS.qsa_forward,
           "qsa_indexed": OPERATORS.qsa_indexed_forward}


@pytest.fixture
def cuda_call(request, monkeypatch):
    """An operator, its inputs and settings on the device, and what the plan that the operator will take gives for them."""
    from gpu_operations import OPERATIONS, cubins_of_operations, inputs_of
    monkeypatch.setattr(default_store(), "cubins", cubins_of_operations())
    name = request.param
    signature, tensors = inputs_of(name, "portable", 0)
    want = tuple(OPERATIONS[name].run(default_store().get(signature, "cuda"), tensors).values())
    positional, keywords = OPERATIONS[name].arguments(tensors)
    settings = {}
    if name == "paged":
        q, cache, *metadata = positional
        positional = (q, *cache, *metadata, None, keywords["kv_valid_bits"])
        settings = {field: getattr(signature, field) for field in ("q_block_size", "kv_block_size", "max_seq_len_kv", "mask_type")}
    return ON_CUDA[name], positional, settings, want


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_call", ON_CUDA, indirect=True)
def test_opcheck_on_cuda(cuda_call, comparable_fp8):
    operator, inputs, settings, _ = cuda_call
    assert set(torch.library.opcheck(operator.default, inputs, settings).values()) == {"SUCCESS"}


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_call", ON_CUDA, indirect=True)
def test_compiled_whole_on_cuda(cuda_call):
    operator, inputs, settings, want = cuda_call

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(*inputs):
        out, *others = operator(*inputs, **settings)
        return out.float() + 1, *others

    before = default_store().stats().builds
    equal(operator(*inputs, **settings), want)
    equal(compiled(*inputs), (want[0].float() + 1, *want[1:]))
    assert default_store().stats().builds == before, "the operator took another plan"
